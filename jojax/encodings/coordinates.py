"""Where a patch stands: coordinates as the vision papers scale them, perturbed in training where asked for.

`coord`, for index i (an offset included) on an axis that has n patches now and n₀ at the training size:
- index: i. A larger image extrapolates (RoPE-Axial, RoPE-Mixed)
- unit_center: (i + ½)/n. The range stays, steps shrink (ComRoPE, arXiv 2506.03737, section 3.4.1)
- train_prop: i/n₀. Steps stay, the range grows
- train_prop_linspace: i/(n − 1) · n/n₀, ends included (LieRE's released code)

`cls_pos`: where the class token stands. none: at no place, it is never turned (RoPE-Mixed, LieRE); center: in the
middle of the image (ComRoPE's code). Attention gives it the identity frame, so the middle is made the origin: frames
that act on differences cannot tell.

`perturb_sigma` σ adds N(0, (σ · perturb_scale)²) patches to each coordinate in training, cut to the patch: 'clamp'
moves what is outside to its border (ComRoPE's code, scale ½), 'truncnorm' draws from inside (its equation 11, scale 1).
One draw for a whole batch, as in the code, or one an image (`perturb_per_sample`). The frames of a clip are not moved.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jojax.encodings.base import Encoding, Rotary
from jojax.errors import UserError


class Places(Encoding):
    """Base of the encodings that depend on coordinates alone."""

    coord: str = "index"
    cls_pos: str = "none"
    perturb_sigma: float = 0.0
    perturb_scale: float = 0.5
    perturb_mode: str = "clamp"
    perturb_per_sample: bool = False

    CHOICES: ClassVar[dict[str, tuple]] = {
        "coord": ("index", "unit_center", "train_prop", "train_prop_linspace"),
        "cls_pos": ("none", "center"),
        "perturb_mode": ("clamp", "truncnorm"),
    }

    def check(self):
        super().check()
        if self.perturb_sigma < 0 or self.perturb_scale <= 0:
            raise UserError("encoding.perturb_sigma must be 0 (off) or above, encoding.perturb_scale above 0")
        if not self.dims.grid and (self.coord, self.cls_pos) != ("index", "none"):
            raise UserError(
                f"encoding.coord = {self.coord!r} and encoding.cls_pos = {self.cls_pos!r} are for images; text counts "
                "its sites: coord = 'index', cls_pos = 'none'"
            )

    def idle(self):
        idle = super().idle()
        if len(self.dims.grid) < 2:
            idle["perturb_sigma"] = "images"
        if not self.perturb_sigma:
            idle |= dict.fromkeys(("perturb_scale", "perturb_mode", "perturb_per_sample"), "perturb_sigma above 0")
        return idle

    def noise(self, ctx):
        """Perturbation of this step in patches, [1 or B, L, A], or None; to be drawn once, in `begin`."""
        if not (self.perturb_sigma and ctx.train):
            return None
        B, L, axes = ctx.position.shape
        shape = (B if self.perturb_per_sample else 1, L, 2)
        sigma, dtype = self.perturb_sigma * self.perturb_scale, ctx.position.dtype
        if self.perturb_mode == "clamp":
            drawn = (sigma * jax.random.normal(self.make_rng("encoding"), shape, dtype)).clip(-0.5, 0.5)
        else:
            edge = 0.5 / sigma
            drawn = sigma * jax.random.truncated_normal(self.make_rng("encoding"), -edge, edge, shape, dtype)
        drawn = jnp.pad(drawn, ((0, 0), (0, 0), (axes - 2, 0)))  # frames stay in their place
        return drawn if ctx.placed is None else jnp.where(ctx.placed[: shape[0], :, None], drawn, 0)

    def one_image(self, ctx):
        """A batch of images has one grid: what depends on coordinates alone need be made once, [1, L, ...]."""
        if self.perturb_per_sample or not self.dims.grid:
            return ctx
        return ctx.replace(position=ctx.position[:1], placed=None if ctx.placed is None else ctx.placed[:1])

    def coordinates(self, noise, ctx):
        """[B, L, A], the class token's place at the origin where it has one; float32 or wider."""
        u, token = self.places(noise, ctx)
        return u if token is None else u - token

    def places(self, noise, ctx):
        """(coordinates [B, L, A], those of the class token [B, 1, A] or None), float32 or wider; sites without a place
        have meaningless ones."""
        at = ctx.position if noise is None else ctx.position + noise
        if self.coord == "index" and self.cls_pos == "none":
            return at, None
        placed = jnp.ones(at.shape[:2], bool) if ctx.placed is None else ctx.placed
        inside = placed[..., None]
        low = jnp.where(inside, ctx.position, jnp.inf).min(1, keepdims=True)
        high = jnp.where(inside, ctx.position, -jnp.inf).max(1, keepdims=True)
        n, trained = high - low + 1, jnp.asarray(self.dims.trained, at.dtype)
        scale = {
            "index": 1.0,
            "unit_center": 1 / n,
            "train_prop": 1 / trained,
            "train_prop_linspace": n / trained / jnp.maximum(n - 1, 1),
        }[self.coord]
        half = 0.5 if self.coord == "unit_center" else 0.0
        return (at + half) * scale, ((low + high) / 2 + half) * scale if self.cls_pos == "center" else None


class Spatial(Places, Rotary):
    """Base of the rotary encodings whose frames depend on coordinates alone."""

    CHOICES: ClassVar[dict[str, tuple]] = Rotary.CHOICES | Places.CHOICES
