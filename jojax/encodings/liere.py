"""LieRE (arXiv 2406.10322): rotations exp(Σ_a u_a A_a) in blocks, by free skew generators, one an axis.

For blocks larger than 2 and more than one axis the generators do not commute: scores then depend on where a pair
stands, not on its displacement alone, and no plain RoPE equals it. Blocks of 2 are RoPE-Mixed.

A_a = triu(U, 1) − triu(U, 1)ᵀ as published; `triangle` False, U − Uᵀ, as ComRoPE's authors re-implemented it for their
comparisons. `share_layers` uses one set for all blocks of the model, which is what the released code does (it means to
have one a layer, and gives all the first).

Starts: 'uniform', U ~ Uniform[0, init_scale) with 2π as published; 'normal', N(0, init_std²), the re-implementation's
(its deviation is unpublished); 'zero', no rotation, as for fine-tuning.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import product
from jojax.algebra.operators import exp_skew, phases, skew
from jojax.encodings.coordinates import Spatial
from jojax.encodings.frames import BlockFrame
from jojax.errors import UserError


class LieRE(Spatial):
    block: int = 8
    triangle: bool = True
    angle_init: str = "uniform"
    init_scale: float = 6.283185307179586
    init_std: float = 0.02
    share_layers: bool = False
    coord: str = "train_prop_linspace"

    CHOICES: ClassVar[dict[str, tuple]] = Spatial.CHOICES | {"angle_init": ("uniform", "normal", "zero")}

    @property
    def RELATIVE(self):
        return self.block == 2 or self.dims.axes == 1

    @property
    def STARTS_AS(self):
        return {"name": "none"} if self.angle_init == "zero" else None

    def check(self):
        super().check()
        if self.block < 2 or self.dims.head_dim % self.block:
            raise UserError(
                f"encoding.block = {self.block}: needs blocks of 2 or more that divide model.head_dim = "
                f"{self.dims.head_dim}"
            )

    def idle(self):
        idle = super().idle()
        for option, start in (("init_scale", "uniform"), ("init_std", "normal")):
            if self.angle_init != start:
                idle[option] = f"angle_init = {start!r}"
        return idle

    def generators(self):
        shape = (self.dims.axes, self.dims.kv_heads, self.dims.head_dim // self.block, self.block, self.block)
        starts = {
            "uniform": nn.initializers.uniform(self.init_scale),
            "normal": nn.initializers.normal(self.init_std),
            "zero": nn.initializers.zeros,
        }
        u = self.param("u", starts[self.angle_init], shape)
        return skew(jnp.triu(u, 1) if self.triangle else u)

    @nn.compact
    def begin(self, x, ctx):
        return x, (self.noise(ctx), self.generators() if self.share_layers else None), None

    @nn.compact
    def journey(self, shared, carry, ctx):
        noise, generators = shared
        generators = self.generators() if generators is None else generators
        u, token = self.places(noise, self.one_image(ctx))  # [B or 1, L, A]
        u = u if token is None else jnp.concatenate([u, token], 1)
        matrix = exp_skew(phases(u, generators))
        if token is not None:  # attention gives the class token the identity: all frames as seen from its own
            matrix = product(matrix[:, -1:].swapaxes(-1, -2), matrix[:, :-1])
        return self.travel(BlockFrame(matrix))
