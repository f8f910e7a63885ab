"""FoX, the forgetting transformer (arXiv 2503.02130), as a lift: b_kj = Σ_{j < t ≤ k} log f_t, f_t = σ(w · x_t + c).

The inclusive sum U_t = Σ_{u ≤ t} log f_u splits it, b_kj = U_k − U_j, and the softmax does not see U_k. One gate a key
head (a head each where queries are not grouped). x is the block's normalised input.

fox_gate 'full': w ~ N(0, (½/√C)²), c = 0: f is about ½ at the start; 'bias_only': c alone, learned; 'fixed': c alone.
The last two start at c_h = −log(e^{1/τ_h} − 1), so that log f = −1/τ_h, with τ log-spaced from `tau_min` to `tau_max`.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.encodings.base import Encoding, Journey, path_sum, wide
from jojax.errors import UserError


class FoX(Encoding):
    fox_gate: str = "full"
    tau_min: float = 4.0
    tau_max: float = 256.0

    CHOICES: ClassVar[dict[str, tuple]] = {"fox_gate": ("full", "bias_only", "fixed")}
    CAUSAL_ONLY = True

    @property
    def FLAT(self):
        return self.fox_gate != "full"

    def check(self):
        super().check()
        if not 0 < self.tau_min <= self.tau_max:
            raise UserError(f"encoding.tau_min = {self.tau_min}: needs 0 < tau_min ≤ tau_max = {self.tau_max}")

    def idle(self):
        used = self.fox_gate != "full"
        return {} if used else dict.fromkeys(("tau_min", "tau_max"), "fox_gate = 'bias_only' or 'fixed'")

    def bias(self, key=None, shape=None):
        """c [G]"""
        tau = jnp.geomspace(self.tau_min, self.tau_max, self.dims.kv_heads)
        return -jnp.log(jnp.expm1(1 / tau))

    @nn.compact
    def journey(self, shared, carry, ctx):
        G, dtype = self.dims.kv_heads, wide(self.dtype)
        if self.fox_gate == "full":
            init = nn.initializers.normal(0.5 / self.dims.width**0.5)
            raw = nn.Dense(G, dtype=dtype, kernel_init=init, name="gate")(ctx.x)  # [B, L, G]
        else:
            c = self.bias() if self.fox_gate == "fixed" else self.param("gate_bias", self.bias, (G,))
            raw = jnp.broadcast_to(c.astype(dtype), (*ctx.position.shape[:2], G))
        _, through, last = path_sum(jax.nn.log_sigmoid(raw), ctx)
        query = jnp.ones((*through.shape[:2], self.dims.heads, 1), through.dtype)
        return Journey(lift=(query, -through[..., None]), prefix=last)
