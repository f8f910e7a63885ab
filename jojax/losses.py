"""Losses as sums and counts; a mean is taken once, over all tokens of the (accumulated, global) batch."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, labels: Array, smoothing: float = 0.0) -> Array:
    """Negative log-likelihood of each example, in float32 or wider.

    logits [..., V], labels [...] integers in [0, V). With label smoothing ε the target is (1-ε)·onehot + ε/V
    (Szegedy et al. 2016, section 7). A label outside [0, V) gives NaN, so a wrong label stops the run unless
    its weight in `sums` is 0 (padding).
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    classes = logits.shape[-1]
    labels = jnp.where(labels < 0, classes, labels)  # negative indices would wrap around to valid classes
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - (1 - smoothing) * picked
    if smoothing:
        nll = nll - smoothing * logits.mean(-1)
    return nll


def targets(labels: Array, classes: int, smoothing: float = 0.0) -> Array:
    """(1-ε)·onehot + ε/V, [..., V]; NaN for a label outside [0, V), as in `cross_entropy`."""
    hot = jax.nn.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
    return jnp.where(((labels >= 0) & (labels < classes))[..., None], hot, jnp.nan)


def binary_cross_entropy(logits: Array, target: Array) -> Array:
    """-Σ_v (t_v log σ(z_v) + (1 - t_v) log σ(-z_v)) / V of each example, in float32 or wider; both [..., V]."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return (jax.nn.softplus(logits) - target * logits).mean(-1)


def sums(nll: Array, weight: Array) -> tuple[Array, Array]:
    """(Σ weight·nll, Σ weight) over all entries; entries of weight 0 count for nothing even where nll is not
    finite.

    nll [...] (or anything else to be summed, a bool `correct`), weight [...] (bool or number, broadcast to
    nll). Scalars in float32 or wider.
    """
    nll = nll.astype(jnp.promote_types(nll.dtype, jnp.float32))
    weight = jnp.broadcast_to(weight, nll.shape).astype(nll.dtype)
    return jnp.where(weight == 0, 0, weight * nll).sum(), weight.sum()
