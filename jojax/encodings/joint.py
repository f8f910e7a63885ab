"""Two encodings at once (GRAPE's M + A, equation 5.3): the frames of one, the bias of the other, any of the library's.

    s_kj = q_kᵀ P_{j→k} k_j / √d + b_kj

`rotation` and `bias` are encodings as `config.encoding` has them, {name, …options}. Gates of the bias read queries and
keys before they are turned, so that its law holds whatever the frames are. Both may add to the embedding, bring lifts
and hand on sums; frames, value frames and an edge may come from one of the two only.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax.core import FrozenDict

from jojax.encodings.base import Encoding, Journey
from jojax.encodings.build import build
from jojax.errors import UserError

PARTS = ("rotation", "bias")


class Joint(Encoding):
    rotation: Mapping = FrozenDict(name="rope")
    bias: Mapping = FrozenDict(name="grape_a")

    def setup(self):
        self.parts = [build(getattr(self, n), self.dims, self.dtype)(name=f"of_{n}") for n in PARTS]

    def claims(self, name):
        return [getattr(build(getattr(self, n), self.dims, self.dtype)(parent=None), name) for n in PARTS]

    RELATIVE = property(lambda self: all(self.claims("RELATIVE")))
    NORM_PRESERVING = property(lambda self: all(self.claims("NORM_PRESERVING")))
    STREAMS = property(lambda self: all(self.claims("STREAMS")))
    FLAT = property(lambda self: all(self.claims("FLAT")))
    CAUSAL_ONLY = property(lambda self: any(self.claims("CAUSAL_ONLY")))
    BOUNDED_LENGTH = property(lambda self: any(self.claims("BOUNDED_LENGTH")))

    def check(self):
        for n in PARTS:
            try:
                build(getattr(self, n), self.dims, self.dtype)
            except UserError as error:
                raise UserError(f"encoding.{n}: {error}") from None
        super().check()

    def begin(self, x, ctx):
        both = []
        for part in self.parts:
            x, *own = part.begin(x, ctx)
            both.append(own)
        return x, *zip(*both, strict=True)

    def journey(self, shared, carry, ctx):
        prefix = ctx.prefix or (None, None)
        own = zip(self.parts, shared, carry, prefix, strict=True)
        a, b = (part.journey(s, c, ctx.replace(prefix=p)) for part, s, c, p in own)
        for what in ("frame", "value_frame", "edge"):
            if getattr(a, what) is not None and getattr(b, what) is not None:
                raise UserError(f"encoding.rotation and encoding.bias both bring a {what}: take one that has none")
        lifts = [j.lift for j in (a, b) if j.lift is not None]
        return Journey(
            frame=a.frame if b.frame is None else b.frame,
            value_frame=a.value_frame if b.value_frame is None else b.value_frame,
            lift=tuple(jnp.concatenate(t, -1) for t in zip(*lifts, strict=True)) if lifts else None,
            edge=a.edge if b.edge is None else b.edge,
            prefix=(a.prefix, b.prefix),
            restore=a.restore and b.restore,
            temperature=a.temperature * b.temperature,
        )

    def advance(self, shared, carry, hidden, ctx):
        return tuple(part.advance(s, c, hidden, ctx) for part, s, c in zip(self.parts, shared, carry, strict=True))
