"""What is trained: a model with its data, loss and exact metrics, the same five answers for text and for images."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jojax import losses, metrics, mixing, shard
from jojax.data import augment, corpus, image, probes, source, windows
from jojax.errors import UserError
from jojax.models import build


@dataclasses.dataclass(eq=False)
class Task(abc.ABC):
    """Base. `unit` names what is counted and scored, `aux` the sums that `loss` returns beside Σ nll and count."""

    config: Any
    model: Any

    unit: ClassVar[str] = ""
    aux: ClassVar[tuple[str, ...]] = ()
    mix = None  # (batch, key) -> batch, of training alone
    repeat = 1  # times that an example stands in its batch

    @property
    @abc.abstractmethod
    def units_per_step(self) -> int: ...

    @abc.abstractmethod
    def init(self, key):
        """Parameters from the seed's key; their sizes do not depend on the example."""

    @abc.abstractmethod
    def loss(self, params, batch, rngs, train):
        """-> Σ nll, count, {name: Σ} of a training batch."""

    @abc.abstractmethod
    def evaluate(self, params, batch, constants):
        """A clu collection of sums over the rows of a batch that have weight."""

    @abc.abstractmethod
    def eval_constants(self) -> np.ndarray:
        """What `evaluate` reads beside the batch."""

    @abc.abstractmethod
    def probe(self, params):
        """Logits of two random examples, the same on every process, in float32 or wider."""

    @abc.abstractmethod
    def batch_shapes(self, B):
        """{name: ShapeDtypeStruct} of a batch of B rows."""

    @abc.abstractmethod
    def train_source(self):
        """(random-access source, augmentation or None)"""

    @abc.abstractmethod
    def valid_source(self):
        """(random-access source, transform or None)"""

    @functools.cached_property
    def evaluate_step(self):
        """Of a mesh: `evaluate`, compiled once."""
        return functools.cache(lambda mesh: jax.jit(shard.within(mesh, self.evaluate)))

    @functools.cached_property
    def valid(self):
        """The valid split, opened once: a source and its transform."""
        return self.valid_source()

    def scored(self) -> str:
        """What of the valid split counts, in words."""
        return f"{len(self.valid[0]):,} {self.unit}"

    def digests(self) -> dict[str, str]:
        """{split: digest of its data}, where reading it all is no burden."""
        return {}

    def check_data(self, recorded, what):
        """UserError where `recorded` digests are not those of the data; None: a record from before there were any."""
        if recorded is not None and recorded != self.digests():
            raise UserError(f"the text of a split, or its tokenizer, is not what {what}")

    def apply(self, params, *args, **kw):
        return self.model.apply({"params": params}, *args, **kw)

    @functools.cached_property
    def exact(self):
        """The same model in float32 where it is narrower, without a kernel that may be of bfloat16 alone."""
        narrow = self.config.dtype == "bfloat16"
        changes = dict(dtype="float32", attention="auto") if narrow else {}
        return build.build(ConfigDict(self.config.to_dict() | changes))


class Text(Task):
    unit = "tokens"

    @property
    def units_per_step(self):
        return self.config.batch_size * self.config.data.length

    def init(self, key):
        return self.model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]

    def probe(self, params):
        tokens = jax.random.randint(jax.random.key(0), (2, self.config.data.length), 0, self.config.data.vocab)
        return self.exact.apply({"params": params}, tokens, rngs=evaluation_rngs())

    def nll(self, params, batch, rngs=None, train=False):
        """[B, L] nats, float32 or wider."""
        given = {k: batch[k] for k in ("position", "segment", "targets")}
        return self.apply(params, batch["tokens"], **given, train=train, rngs=rngs or evaluation_rngs())

    def loss(self, params, batch, rngs, train):
        return *losses.sums(self.nll(params, batch, rngs, train), batch["weight"]), {}

    def evaluate(self, params, batch, constants):
        nll = self.nll(params, batch)
        return metrics.Text.single_from_model_output(
            nll=nll, bytes=constants[batch["targets"]], mask=batch["weight"] > 0
        )

    def batch_shapes(self, B):
        L = self.config.data.length
        shapes = {k: jax.ShapeDtypeStruct((B, L), jnp.int32) for k in ("tokens", "targets", "position", "segment")}
        return shapes | {"weight": jax.ShapeDtypeStruct((B, L), jnp.float32)}

    def train_source(self):
        return windows.PackedRows(self.corpus("train"), self.config.data.length), None

    def valid_source(self):
        return windows.split_windows(
            self.corpus("valid"), self.config.data.length, self.config.eval.document_tokens
        ), None

    def scored(self):
        said, all_of_them = self.valid[0].protocol, self.corpus("valid").predictions().sum()
        most = self.config.eval.document_tokens
        cut = f", the first {most:,} of each (eval.document_tokens)" if said["predictions"] < all_of_them else ""
        return f"{said['predictions']:,} of {all_of_them:,} {self.unit} in {said['documents']} documents{cut}"

    def digests(self):
        return {split: self.corpus(split).digest for split in ("train", "valid")}

    @functools.cached_property
    def corpus(self):
        """Of a split, opened once."""
        return functools.cache(functools.partial(corpus.build_corpus, self.config.data))

    def eval_constants(self):
        """What `evaluate` reads beside the batch: bytes of text that each token stands for, [V]."""
        table = np.zeros(self.config.data.vocab, np.int32)
        own = self.corpus("valid").tokenizer.token_bytes
        table[: len(own)] = own
        return table


class Probe(Text):
    """Text that is generated, and of which only the answers count."""

    def rows(self, split, length):
        return probes.ProbeRows(self.config.data.name, split, length, self.config.data.vocab)

    def evaluate(self, params, batch, constants):
        given = {k: batch[k] for k in ("position", "segment")}
        logits = self.apply(params, batch["tokens"], **given, rngs=evaluation_rngs())
        return metrics.Answers.single_from_model_output(
            nll=losses.cross_entropy(logits, batch["targets"]),
            correct=logits.argmax(-1) == batch["targets"],
            mask=batch["weight"] > 0,
        )

    def train_source(self):
        return self.rows("train", self.config.data.length), None

    def valid_source(self):
        return self.rows("valid", self.config.data.length), None

    def scored(self):
        return "{predictions:,} answers in {rows:,} rows".format(**self.valid[0].protocol)

    def digests(self):
        return {}

    def eval_constants(self):
        return np.zeros(1, np.float32)


class Images(Task):
    unit = "images"
    aux = ("accuracy",)

    @property
    def units_per_step(self):
        return self.config.batch_size

    @property
    def size(self):
        return build.frames_of(self.config) + image.image_size(self.config.data)

    def init(self, key):
        return self.model.init(key, jnp.zeros((1, *self.size, 3)))["params"]

    def probe(self, params):
        image = jax.random.normal(jax.random.key(0), (2, *self.size, 3))
        return self.exact.apply({"params": params}, image, rngs=evaluation_rngs())

    def logits(self, params, batch, rngs=None, train=False, offset=0.0):
        """[B, classes]"""
        return self.apply(params, batch["image"], offset=offset, train=train, rngs=rngs)

    @functools.cached_property
    def augment(self):
        return augment.options(self.config.data)

    @property
    def repeat(self):
        return self.augment.repeat

    @property
    def mix(self):
        opts = self.augment
        if not (opts.mixup or opts.cutmix):
            return None
        if self.config.batch_size % 2:
            raise UserError(f"batch_size={self.config.batch_size}: mixup and cutmix (data.augment) need an even number")
        return functools.partial(mixing.mix, mixup=opts.mixup, cutmix=opts.cutmix, switch=opts.switch)

    def loss(self, params, batch, rngs, train):
        """Of a mixed batch: against both labels by their shares; so its accuracy is the share that was hit."""
        logits, opts = self.logits(params, batch, rngs, train), self.augment

        def weighed(of_label):
            own = of_label(batch["label"])
            if "other" not in batch:
                return own
            share = batch["share"].reshape(-1, *[1] * (own.ndim - 1))
            return share * own + (1 - share) * of_label(batch["other"])

        if opts.loss == "sigmoid":
            target = weighed(lambda label: losses.targets(label, logits.shape[-1], opts.label_smoothing))
            if opts.mixed_targets == "both":
                target = jnp.where(target > 0, 1.0, target)  # NaN stays
            nll = losses.binary_cross_entropy(logits, target)
        else:
            nll = weighed(lambda label: losses.cross_entropy(logits, label, opts.label_smoothing))
        correct, _ = losses.sums(weighed(lambda label: logits.argmax(-1) == label), batch["weight"])
        return *losses.sums(nll, batch["weight"]), {"accuracy": correct}

    def evaluate(self, params, batch, constants):
        logits = self.logits(params, batch, offset=constants)
        nll = losses.cross_entropy(logits, batch["label"])
        return metrics.Images.single_from_model_output(
            nll=nll, correct=logits.argmax(-1) == batch["label"], mask=batch["weight"] > 0
        )

    def batch_shapes(self, B):
        return {
            "image": jax.ShapeDtypeStruct((B, *self.size, 3), jnp.float32),
            "label": jax.ShapeDtypeStruct((B,), jnp.int32),
            "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
        }

    def train_source(self):
        data = self.config.data
        return source.open_source(data, data.train_split), image.image_train_transform(data)

    def valid_source(self):
        data = self.config.data
        return source.open_source(data, data.valid_split), image.image_eval_transform(data)

    def eval_constants(self):
        """The coordinate offset of every axis, in patches."""
        return np.zeros(self.model.spec.dims.axes, np.float32)


class Clips(Images):
    unit = "clips"


def evaluation_rngs():
    """Encodings that draw at random draw the same in every evaluation, and each block its own."""
    return {"encoding": jax.random.key(0)}


def label(config):
    """The encoding's name in tables: its preset, else its module."""
    return config.encoding.get("preset", config.encoding.name)


def make(config, trained=()) -> Text | Images:
    source.check(config.data)
    text, images = Probe if config.data.source == "probe" else Text, Clips if config.data.get("frames") else Images
    return (text if config.model.kind == "lm" else images)(config, build.build(config, trained))
