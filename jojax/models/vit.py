"""The vision transformer: patches → blocks → class token or average → head. Grids need not be square. Patches of three
sides (frames, height, width) make it one of video."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn

from jojax.encodings import hooks
from jojax.encodings.base import Context, wide
from jojax.errors import UserError
from jojax.models import sharded, stack
from jojax.models.attention import Sites
from jojax.models.block import Spec


def grid_of(shape, patch):
    """([frames,] height, width) in patches; UserError where the image or clip is no whole number of patches."""
    if any(n % side for n, side in zip(shape, patch, strict=True)):
        what, sides = ("×".join(map(str, sizes)) for sizes in (shape, patch))
        kind = "an image" if len(patch) == 2 else "a clip"
        raise UserError(f"{kind} of {what} has no whole number of {sides} patches: change model.patch or the size")
    return tuple(n // side for n, side in zip(shape, patch, strict=True))


class ViT(nn.Module):
    spec: Spec
    encoding: Callable
    classes: int
    patch: tuple[int, ...] = (16, 16)
    pool: str = "cls"  # cls | mean
    drop_path: float = 0.0
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, image, *, offset=0.0, train=False):
        """image [B, [frames,] height, width, 3]; offset, a number or one an axis, added to all coordinates, in patches.
        -> logits [B, classes]."""
        spec = self.spec
        if self.pool not in ("cls", "mean"):
            raise UserError(f"model.pool = {self.pool!r}: choose from cls, mean")
        if self.pool == "cls" and spec.window:
            raise UserError(
                f"model.window = {spec.window}: the class token, first in order, would see the first patches alone; "
                "set model.pool = 'mean'"
            )
        grid = grid_of(image.shape[1:-1], self.patch)
        B, C = image.shape[0], spec.dims.width
        init = nn.initializers.normal(spec.init_std)
        x = nn.Conv(C, self.patch, self.patch, padding="VALID", dtype=spec.dtype, kernel_init=init, name="patches")(
            image.astype(spec.dtype)
        )
        x = x.reshape(B, -1, C)
        position = jnp.stack(jnp.meshgrid(*map(jnp.arange, grid), indexing="ij"), -1).reshape(-1, len(grid))
        position = position.astype(wide(spec.dtype)) + jnp.asarray(offset, wide(spec.dtype))
        placed = None
        if self.pool == "cls":
            token = self.param("cls", init, (1, 1, C)).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (B, 1, C)), x], 1)
            position = jnp.concatenate([jnp.zeros_like(position[:1]), position])
            placed = jnp.broadcast_to(jnp.arange(x.shape[1]) > 0, x.shape[:2])
        L = x.shape[1]
        ctx = Context(
            position=jnp.broadcast_to(position, (B, *position.shape)),
            restart=jnp.broadcast_to(jnp.arange(L) == 0, (B, L)),
            segment=jnp.broadcast_to(jnp.arange(B)[:, None], (B, L)),
            placed=placed,
            train=train,
        )
        encoding = self.encoding(name="encoding")
        if encoding.BOUNDED_LENGTH and grid != spec.dims.grid:
            raise UserError(f"this encoding is a table of {spec.dims.grid} patches, the image has {grid}: resize it")
        x, shared, carry = hooks.begin(encoding, x, ctx)
        x = nn.Dropout(spec.dropout, deterministic=not train)(x)
        sites = Sites(jnp.arange(L), None)
        x, _ = stack.run(
            self,
            sharded.lay((x, carry)),
            ctx,
            shared,
            (sites, sites),
            drop_path=self.drop_path,
        )
        x = spec.make_norm("norm")(x)
        x = x[:, 0] if self.pool == "cls" else x.mean(1)
        head = nn.Dense(self.classes, kernel_init=init, name="head")
        return head(x.astype(wide(spec.dtype)))
