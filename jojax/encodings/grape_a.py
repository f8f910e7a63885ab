"""Additive biases as low-rank lifts (GRAPE-A; GRAPE, section 4): b_kj = query_k · key_j, up to a term of the query
alone, which the softmax does not see.

    b_kj = −m_h ω_h Λ_kj (k − j),      m_h: the slopes of ALiBi

- gate 'alibi' (arXiv 2108.12409): Λ = ω = 1. m_h = 2^(−8h/H); for H that is no power of two, the slopes of the next
  lower power are filled up with every second one of the next higher power
- gate 'k', 'q', 'qk' (equation 4.6): Λ = λ(k_j), λ(q_k) or their sum, λ(x) = softplus(u · x/√d), u of norm one as in
  the released code, drawn in a random direction; ω_h = softplus(ω'), 1 at the start. Fixed slopes as a factor are the
  released code's, too. So models start at 0.69 (k, q) or 1.39 (qk) times ALiBi; `gate_bias` = log(e − 1) starts one
  gate at 1. Gates read queries and keys before transport; those of keys are per key head

Two-sided use (encoders) would need |k − j|, which is not low-rank: causal models only.
"""

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jojax.encodings.base import Encoding, Journey, wide


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes [H], float64."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power + 1) / (2 * power))[::2]
    return np.concatenate([slopes, between[: heads - power]])


class GrapeA(Encoding):
    gate: str = "alibi"
    gate_bias: float = 0.0

    CHOICES: ClassVar[dict[str, tuple]] = {"gate": ("alibi", "k", "q", "qk")}
    CAUSAL_ONLY = True

    def idle(self):
        return {"gate_bias": "gate = 'k', 'q' or 'qk'"} if self.gate == "alibi" else {}

    @nn.compact
    def journey(self, shared, carry, ctx):
        H, G = self.dims.heads, self.dims.kv_heads
        at = ctx.position[..., :1]  # [B, L, 1]
        B, L = at.shape[:2]
        slope = jnp.asarray(alibi_slopes(H), at.dtype)
        if self.gate != "alibi":
            raw = self.param("omega", nn.initializers.constant(math.log(math.e - 1)), (H,))
            slope = slope * nn.softplus(raw.astype(at.dtype))
        query, key = [], []
        if self.gate in ("alibi", "q", "qk"):  # slope λ(q) · j
            gate = self.open(ctx.q, H, "gate_q") if self.gate != "alibi" else jnp.ones((B, L, H), at.dtype)
            query.append(slope * gate)
            key.append(jnp.broadcast_to(at, (B, L, G)))
        if self.gate in ("k", "qk"):  # slope (j λ(k) − k λ(k)): the second is a constant of the row times λ(k)
            gate = self.open(ctx.k, G, "gate_k")
            query += [jnp.broadcast_to(slope, (B, L, H)), -at * slope]
            key += [at * gate, gate]
        return Journey(lift=(jnp.stack(query, -1), jnp.stack(key, -1)))

    def open(self, x, heads, name):
        """λ(x) [B, L, heads]"""
        D = self.dims.head_dim
        u = self.param(name, nn.initializers.normal(D**-0.5), (heads, D))
        x = x.astype(wide(x.dtype))
        u = u.astype(x.dtype)
        u = u / jnp.sqrt((u * u).sum(-1, keepdims=True) + 1e-12)
        return nn.softplus((x * u).sum(-1) / D**0.5 + self.gate_bias)
