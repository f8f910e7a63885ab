"""Encodings that are wrong on purpose: each breaks the law named in `BREAKS`, and must be caught by it."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp

from jojax.encodings import Edge, Encoding, Journey, PlaneFrame
from jojax.encodings.absolute import Absolute
from jojax.encodings.grape_a import GrapeA
from jojax.encodings.joformer import JoFormer
from jojax.encodings.rope import Rope


class At(Rope):
    """RoPE at other places."""

    transport: str = "qkv"

    def journey(self, shared, carry, ctx):
        return super().journey(shared, carry, ctx.replace(position=self.place(ctx)))


class Slows(At):
    """Not RELATIVE: steps shrink with the way from the start."""

    def place(self, ctx):
        return jnp.log1p(ctx.position)


class Whole(Encoding):
    """Not RELATIVE, though it seems so when all coordinates move by whole numbers."""

    def journey(self, shared, carry, ctx):
        phase = 2 * jnp.pi * ctx.position[..., None] ** 2
        return Journey(frame=PlaneFrame(jnp.broadcast_to(phase, (*phase.shape[:2], 1, self.dims.head_dim // 2))))


class Modest(Rope):
    """Claims less than it has."""

    RELATIVE = NORM_PRESERVING = FLAT = STREAMS = False
    CAUSAL_ONLY = True


class Away(Rope):
    """Values travel and do not come home: not RELATIVE."""

    def journey(self, shared, carry, ctx):
        return super().journey(shared, carry, ctx).replace(restore=False)


class Stretches(Rope):
    def journey(self, shared, carry, ctx):
        journey = super().journey(shared, carry, ctx)
        return journey.replace(frame=journey.frame.replace(log_scale=0.01 * journey.frame.angles))


class Winds(JoFormer):
    angle_source: str = "linear"
    FLAT = True


class Anywhere(GrapeA):
    CAUSAL_ONLY = False


class Endless(Rope):
    BOUNDED_LENGTH = True


class Ends(Absolute):
    BOUNDED_LENGTH = False


class Suffix(At):
    """Sums −ω over what is left of a chunk, as released code does: right as a whole, cannot be handed on."""

    def place(self, ctx):
        past = jnp.arange(ctx.position.shape[1]) - float(ctx.position.shape[1])
        return jnp.broadcast_to(past[:, None], ctx.position.shape)


class Leaks(At):
    """Turns by a sum of contents over the whole row, whatever the document."""

    def place(self, ctx):
        return ctx.position * jnp.cumsum(ctx.x[..., :1], 1)


class Foresees(At):
    def place(self, ctx):
        return ctx.position * ctx.x.mean((1, 2), keepdims=True)


@dataclasses.dataclass(frozen=True)
class Forgets:
    """A sum over the path within a block of keys, not over what lies between the blocks."""

    def __call__(self, state, query, key, visible, weights):
        step = jnp.where(visible[:, None], key[:, None, None, :, 0, 0], 0)
        return step[..., ::-1].cumsum(-1)[..., ::-1] + 0 * query[:, :, :, 0].swapaxes(1, 2)[..., None], state


class Blockwise(Encoding):
    CAUSAL_ONLY, FLAT = True, False

    def journey(self, shared, carry, ctx):
        query = jnp.zeros((*ctx.q.shape[:3], 1), ctx.position.dtype)
        return Journey(edge=Edge(query, -jnp.abs(ctx.k[..., :1].astype(query.dtype)), Forgets()))


class Counts(At):
    """Turns faster each time it is traced."""

    def place(self, ctx):
        return ctx.position * next(times)


times = itertools.count(1)


class Spare(Rope):
    """A parameter that moves all logits of a row alike."""

    @nn.compact
    def journey(self, shared, carry, ctx):
        size = self.param("spare", nn.initializers.ones, (1,)).astype(ctx.position.dtype)
        query = jnp.broadcast_to(size, (*ctx.q.shape[:3], 1))
        return super().journey(shared, carry, ctx).replace(lift=(query, jnp.ones((*ctx.k.shape[:3], 1), size.dtype)))


class Stops(Rope):
    """A parameter without a gradient."""

    @nn.compact
    def journey(self, shared, carry, ctx):
        speed = jax.lax.stop_gradient(self.param("speed", nn.initializers.ones, (1,)))
        return super().journey(shared, carry, ctx.replace(position=ctx.position * speed.astype(ctx.position.dtype)))


class Kinks(Rope):
    """A square root of zero, whose derivative is infinite."""

    @nn.compact
    def journey(self, shared, carry, ctx):
        speed = self.param("speed", nn.initializers.ones, (1,)).astype(ctx.position.dtype)
        return super().journey(shared, carry, ctx.replace(position=jnp.sqrt(ctx.position * speed**2)))


class Coarse(At):
    """Positions in the model's dtype."""

    def place(self, ctx):
        return ctx.position.astype(self.dtype)


class Unpaired(Encoding):
    """Does not say that it needs an even head_dim."""

    def journey(self, shared, carry, ctx):
        angles = ctx.position[..., None] * jnp.ones(self.dims.head_dim // 2, ctx.position.dtype)
        return Journey(frame=PlaneFrame(angles))


class Elsewhere(Rope):
    """Says that it starts as RoPE, and starts twice as fast."""

    @property
    def STARTS_AS(self):
        return {"name": "rope"}

    @nn.compact
    def journey(self, shared, carry, ctx):
        speed = self.param("speed", nn.initializers.constant(2.0), (1,)).astype(ctx.position.dtype)
        return super().journey(shared, carry, ctx.replace(position=ctx.position * speed))


BREAKS = {
    "relative": (Slows, Whole, Modest, Away),
    "norms": (Stretches, Modest),
    "flat": (Winds, Modest),
    "order": (Anywhere, Modest),
    "bounded": (Endless, Ends),
    "chunks": (Suffix, Modest),
    "sites": (Suffix,),
    "packed": (Leaks,),
    "causal": (Foresees,),
    "blocks": (Blockwise,),
    "unrolled": (Counts,),
    "gradients": (Spare, Stops, Kinks),
    "bfloat16": (Coarse,),
    "odd": (Unpaired,),
    "start": (Elsewhere,),
}
OPTIONS = {Ends: {"kind": "learned"}, Away: {"transport": "qkv"}}


def config(wrong) -> dict:
    return {"name": f"{__name__}.{wrong.__name__}"} | OPTIONS.get(wrong, {})
