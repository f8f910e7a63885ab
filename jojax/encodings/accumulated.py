"""Accumulated angles without content: the controls of the JoFormer experiments.

Steps a_t are summed along the path like a journey. `steps`:
- omega: a_t ~ Uniform(−ω_b, ω_b), drawn anew for every row, site, channel and training step. Every block draws its
  own, or all share one draw (`share_layers`). In evaluation a draw belongs to (document, position), so that a document
  gets the same angles alone, packed or in chunks; the key is the fixed rng 'encoding' that evaluation passes (without
  one, all blocks draw alike)
- unit: from Uniform(−1, 1) in every channel: all channels mix within about 16 steps
- token: a_t = ±ω_b, signs drawn once and for all for every token, head and channel (the notes' det). Deviation: one
  table of signs for all blocks and runs; the notes do not say
Source: the author's laboratory notes; arXiv 2606.24975.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import wrapped_add
from jojax.encodings.base import Rotary, path_sum, wide
from jojax.encodings.frames import PlaneFrame
from jojax.encodings.rope import geometric
from jojax.errors import UserError


def uniform(module, ctx, shape):
    """Draws from Uniform(−1, 1) [B, L, *shape], one of every site, as the docstring has it."""
    key = module.make_rng("encoding") if module.has_rng("encoding") else jax.random.key(0)
    owner, index = ctx.segment, ctx.position[..., 0].astype(jnp.int32)
    if ctx.train:  # rows of one document in a batch draw apart, and so do the documents of a row
        owner, index = jnp.indices(index.shape)
        key = jax.random.fold_in(key, 1)
    return keyed(key, owner, index, shape, wide(module.dtype))


def keyed(key, owner, index, shape, dtype):
    """Draws from Uniform(−1, 1) that belong to (owner, index), both [B, L]."""

    def draw(owner, index):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, owner), index), shape, dtype, -1, 1)

    return jax.vmap(jax.vmap(draw))(owner, index)


class Accumulated(Rotary):
    steps: str = "omega"
    base: float = 10_000.0
    pairing: str = "half"
    share_layers: bool = False

    CHOICES: ClassVar[dict[str, tuple]] = Rotary.CHOICES | {
        "steps": ("omega", "unit", "token"),
        "pairing": ("half", "interleaved"),
    }
    CAUSAL_ONLY = True
    FLAT = False

    @property
    def RELATIVE(self):
        return self.steps == "token"  # the other draws belong to positions

    def check(self):
        super().check()
        if self.steps == "token" and not self.dims.vocab:
            raise UserError("encoding.steps = 'token' reads tokens, which this model has not")

    def idle(self):
        return {
            "unit": {"base": "steps up to ω (steps = 'omega' or 'token')"},
            "token": {"share_layers": "draws of a block's own (steps = 'omega' or 'unit')"},
        }.get(self.steps, {})

    def draws(self, ctx):
        """Steps in turns, [B, L, G, D/2]."""
        shape = (self.dims.kv_heads, self.dims.head_dim // 2)
        if self.steps == "token":
            u = keyed(jax.random.key(0), ctx.tokens, jnp.zeros_like(ctx.tokens), shape, wide(self.dtype))
            u = jnp.where(u < 0, -1, 1)
        else:
            u = uniform(self, ctx, shape)
        return u / (2 * jnp.pi) * (1 if self.steps == "unit" else geometric(shape[1], self.base, self.dtype))

    @nn.compact
    def begin(self, x, ctx):
        return x, self.draws(ctx) if self.share_layers else None, None

    @nn.compact
    def journey(self, shared, carry, ctx):
        before, _, last = path_sum(self.draws(ctx) if shared is None else shared, ctx, wrapped_add)
        return self.travel(PlaneFrame(2 * jnp.pi * before, pairing=self.pairing), prefix=last)
