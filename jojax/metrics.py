"""Metrics as sums over counts: clu collections for evaluation, a plain dict of running sums for training.

An evaluation step returns a collection for its batch, `host` brings it over in float64, `merge` adds batches
there: counts stay exact however large the split is, and no mean of means is ever taken.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics
from flax import struct
from jax import Array


@struct.dataclass
class Perplexity(metrics.Average):
    """exp of the mean nll."""

    def compute(self):
        return np.exp(super().compute())


@struct.dataclass
class BitsPerByte(metrics.Average):
    """Σ nll / (ln 2 · Σ bytes); `bytes` [...] is how many bytes of text each target stands for. Comparable
    over tokenisers, which loss and perplexity are not."""

    @classmethod
    def from_model_output(cls, nll: Array, bytes: Array, mask: Array, **_):  # ty: ignore[incompatible-method-override]
        mask = jnp.broadcast_to(mask, nll.shape) != 0
        return cls(total=jnp.where(mask, nll, 0).sum(), count=jnp.where(mask, bytes, 0).sum())  # ty: ignore[unknown-argument]

    def compute(self):
        return super().compute() / math.log(2)


@struct.dataclass
class Images(metrics.Collection):
    """`Images.single_from_model_output(nll=[B], correct=[B], mask=[B])`; rows with mask 0 count for
    nothing."""

    loss: metrics.Average.from_output("nll")  # ty: ignore[invalid-type-form]
    accuracy: metrics.Average.from_output("correct")  # ty: ignore[invalid-type-form]


@struct.dataclass
class Text(metrics.Collection):
    """`Text.single_from_model_output(nll=, bytes=, mask=)`, each [B, L]; mask 0 = not a target."""

    loss: metrics.Average.from_output("nll")  # ty: ignore[invalid-type-form]
    perplexity: Perplexity.from_output("nll")  # ty: ignore[invalid-type-form]
    bits_per_byte: BitsPerByte


@struct.dataclass
class Whole(metrics.Average):
    """The share of rows all of whose answers are right; `correct`, `mask` [B, L]. Rows without answers do not count."""

    @classmethod
    def from_model_output(cls, correct: Array, mask: Array, **_):  # ty: ignore[incompatible-method-override]
        asked = (mask != 0).any(-1)
        return cls(total=((correct | (mask == 0)).all(-1) & asked).sum(), count=asked.sum())  # ty: ignore[unknown-argument]


@struct.dataclass
class Answers(metrics.Collection):
    """`Answers.single_from_model_output(nll=, correct=, mask=)`, each [B, L]; mask 0 = nothing is asked."""

    loss: metrics.Average.from_output("nll")  # ty: ignore[invalid-type-form]
    accuracy: metrics.Average.from_output("correct")  # ty: ignore[invalid-type-form]
    whole: Whole


def host(collection: Any) -> Any:
    """The collection with NumPy float64 numbers (exact counts up to 2⁵³), ready to `merge` and `values`."""
    return jax.tree.map(np.float64, jax.device_get(collection))


def values(collection: Any) -> dict[str, float]:
    """Name → value."""
    return {name: float(value) for name, value in collection.compute().items()}


def scored(collection: Any) -> int:
    """How many examples or tokens the loss is a mean of; must equal the size of the split."""
    return round(float(collection.loss.count))


def averages(sums: Mapping[str, Any]) -> dict[str, float]:
    """The log line of the sums in a TrainState: loss and the loss function's own sums per counted example or
    token, grad_norm per step, the last learning rate. NaN where nothing was counted."""
    sums = {key: float(value) for key, value in jax.device_get(dict(sums)).items()}
    count, steps, lr = sums.pop("count"), sums.pop("steps"), sums.pop("lr")
    grad_norm = sums.pop("grad_norm")
    out = {key: value / count if count else math.nan for key, value in sums.items()}
    return out | {"grad_norm": grad_norm / steps if steps else math.nan, "lr": lr}
