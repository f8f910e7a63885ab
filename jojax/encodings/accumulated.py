"""Accumulated angles without content: the controls of the JoFormer experiments.

random: a_t ~ Uniform(−ω_b, ω_b), drawn anew for every document, site, channel and training step, summed along the
path like a journey. `share_layers` draws once for all blocks, else each block draws its own. Draws are keyed by
(document, position), so that a document gets the same angles alone, packed or in chunks; evaluation uses one fixed
key. `unit` draws from Uniform(−1, 1) in every channel (all channels mix within about 16 steps) instead of
frequency-scaled. Source: the author's laboratory notes; the paper on accumulated transformations (2606.24975).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import wrapped_add
from jojax.encodings import base, rope


class Accumulated(rope.Rope):
    share_layers: bool = False
    unit: bool = False

    RELATIVE = False  # the draws belong to (document, position)
    CAUSAL_ONLY = True
    FLAT = False

    def draws(self, ctx):
        """Steps in turns, [B, L, G, D/2]."""
        key = self.make_rng("encoding") if self.has_rng("encoding") else jax.random.key(0)
        index = ctx.position[..., 0].astype(jnp.int32)
        shape = (self.dims.kv_heads, self.dims.head_dim // 2)
        dtype = base.wide(self.dtype)

        def draw(document, site):
            site_key = jax.random.fold_in(jax.random.fold_in(key, document), site)
            return jax.random.uniform(site_key, shape, dtype, -1, 1)

        u = jax.vmap(jax.vmap(draw))(ctx.segment, index)
        omega = 1 if self.unit else self.initial_frequencies(None).sum(0)
        return u * omega / (2 * jnp.pi)

    @nn.compact
    def begin(self, x, ctx):
        return x, self.draws(ctx) if self.share_layers else None, None

    @nn.compact
    def journey(self, shared, carry, ctx):
        before, _, last = base.path_sum(self.draws(ctx) if shared is None else shared, ctx, wrapped_add)
        return self.travel(self.plane_frame(2 * jnp.pi * before, pairing=self.pairing), prefix=last)
