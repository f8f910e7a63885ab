"""Absolute encodings, added to the embedding once, before the blocks (arXiv 1706.03762 and its descendants).

- sinusoidal: sin and cos of position · base^(−2b/C), halves side by side; any length
- sincos2d: half of the width for y, half for x, base 10,000 (the MoCo-v3 / MAE form); any grid
- learned: a table over the training length (text) or grid (vision), N(0, 0.02²); bounded, whole positions only.
  `resize` fits it to another grid as the vision papers do: bicubic, half-pixel centres, no anti-aliasing.
"""

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jojax.encodings.base import Encoding
from jojax.encodings.rope import geometric
from jojax.errors import UserError


class Absolute(Encoding):
    kind: str = "sinusoidal"
    base: float = 10_000.0

    CHOICES: ClassVar[dict[str, tuple]] = {"kind": ("sinusoidal", "sincos2d", "learned")}
    RELATIVE = False

    @property
    def BOUNDED_LENGTH(self):
        return self.kind == "learned"

    def check(self):
        super().check()
        axes, C = self.dims.axes, self.dims.width
        if axes != {"sinusoidal": 1, "sincos2d": 2}.get(self.kind, axes):
            raise UserError(f"encoding.kind = {self.kind!r} does not fit coordinates with {axes} axes")
        if self.kind != "learned" and C % (2 * axes):
            raise UserError(f"model.width = {C}: {self.kind} needs a multiple of {2 * axes}")
        if self.kind == "learned" and not all(self.sizes):
            raise UserError("encoding.kind = 'learned' needs the training length: set data.length")

    def idle(self):
        return {"base": "waves (kind = 'sinusoidal' or 'sincos2d')"} if self.kind == "learned" else {}

    @property
    def sizes(self):
        """Sites of the table along each axis."""
        return self.dims.grid or (self.dims.length,)

    @nn.compact
    def begin(self, x, ctx):
        if self.kind == "learned":
            added = self.learned(x.shape[1] - (ctx.placed is not None), ctx.position)
        else:
            added = self.waves(ctx.position)
        if self.kind == "sinusoidal":  # section 3.4: the embedding is scaled to meet waves of size 1
            x = x * jnp.asarray(self.dims.width**0.5, x.dtype)
        if ctx.placed is not None:
            added = jnp.where(ctx.placed[..., None], added, 0)
        return x + added.astype(x.dtype), None, None

    def waves(self, position):
        C, axes = self.dims.width, position.shape[-1]
        phase = position[..., None] * geometric(C // (2 * axes), self.base, position.dtype)  # [B, L, A, n]
        return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1).reshape(*position.shape[:2], C)

    def learned(self, given, position):
        sites = math.prod(self.sizes)
        if given > sites:
            raise UserError(f"learned positions end at {sites}, the input has {given}: no extrapolation")
        table = self.param("table", nn.initializers.normal(0.02), (sites, self.dims.width))
        stride = [math.prod(self.sizes[a + 1 :]) for a in range(len(self.sizes))]  # row-major
        index = (position.astype(jnp.int32) * jnp.asarray(stride)).sum(-1)
        return jnp.take(table, index, axis=0, mode="clip")


def resize(params, old_grid, new_grid):
    """{'table': [Πold, C]} -> {'table': [Πnew, C]} for another grid (non-square too)."""
    table = params["table"]
    image = table.reshape(*old_grid, -1)
    for axis, (old, new) in enumerate(zip(old_grid, new_grid, strict=True)):
        image = jnp.moveaxis(jnp.tensordot(cubic(old, new).astype(image.dtype), image, (1, axis)), 0, axis)
    return {**params, "table": image.reshape(-1, table.shape[-1])}


def cubic(old, new, a=-0.75):
    """Weights [new, old] of cubic convolution, edges repeated; a as in PyTorch (jax.image.resize has −0.5)."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    tap = np.floor(at)[:, None] + np.arange(-1, 3)
    d = np.abs(at[:, None] - tap)
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, a * (((d - 5) * d + 8) * d - 4)
    weights = np.zeros((new, old))
    np.add.at(weights, (np.arange(new)[:, None], tap.clip(0, old - 1).astype(int)), np.where(d <= 1, near, far))
    return weights
