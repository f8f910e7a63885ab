"""Accumulated angles without content: the control of the JoFormer experiments.

a_t ~ Uniform(−ω_b, ω_b), drawn anew for every row, site, channel and training step, summed along the path like a
journey. Every block draws its own, or all share one draw (`share_layers`). In evaluation a draw belongs to
(document, position), so that a document gets the same angles alone, packed or in chunks; the key is the fixed rng
'encoding' that evaluation passes (without one, all blocks draw alike). `unit` draws from Uniform(−1, 1) in every
channel: all channels mix within about 16 steps. Source: the author's laboratory notes; arXiv 2606.24975.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import wrapped_add
from jojax.encodings.base import Rotary, path_sum, wide
from jojax.encodings.frames import PlaneFrame
from jojax.encodings.rope import geometric


class Accumulated(Rotary):
    base: float = 10_000.0
    pairing: str = "half"
    share_layers: bool = False
    unit: bool = False

    CHOICES: ClassVar[dict[str, tuple]] = Rotary.CHOICES | {"pairing": ("half", "interleaved")}
    RELATIVE = False  # the draws belong to positions
    CAUSAL_ONLY = True
    FLAT = False

    def idle(self):
        return {"base": "steps up to ω (unit = False)"} if self.unit else {}

    def draws(self, ctx):
        """Steps in turns, [B, L, G, D/2]."""
        key = self.make_rng("encoding") if self.has_rng("encoding") else jax.random.key(0)
        owner, index = ctx.segment, ctx.position[..., 0].astype(jnp.int32)
        if ctx.train:  # rows of one document in a batch draw apart, and so do the documents of a row
            owner, index = jnp.indices(index.shape)
            key = jax.random.fold_in(key, 1)
        shape = (self.dims.kv_heads, self.dims.head_dim // 2)

        def draw(owner, site):
            site_key = jax.random.fold_in(jax.random.fold_in(key, owner), site)
            return jax.random.uniform(site_key, shape, wide(self.dtype), -1, 1)

        u = jax.vmap(jax.vmap(draw))(owner, index)
        return u / (2 * jnp.pi) * (1 if self.unit else geometric(shape[1], self.base, self.dtype))

    @nn.compact
    def begin(self, x, ctx):
        return x, self.draws(ctx) if self.share_layers else None, None

    @nn.compact
    def journey(self, shared, carry, ctx):
        before, _, last = path_sum(self.draws(ctx) if shared is None else shared, ctx, wrapped_add)
        return self.travel(PlaneFrame(2 * jnp.pi * before, pairing=self.pairing), prefix=last)
