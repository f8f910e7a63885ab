"""GRAPE-AP, the path-integral bias (GRAPE section 5): b_tj = Σ_{ℓ=j+1..t} α_h log σ(⟨R_t p_t, R_ℓ p_ℓ⟩ / r).

p = x W_p a head, width r = 8, RMS-normalised, rotated by one radian a site in every plane; α_h are the ALiBi slopes.
No low-rank lift exists: the sum runs over key blocks from last to first with one carry a row. The path ends at t
inclusive (equation 5.2; 5.1 says exclusive).
Deviation ("strict"): both sides are rotated and normalised, so that the bias depends on differences of positions and
is bounded; the paper and its code rotate the key side only, and the code leaves the query unnormalised.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jojax.algebra import operators
from jojax.encodings.base import Edge, Encoding, Journey
from jojax.encodings.grape_a import alibi_slopes
from jojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LogSigmoidStep:
    """One key block: the sum over the path's later part comes in as state [B, H, Lq]."""

    heads: int

    def __call__(self, state, query, key, visible, weights):
        alpha = jnp.asarray(alibi_slopes(self.heads), query.dtype)[:, None, None]
        B, Lq, H, r = query.shape
        grouped = query.reshape(B, Lq, key.shape[2], -1, r)
        exact = lax.Precision.HIGHEST  # errors of z add up along the path
        z = jnp.einsum("bqgir,bkgr->bgiqk", grouped, key, precision=exact).reshape(B, H, Lq, -1) / r
        psi = jnp.where(visible[:, None], alpha * jax.nn.log_sigmoid(z), 0)
        through = lax.cumsum(psi, axis=3, reverse=True)
        return state[..., None] + through - psi, state + through[..., 0]


class GrapeAP(Encoding):
    rank: int = 8

    CAUSAL_ONLY = True
    FLAT = False

    def check(self):
        super().check()
        if self.rank < 2 or self.rank % 2:
            raise UserError(f"encoding.rank = {self.rank}: planes are turned, make it even")

    @nn.compact
    def journey(self, shared, carry, ctx):
        def path(heads, name):
            init = nn.initializers.normal(0.5 / self.dims.width**0.5)
            dense = nn.DenseGeneral((heads, self.rank), use_bias=False, kernel_init=init, name=name)
            p = dense(ctx.x).astype(ctx.position.dtype)
            p = p * lax.rsqrt((p**2).mean(-1, keepdims=True) + 1e-6)
            angles = jnp.broadcast_to(ctx.position[..., :1, None], (*p.shape[:-1], self.rank // 2))
            return operators.rotate(p, angles)

        key = path(self.dims.kv_heads, "path")
        same = self.dims.kv_heads == self.dims.heads
        query = key if same else path(self.dims.heads, "path_query")
        return Journey(edge=Edge(query, key, LogSigmoidStep(self.dims.heads)))
