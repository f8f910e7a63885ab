"""xPos (arXiv 2212.10554): RoPE times ζ_b^(k−j), ζ_b = (b/(D/2) + γ)/(1 + γ), distance in units of `scale_base`.

A frame that is not orthogonal: A_i = ζ^(−i/scale_base) R(iω). Queries go through A⁻ᵀ, so the score decays with
distance; travelling values decay likewise. Limit: float32 exponents hold for |position| up to about
60 · scale_base.
"""

import jax.numpy as jnp
from flax import linen as nn

from jojax.encodings.base import wide
from jojax.encodings.frames import PlaneFrame
from jojax.encodings.rope import Rope


class XPos(Rope):
    gamma: float = 0.4
    scale_base: float = 512.0

    NORM_PRESERVING = False
    CAUSAL_ONLY = True

    @nn.compact
    def journey(self, shared, carry, ctx):
        planes = self.dims.head_dim // 2
        zeta = (jnp.arange(planes, dtype=wide(self.dtype)) / planes + self.gamma) / (1 + self.gamma)
        log_scale = -ctx.position[..., :1, None] / self.scale_base * jnp.log(zeta)
        return self.travel(PlaneFrame(self.base_angles(shared, ctx), log_scale, self.pairing))
