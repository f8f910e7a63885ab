"""Text from a language model: `python -m jojax.generate --workdir DIR [--prompt TEXT | --prompt_file FILE]
[--tokens N] [--temperature T] [--top_k K] [--top_p P] [--seed N]`.

A prompt is read as the beginning of a document, to the byte. Documents have no token of their own in front; so without
a prompt, the first token is drawn from those that documents of the train split begin with. The text ends where the
document does, or after N tokens; the same seed gives the same text.

The prompt goes through the model in chunks of one size, filled up from the left by a document of its own (packing
keeps the two apart), then token by token, on the cache of `jojax.models.lm`: two compilations whatever the prompt.
"""

import codecs
import dataclasses
import functools
import itertools
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from jojax import cli, evaluate, task
from jojax.data import corpus
from jojax.errors import UserError
from jojax.models.attention import EMPTY

CHUNK = 64  # sites; prompts and caches are multiples of it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn. `temperature` 0: always the likeliest; top_k: among so many likeliest (0 = all); top_p:
    among the fewest likeliest that have so much probability together, after temperature and top_k."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, good, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            ("seed", 0 <= self.seed < 2**32, "0 … 2³²-1"),
        ):
            if not good:
                raise UserError(f"--{name}={getattr(self, name)} must be {rule}")

    def arguments(self):
        return jnp.float32(self.temperature), jnp.int32(self.top_k), jnp.float32(self.top_p)


@jax.jit
def sample(key, logits, temperature, top_k, top_p):
    """An id from logits [V], float32; see Sampling."""
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)
    return jnp.where(temperature > 0, jax.random.categorical(key, kept(scaled, top_k, top_p)), logits.argmax(-1))


def kept(logits, top_k, top_p):
    """Logits [V] with −∞ for what top_k and top_p leave out; of equals, lower ids go first."""
    order = jnp.argsort(-logits, stable=True)
    rank = jnp.argsort(order)
    logits = jnp.where((top_k == 0) | (rank < top_k), logits, -jnp.inf)
    p = jax.nn.softmax(logits)[order]
    before = jnp.cumsum(p) - p
    return jnp.where(((before < top_p) | (top_p >= 1))[rank], logits, -jnp.inf)


class Writer:
    """Draws tokens from a task's model; what is compiled serves all prompts that need caches of one size."""

    def __init__(self, job: task.Text, params, mesh):
        self.job, self.params, self.mesh = job, params, mesh
        self.tokenizer = corpus.open_tokenizer(job.config.data)
        self._step = jax.jit(
            self._advance,
            static_argnames="capacity",
            donate_argnums=1,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    def tokens(self, prompt, count, sampling=Sampling()):
        """Up to `count` ids that follow the ids of `prompt`, as they are drawn; ends before the end of the document."""
        if count < 1:
            raise UserError(f"--tokens={count} must be 1 or above")
        key = jax.random.key(sampling.seed)
        if not len(prompt):
            prompt, count = [int(self._first(jax.random.fold_in(key, 0), sampling))], count - 1
            yield prompt[0]
        n = len(prompt)
        chunk, capacity = self._sizes(n, count)
        pad = -n % chunk
        given = np.pad(np.asarray(prompt, np.int32), (pad, 0)).reshape(-1, 1, chunk)
        past = jax.device_put(self._fresh(capacity), NamedSharding(self.mesh, PartitionSpec()))
        settings = sampling.arguments()
        for ids in given:
            token, past = self._step(self.params, past, ids, pad, key, settings, capacity=capacity)
        for left in range(count, 0, -1):
            if int(token) == self.tokenizer.eos:
                return
            yield int(token)
            if left > 1:
                token, past = self._step(self.params, past, token[None, None], pad, key, settings, capacity=capacity)

    def _sizes(self, n, count):
        """(sites of a chunk, sites of the cache) for n ids and `count` more, the last of which is not read again."""
        sites = n + count - 1
        if not self.job.model.encoding(parent=None).BOUNDED_LENGTH:
            return CHUNK, -(-n // CHUNK) * CHUNK + -(-count // CHUNK) * CHUNK
        most = self.job.config.data.length
        if sites > most:
            raise UserError(
                f"encoding {task.label(self.job.config)} is a table of {most} positions: a prompt of {n} tokens "
                f"and --tokens={count} need {sites}; shorten them"
            )
        return n, most

    def _fresh(self, capacity):
        """The past of a model that has read nothing: zeros start a sequence."""
        zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), self._past(capacity))
        return zeros | {"segment": jnp.full_like(zeros["segment"], EMPTY)}

    @functools.cached_property
    def _past(self):
        """Its shapes, of a capacity."""

        def shapes(capacity):
            call = functools.partial(self.job.apply, capacity=capacity, rngs=task.evaluation_rngs())
            return jax.eval_shape(call, self.params, jnp.zeros((1, 1), jnp.int32))[1]

        return functools.cache(shapes)

    def _advance(self, params, past, ids, pad, key, settings, *, capacity):
        """ids [1, L] read after `past` -> the id drawn to follow them, the new past; `pad` sites precede the text."""
        at = past["at"] + jnp.arange(ids.shape[1])[None] - pad
        document = jnp.where(at < 0, -1, 0)
        where = dict(position=jnp.maximum(at, 0), segment=document, past=past, capacity=capacity)
        logits, past = self.job.apply(params, ids, **where, rngs=task.evaluation_rngs())
        key = jax.random.fold_in(key, at[0, -1] + 1)  # a draw belongs to a place in the text
        return sample(key, logits[0, -1, : self.tokenizer.vocab_size], *settings), past

    def _first(self, key, sampling):
        """Drawn from the first tokens of the train split's documents."""
        text = self.job.corpus("train")
        seen = np.bincount(text.tokens[text.starts[:-1]], minlength=self.tokenizer.vocab_size)
        return sample(key, jnp.log(jnp.asarray(seen, jnp.float32)), *sampling.arguments())


def pieces(tokenizer, ids):
    """The text of a stream of ids, in pieces that hold whole characters; broken UTF-8 is replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        yield decoder.decode(tokenizer.to_bytes([i]))
    yield decoder.decode(b"", final=True)


def load(workdir):
    """The Writer of a run's newest checkpoint. UserError: no such run, or one of a vision model."""
    result, config, job, params, mesh = evaluate.restore(workdir)
    if job.unit != "tokens":
        raise UserError(f"{workdir} holds a vision model: text comes from a run of a language model")
    if config.data.tokenizer == "bpe":  # it is trained on the data
        job.check_data(result.get("data"), f"{workdir} was trained with: put it back")
    return Writer(job, params, mesh)


def read_prompt(text, path):
    """The prompt as text that can be encoded. UserError: both given, or no UTF-8."""
    if text and path:
        raise UserError("--prompt and --prompt_file are both given: choose one")
    try:
        text = Path(path).read_bytes().decode() if path else text
        text.encode()
    except OSError as error:
        raise UserError(f"--prompt_file={path} can't be read ({error.strerror}): give a text file") from None
    except UnicodeError:
        raise UserError(f"{f'--prompt_file={path}' if path else '--prompt'} is not UTF-8: convert it") from None
    return text


def main(_):
    FLAGS = flags.FLAGS
    sampling = Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p, FLAGS.seed)
    text = read_prompt(FLAGS.prompt, FLAGS.prompt_file)
    cli.keep_compiled()
    writer = load(FLAGS.workdir)
    prompt = writer.tokenizer.encode_documents([text])[0][:-1]
    times = []

    def timed(ids):
        for i in ids:
            times.append(time.perf_counter())
            yield i

    for piece in itertools.chain(
        [text], pieces(writer.tokenizer, timed(writer.tokens(prompt, FLAGS.tokens, sampling)))
    ):
        print(piece, end="", flush=True)
    print(flush=True)
    steps = times[2:]  # prompt and first step compile
    speed = f", {(len(steps) - 1) / (steps[-1] - steps[0]):.1f} tokens/s" if len(steps) > 1 else ""
    ended = "; the document ends here" if len(times) < FLAGS.tokens else ""
    print(f"{len(times)} tokens{speed}{ended}", file=sys.stderr)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's folder", required=True)
    flags.DEFINE_string("prompt", "", "the beginning of the text; none: a new document")
    flags.DEFINE_string("prompt_file", "", "a file that holds it")
    flags.DEFINE_integer("tokens", 100, "how many to draw at most")
    flags.DEFINE_float("temperature", 1.0, "divides the logits; 0: always the likeliest token")
    flags.DEFINE_integer("top_k", 0, "draw among so many likeliest tokens; 0: all")
    flags.DEFINE_float("top_p", 1.0, "draw among the likeliest tokens that have this probability together")
    flags.DEFINE_integer("seed", 0, "of the draws")
    cli.run_main(main)
