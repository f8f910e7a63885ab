"""What every attention shares: who sees whom, and the two products.

Shapes: q [B, Lq, G, R, D] (R query heads share key head G), k [B, Lk, G, D], v [B, Lk, G, E].
"""

import jax
import jax.numpy as jnp
from flax import struct

from jojax.encodings.base import wide

EMPTY = -2  # segment of a cache slot not yet written; padding is −1


@struct.dataclass
class Sites:
    """As many queries as keys are the same sites."""

    index: jax.Array  # [L] arrival, counts up by one
    segment: jax.Array | None  # [B, L] document; None = all one


def reach(causal: bool, window: int):
    """How many sites before and after itself a site sees; None = all."""
    back = window - 1 if window else None
    return back, 0 if causal else back


def visible(query: Sites, key: Sites, causal: bool, window: int = 0):
    """[B or 1, Lq, Lk] bool, or None where everything is seen."""
    seen = None
    if query.segment is not None and key.segment is not None:
        seen = query.segment[:, :, None] == key.segment[:, None, :]
    ago = query.index[None, :, None] - key.index[None, None, :]
    for most, distance in zip(reach(causal, window), (ago, -ago), strict=True):
        if most is not None:
            seen = distance <= most if seen is None else seen & (distance <= most)
    return seen


def logits(q, k, scale):
    """[B, G, R, Lq, Lk], float32 or wider. Heads lead, so that each product is one of plain matrices."""
    B, Lq, G, R, D = q.shape
    rows, columns = jnp.moveaxis(q, 1, 3).reshape(B, G, R * Lq, D), jnp.moveaxis(k, 1, 2)
    s = jnp.einsum("bgqd,bgkd->bgqk", rows, columns, preferred_element_type=wide(q.dtype))
    return s.reshape(B, G, R, Lq, -1) * scale


def weighted(p, v):
    """Σ_k p v, [B, G, R, Lq, E] in p's dtype; p [B, G, R, Lq, Lk] is rounded to v's."""
    rows = p.reshape(*p.shape[:2], -1, p.shape[-1]).astype(v.dtype)
    out = jnp.einsum("bgqk,bgke->bgqe", rows, jnp.moveaxis(v, 1, 2), preferred_element_type=p.dtype)
    return out.reshape(*p.shape[:-1], -1)


def gathered(p, x):
    """Σ over query rows: [B, Lk, G, F] of p [B, G, R, Lq, Lk] and x [B, Lq, G, R, F]; p is rounded to x's dtype."""
    rows = jnp.moveaxis(x, 1, 3).reshape(*p.shape[:2], -1, x.shape[-1])
    p = p.reshape(*p.shape[:2], -1, p.shape[-1])
    return jnp.einsum("bgqk,bgqf->bkgf", p.astype(x.dtype), rows, preferred_element_type=p.dtype)
