"""A trained language model under lm-evaluation-harness: `python -m jojax.harness --workdir DIR [--tasks a,b]
[--include_path FOLDER] [--limit N]`; as a model class, `Harness(workdir)`, for the harness's own functions.

Needs `pip install -e '.[harness]'`; the tasks' data sets come through it, from the hub or the disk. Results are printed
and kept in DIR/harness.json.

A request is read as the beginning of a document. Nothing stands before that here, so without a context the first
token is predicted from the end-of-document id, which training never asks for. Contexts longer than `max_length`
(default: the training length) lose their beginning.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jojax import cli, generate, task
from jojax.errors import UserError

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    missing = f"jojax.harness needs lm-evaluation-harness ({error}): python3 -m pip install -e '.[harness]'"
    if __name__ == "__main__":
        sys.exit(f"error: {missing}")
    raise ImportError(missing) from error

# GRAPE's, zero-shot
TASKS = ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande", "sciq")
BUCKET = 64  # rows are padded to multiples of so many tokens: one compilation each


class Harness(TemplateLM):
    """workdir: a run of jojax.train. UserError: no such run, a vision model, a length that its table does not have."""

    def __init__(self, workdir, batch_size=16, max_length=0):
        super().__init__()
        self.writer, self.batch_size = generate.load(workdir), batch_size
        self.job, self.text = self.writer.job, self.writer.tokenizer
        trained = self.job.config.data.length
        self.max_length = max_length or trained
        if self.max_length > trained and self.job.model.encoding(parent=None).BOUNDED_LENGTH:
            raise UserError(
                f"--max_length={max_length}: encoding {task.label(self.job.config)} is a table of {trained} positions"
            )

    @property
    def eot_token_id(self):
        return self.text.eos

    @property
    def tokenizer_name(self):
        return "jojax"

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return [int(i) for i in self.text.encode_documents([string])[0][:-1]]

    def _loglikelihood_tokens(self, requests, **kwargs):
        return self.score([(context, given) for _, context, given in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        out = []
        for (string,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(string), self.eot_token_id, self.max_length, 1)
            out.append(sum(total for total, _ in self.score([make_disjoint_window(window) for window in windows])))
        return out

    def generate_until(self, requests, disable_tqdm=False):
        return [self.until(*request.args) for request in requests]

    def until(self, context, options):
        """The text up to the first of options['until'], greedy unless options say otherwise."""
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        warm = float(options.get("temperature", 0)) if options.get("do_sample") else 0.0
        most, text = int(options.get("max_gen_toks", 256)), ""
        prompt = self.tok_encode(context)[-max(1, self.max_length - most) :]
        for piece in generate.pieces(self.text, self.writer.tokens(prompt, most, generate.Sampling(warm))):
            text += piece
            if any(stop in text for stop in stops):
                return text[: min(text.index(stop) for stop in stops if stop in text)]
        return text

    def score(self, pairs):
        """(ids of the context, ids that count) -> [(Σ log p of the latter, each is the likeliest)]."""
        rows = [((context + given)[-self.max_length - 1 :], len(given)) for context, given in pairs]
        rows = [(ids, min(count, len(ids) - 1)) for ids, count in rows]
        size = [-(-(len(ids) - 1) // BUCKET) * BUCKET for ids, _ in rows]
        out, order = [(0.0, True)] * len(rows), sorted(range(len(rows)), key=lambda i: (size[i], i))
        while order:
            L = min(size[order[0]], self.max_length)
            chosen = [i for i in order[: self.batch_size] if size[i] == size[order[0]]]
            order = order[len(chosen) :]
            given = np.zeros((self.batch_size, L + 1), np.int32)
            length = np.zeros(self.batch_size, np.int32)
            for row, i in enumerate(chosen):
                ids = rows[i][0]
                given[row, : len(ids)], length[row] = ids, len(ids) - 1
            logp, likeliest = (np.asarray(t) for t in self.compiled(self.writer.params, given, length))
            for row, i in enumerate(chosen):
                asked = slice(length[row] - rows[i][1], length[row])
                out[i] = float(logp[row, asked].astype(float).sum()), bool(likeliest[row, asked].all())
        return out

    @functools.cached_property
    def compiled(self):
        """ids [B, L + 1], how many inputs each row has [B] -> log p of the targets [B, L], are they the likeliest."""

        def run(params, ids, length):
            at = jnp.broadcast_to(jnp.arange(ids.shape[1] - 1), (len(ids), ids.shape[1] - 1))
            segment = jnp.where(at < length[:, None], 0, -1)
            more = dict(position=at, segment=segment, rngs=task.evaluation_rngs())
            logits = self.job.apply(params, ids[:, :-1], **more)[..., : self.text.vocab_size]
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)[..., 0]
            return logp, logits.argmax(-1) == ids[:, 1:]

        return jax.jit(run)


def main(_):
    FLAGS = flags.FLAGS
    tasks = TaskManager(include_path=FLAGS.include_path)
    cli.keep_compiled()
    model = Harness(FLAGS.workdir, FLAGS.batch_size, FLAGS.max_length)
    limit = FLAGS.limit or None
    found = simple_evaluate(model, tasks=list(FLAGS.tasks), task_manager=tasks, limit=limit, num_fewshot=0)
    keep = {key: found[key] for key in ("results", "n-samples", "versions")}
    (Path(FLAGS.workdir) / "harness.json").write_text(json.dumps(keep, indent=1, default=str) + "\n")
    for name, row in keep["results"].items():
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        print(f"{name}:", "  ".join(f"{key} {value:.4f}" for key, value in sorted(numbers.items())))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's folder", required=True)
    flags.DEFINE_list("tasks", list(TASKS), "names of the harness's tasks")
    flags.DEFINE_string("include_path", None, "a folder of further task files")
    flags.DEFINE_integer("limit", 0, "so many examples of each task; 0 = all", lower_bound=0)
    flags.DEFINE_integer("batch_size", 16, "rows at a time", lower_bound=1)
    flags.DEFINE_integer("max_length", 0, "tokens of context; 0 = the training length", lower_bound=0)
    cli.run_main(main)
