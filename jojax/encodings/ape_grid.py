"""A learned table over the training grid, sampled bilinearly where a patch stands and added to it once: the absolute
encoding that ComRoPE (arXiv 2506.03737) compares with, which answers at any resolution, offset and perturbation.

The coordinate u in [0, 1] of an axis with n₀ cells reads the table at u n₀ − ½, so that the patches of the training
grid meet its cells; beyond the rim its last cell stands. The class token reads the middle of the table ('center', as
released) or nothing. Table ~ N(0, init_std²), 1 as released.

Deviations: the released code reads the table at the row in place of the column and the middle row, so that it ignores
columns; and between cells even at the training grid (align_corners). `absolute` with kind 'learned' is the other table:
of whole patches, N(0, 0.02²), resized by cubic convolution.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jojax.encodings.coordinates import Places
from jojax.errors import UserError


class ApeGrid(Places):
    coord: str = "unit_center"
    cls_pos: str = "center"
    init_std: float = 1.0

    CHOICES: ClassVar[dict[str, tuple]] = Places.CHOICES | {"coord": ("unit_center",)}
    RELATIVE = False

    def check(self):
        if not self.dims.grid:
            raise UserError(
                "encoding ape_grid is a table over an image or clip: for text use absolute with kind = 'learned'"
            )
        super().check()

    @nn.compact
    def begin(self, x, ctx):
        u, token = self.places(self.noise(ctx), self.one_image(ctx))
        placed = None if ctx.placed is None else ctx.placed[: len(u), :, None]
        if token is not None and placed is not None:
            u = jnp.where(placed, u, token)
        grid = self.dims.trained
        table = self.param("table", nn.initializers.normal(self.init_std), (*grid, self.dims.width)).astype(u.dtype)
        weights = (hats(u[..., a], n) for a, n in enumerate(grid))
        axes = "tyx"[-len(grid) :]
        form = ",".join([*(f"bl{a}" for a in axes), f"{axes}c->blc"])
        added = jnp.einsum(form, *weights, table, precision=lax.Precision.HIGHEST)
        if token is None and placed is not None:
            added = jnp.where(placed, added, 0)
        return x + added.astype(x.dtype), None, None


def hats(u, n):
    """Of coordinates u [...] in [0, 1] the weights [..., n] on the n cells of an axis; each row adds up to 1."""
    at = (u * n - 0.5).clip(0, n - 1)[..., None]
    return jnp.maximum(0, 1 - jnp.abs(at - jnp.arange(n)))


def resize(params, old_grid, new_grid):
    """{'table': [*old, C]} -> {'table': [*new, C]}, read where the patches of another grid stand: to train on from."""
    table = params["table"]
    for axis, (old, new) in enumerate(zip(old_grid, new_grid, strict=True)):
        weights = hats((np.arange(new) + 0.5) / new, old)
        table = jnp.moveaxis(jnp.tensordot(weights, table, (1, axis), precision=lax.Precision.HIGHEST), 0, axis)
    return {**params, "table": table}
