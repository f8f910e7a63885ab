"""Absolute encodings, added to the embedding once, before the blocks (arXiv 1706.03762 and its descendants).

- sinusoidal: sin and cos of position · base^(−2b/C), halves side by side; any length
- sincos2d: half of the width for y, half for x, base 10,000 (the MoCo-v3 / MAE form); any grid
- learned: a table over the training length (text) or grid (vision), N(0, 0.02²); bounded. `resize` fits it to
  another grid by bilinear interpolation, half-pixel centres.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jojax.encodings import base
from jojax.errors import UserError


class Absolute(base.Encoding):
    transport: str = "none"
    kind: str = "sinusoidal"  # sinusoidal | sincos2d | learned
    base: float = 10_000.0

    RELATIVE = False

    @property
    def BOUNDED_LENGTH(self):
        return self.kind == "learned"

    @nn.compact
    def begin(self, x, ctx):
        if self.kind == "learned":
            added = self.learned(x, ctx)
        elif self.kind in ("sinusoidal", "sincos2d"):
            added = self.waves(x.shape[-1], ctx.position)
        else:
            raise UserError(f"encoding.kind = {self.kind!r}: choose from sinusoidal, sincos2d, learned")
        if ctx.placed is not None:
            added = jnp.where(ctx.placed[..., None], added, 0)
        return x + added.astype(x.dtype), None, None

    def waves(self, C, position):
        axes = position.shape[-1]
        if (self.kind == "sincos2d") != (axes == 2):
            raise UserError(f"encoding.kind = {self.kind!r} does not fit coordinates with {axes} axes")
        if C % (2 * axes):
            raise UserError(f"model.width = {C}: {self.kind} needs a multiple of {2 * axes}")
        n = C // (2 * axes)
        omega = self.base ** (-jnp.arange(n, dtype=position.dtype) / n)
        phase = position[..., None] * omega  # [B, L, A, n]
        return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1).reshape(*position.shape[:2], C)

    def learned(self, x, ctx):
        sizes = self.dims.grid or (self.dims.length,)
        if not all(sizes):
            raise UserError("encoding kind 'learned' needs the training length: set data.length")
        C, sites = x.shape[-1], int(np.prod(sizes))
        if ctx.placed is None and x.shape[1] > sites:
            raise UserError(f"learned positions end at {sites}, the input has {x.shape[1]}: no extrapolation")
        table = self.param("table", nn.initializers.normal(0.02), (sites, C))
        stride = np.cumprod((1, *sizes[:0:-1]))[::-1].copy()  # row-major
        index = (ctx.position.astype(jnp.int32) * stride).sum(-1)
        return jnp.take(table, index, axis=0, mode="clip")


def resize(params, old_grid, new_grid):
    """{'table': [Πold, C]} -> {'table': [Πnew, C]} for another grid (non-square too)."""
    table = params["table"]
    image = table.reshape(*old_grid, -1)
    resized = jax.image.resize(image, (*new_grid, table.shape[-1]), "bilinear")
    return {**params, "table": resized.reshape(-1, table.shape[-1])}
