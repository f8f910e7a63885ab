"""GRAPE-AP, the path-integral bias (GRAPE section 5): b_tj = Σ_{ℓ=j+1..t} α_h g(⟨R_t p_t, R_ℓ p_ℓ⟩ / r).

p = x W_p a head, width r = 8, RMS-normalised; R_ℓ turns every plane by ℓ radians; α_h are the slopes of ALiBi. The path
ends at t inclusive (equation 5.2 and the code; 5.1 says exclusive). All biases are 0 at j = t and fall with distance.

- rotate 'key' is the paper's and the code's: with the query unturned, R_ℓ carries the absolute ℓ, and the bias changes
  when all positions shift. 'both' ("strict", ours) depends on differences alone
- query_norm False is the code's: the query's p stays as it is and the bias has no lower bound; the paper normalises
- link 'logsigmoid', g = log σ: no low-rank form, an edge sums key blocks from last to first with one carry a row.
  'quad' (ours), g = −log 2 + z/2 − z²/8, within 0.005 of it for |z| ≤ 1, and 'linear', without the square: the sum
  factorises into running sums of 1, w and w wᵀ (w = R p), a lift of 1 + r + r(r + 1)/2 or 1 + r features (45 or 9).
  They need normalised queries, else the bias could grow with distance
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jojax.algebra import operators
from jojax.encodings.base import Edge, Encoding, Journey, path_sum, wide
from jojax.encodings.grape_a import alibi_slopes
from jojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LogSigmoidStep:
    """One key block: the sum over the path's later part comes in as state [B, H, Lq]; weights: α [H]."""

    def __call__(self, state, query, key, visible, weights):
        alpha = weights[:, None, None]
        B, Lq, H, r = query.shape
        grouped = query.reshape(B, Lq, key.shape[2], -1, r)
        exact = lax.Precision.HIGHEST  # errors of z add up along the path
        z = jnp.einsum("bqgir,bkgr->bgiqk", grouped, key, precision=exact).reshape(B, H, Lq, -1) / r
        psi = jnp.where(visible[:, None], alpha * jax.nn.log_sigmoid(z), 0)
        through = lax.cumsum(psi, axis=3, reverse=True)
        return state[..., None] + through - psi, state + through[..., 0]


class GrapeAP(Encoding):
    rank: int = 8
    link: str = "logsigmoid"
    rotate: str = "both"
    query_norm: bool = True

    CHOICES: ClassVar[dict[str, tuple]] = {"link": ("logsigmoid", "quad", "linear"), "rotate": ("key", "both")}
    CAUSAL_ONLY = True
    FLAT = False

    @property
    def RELATIVE(self):
        return self.rotate == "both"

    def check(self):
        super().check()
        if self.rank < 2 or self.rank % 2:
            raise UserError(f"encoding.rank = {self.rank}: planes are turned, make it even")
        if self.link != "logsigmoid" and not self.query_norm:
            raise UserError(
                f"encoding.link = {self.link!r} needs encoding.query_norm = True: else distance could reward"
            )

    @nn.compact
    def journey(self, shared, carry, ctx):
        at = ctx.position[..., :1, None]

        def path(heads, name):
            init = nn.initializers.normal(0.5 / self.dims.width**0.5)
            p = nn.DenseGeneral((heads, self.rank), use_bias=False, kernel_init=init, name=name)(ctx.x)
            return p.astype(wide(ctx.position.dtype))

        def normed(p):
            return p * lax.rsqrt((p**2).mean(-1, keepdims=True) + 1e-6)

        def turned(p):
            return operators.rotate(p, jnp.broadcast_to(at, (*p.shape[:-1], self.rank // 2)))

        key = path(self.dims.kv_heads, "path")
        same = self.dims.kv_heads == self.dims.heads
        query = key if same else path(self.dims.heads, "path_query")
        query = normed(query) if self.query_norm else query
        query, key = turned(query) if self.rotate == "both" else query, turned(normed(key))
        alpha = jnp.asarray(alibi_slopes(self.dims.heads), key.dtype)
        if self.link == "logsigmoid":
            return Journey(edge=Edge(query, key, LogSigmoidStep(), alpha))
        _, sums, last = path_sum(self.powers(key), ctx)
        # −Σ_{ℓ ≤ j} g: the sum up to t belongs to the query alone, which the softmax does not see
        r = self.rank
        factors = [math.log(2), *[-1 / (2 * r)] * r, *[1 / (8 * r * r)] * (sums.shape[-1] - 1 - r)]
        twice = self.powers(query, off_diagonal=2)
        return Journey(lift=(alpha[:, None] * jnp.asarray(factors, key.dtype) * twice, sums), prefix=last)

    def powers(self, w, off_diagonal=1):
        """(1, w, and for the square link the products w_a w_b, a ≤ b) [..., 1 + r + r(r + 1)/2]."""
        parts = [jnp.ones_like(w[..., :1]), w]
        if self.link == "quad":
            a, b = np.triu_indices(self.rank)
            parts.append(w[..., a] * w[..., b] * np.where(a == b, 1, off_diagonal))
        return jnp.concatenate(parts, -1)
