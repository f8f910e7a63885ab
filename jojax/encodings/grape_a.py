"""Additive biases as low-rank lifts (GRAPE-A; paper section 4): b_kj = query_k · key_j, up to a term of the query
alone, which the softmax does not see.

gate 'alibi' (arXiv 2108.12409): b_kj = −m_h (k − j) with slopes m_h = 2^(−8h/H); for H that is no power of two, the
slopes of the next lower power are filled up with every second one of the next higher power.
Two-sided use (encoders) would need |k − j|, which is not low-rank: causal models only.
"""

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jojax.encodings.base import Encoding, Journey


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes [H], float64."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power + 1) / (2 * power))[::2]
    return np.concatenate([slopes, between[: heads - power]])


class GrapeA(Encoding):
    gate: str = "alibi"

    CHOICES: ClassVar[dict[str, tuple]] = {"gate": ("alibi",)}
    CAUSAL_ONLY = True

    def journey(self, shared, carry, ctx):
        B, L = ctx.position.shape[:2]
        slope = jnp.asarray(alibi_slopes(self.dims.heads), ctx.position.dtype)
        query = jnp.broadcast_to(slope[:, None], (B, L, self.dims.heads, 1))
        key = jnp.broadcast_to(ctx.position[..., :1, None], (B, L, self.dims.kv_heads, 1))
        return Journey(lift=(query, key))
