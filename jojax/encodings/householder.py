"""Householder frames: reflections by content, multiplied along the path (PaTH, arXiv 2505.16381, with β = 2).

    H_t = I − 2 w_t w_tᵀ,    A_t = H_1 H_2 … H_{t−1},    P_{j→k} = H_{k−1} … H_j    (j < k)

w_t is a unit vector a head, or one a block of `block` dimensions (0: the whole head): W x_t of the block's normalised
input, or a table of tokens (`source`). Unlike in PaTH values may travel too, and the query's own step is left out, as
in all journeys here. `pairs`: each step is H_t H'_t with w'_t ∝ w_t + U x_t, a rotation by twice the angle between the
two; U starts at zero, so that nothing turns (none). One reflection a step mirrors: det A_t = (−1)^t.

Left out: β other than 2 and CoPE. With β < 2 a step shrinks w_t, at β = 1 to nothing: it is not orthogonal, has no
inverse that could be a frame; CoPE's positions depend on the query. Deviation: PaTH's w comes through a low-rank
projection and a short convolution. Frames cost L·D·b numbers a head, products L·D·b².
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import product
from jojax.encodings.base import Rotary, path_sum, wide
from jojax.encodings.frames import BlockFrame, orthonormal
from jojax.errors import UserError


class Householder(Rotary):
    block: int = 0
    pairs: bool = False
    source: str = "linear"

    CHOICES: ClassVar[dict[str, tuple]] = Rotary.CHOICES | {"source": ("linear", "token_table")}
    CAUSAL_ONLY = True
    FLAT = False

    def check(self):
        super().check()
        D = self.dims.head_dim
        if self.block and (self.block < 2 or D % self.block):
            raise UserError(f"encoding.block = {self.block}: needs 0 (all) or blocks of 2 or more that divide {D}")
        if self.source == "token_table" and not self.dims.vocab:
            raise UserError("encoding.source = 'token_table' reads tokens, which this model has not: choose linear")

    @nn.compact
    def journey(self, shared, carry, ctx):
        w = self.directions(ctx, "mirror", nn.initializers.normal(0.02))
        step = reflection(w)
        if self.pairs:
            step = product(step, reflection(w + self.directions(ctx, "mirror_pair", nn.initializers.zeros)))
        path, _, last = path_sum(step, ctx, product, jnp.eye(w.shape[-1]))
        return self.travel(BlockFrame(orthonormal(path)), prefix=orthonormal(last))

    def directions(self, ctx, name, init):
        """Vectors of any length but zero, [B, L, G, m, b]."""
        G, D, dtype = self.dims.kv_heads, self.dims.head_dim, wide(self.dtype)
        if self.source == "linear":
            w = nn.Dense(G * D, dtype=dtype, kernel_init=init, name=name)(ctx.x)
        else:
            w = nn.Embed(self.dims.vocab, G * D, embedding_init=init, name=name)(ctx.tokens).astype(dtype)
        return w.reshape(*w.shape[:2], G, -1, self.block or D)


def reflection(w):
    """I − 2 w wᵀ/|w|² [..., b, b]; the identity where w is zero."""
    square = jnp.maximum((w * w).sum(-1), jnp.finfo(w.dtype).tiny)[..., None, None]
    return jnp.eye(w.shape[-1], dtype=w.dtype) - 2 * w[..., :, None] * w[..., None, :] / square
