"""Rotary frames with angles linear in the coordinates: θ_i = Σ_a position_ia ω_a (RoFormer, arXiv 2104.09864).

`transport='qkv'` is JoFormer-fixed, equal to VO-RoPE / RoVE: values are rotated too and the output is rotated back.

Frequencies ω_a [A, G or 1, D/2]:
- form '1d': one axis; geometric ω_b = base^(−2b/D), or integer ω_b = b rad/step (the released Wikipedia baseline);
- form 'axial': planes split between the axes, y half then x half; ω_k = base^(−k/n), n planes an axis, base 100
  (RoPE-Axial, arXiv 2403.13298);
- form 'mixed': all planes turn with both axes: magnitude base^(−4t/D), base 10, direction φ per head in the first
  half of the planes and φ + π/2 in the second (RoPE-Mixed, arXiv 2403.13298).

Learned frequencies start at these values (freq_init 'rope', φ drawn at random) or at N(0, 0.02²) ('normal', the
vision models of JoFormer). Deviation: the directions of a fixed 'mixed' form are spread evenly over the heads, since
a random draw that is no parameter could not be reproduced from the checkpoint; JoFormer's fixed "combined"
frequencies are unpublished.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.encodings.base import wide
from jojax.encodings.coordinates import Spatial
from jojax.encodings.frames import PlaneFrame
from jojax.errors import UserError


def geometric(planes, base, dtype):
    """base^(−b/planes), b = 0 … planes − 1."""
    return base ** (-jnp.arange(planes, dtype=wide(dtype)) / planes)


class Rope(Spatial):
    form: str = "1d"
    base: float = 10_000.0
    freq: str = "geometric"  # of form 1d
    pairing: str = "half"
    learned: bool = False
    freq_init: str = "rope"  # of learned frequencies
    angle_share_heads: bool = False  # one set of angles for all heads
    angle_share_layers: bool = False  # one set of parameters for all blocks

    CHOICES: ClassVar[dict[str, tuple]] = Spatial.CHOICES | {
        "form": ("1d", "axial", "mixed"),
        "freq": ("geometric", "integer"),
        "pairing": ("half", "interleaved"),
        "freq_init": ("rope", "normal"),
    }

    def check(self):
        super().check()
        D, axes = self.dims.head_dim, self.dims.axes
        if axes != {"1d": 1, "mixed": 2}.get(self.form, axes):
            raise UserError(
                f"encoding.form = {self.form!r} does not fit the model's coordinates, which have {axes} axes"
            )
        if self.form == "axial" and D % (2 * axes):
            raise UserError(
                f"encoding.form = 'axial' splits the planes of a head: make model.head_dim = {D} "
                f"divisible by {2 * axes}"
            )
        if self.form == "mixed" and self.reads_initial and D % 4:
            raise UserError(
                f"encoding.form = 'mixed' halves the planes of a head: make model.head_dim = {D} divisible by 4"
            )

    def idle(self):
        idle = super().idle()
        if self.form != "1d" or not self.reads_initial:
            idle["freq"] = "published frequencies of form = '1d'"
        if not self.learned:
            idle["freq_init"] = "learned frequencies (learned = True)"
        if not self.has_shareable:
            idle["angle_share_layers"] = "parameters that blocks can share, and there are none"
        if self.freq == "integer" or not self.reads_initial:
            idle["base"] = "geometric frequencies"
        return idle

    @property
    def reads_initial(self) -> bool:
        """Are the published frequencies used, if only as a start?"""
        return not self.learned or self.freq_init == "rope"

    @property
    def has_shareable(self) -> bool:
        """Are there parameters that all blocks may share?"""
        return self.learned

    @nn.compact
    def begin(self, x, ctx):
        omega = self.frequencies() if self.learned and self.angle_share_layers else None
        return x, (self.noise(ctx), omega), None

    @nn.compact
    def journey(self, shared, carry, ctx):
        return self.travel(PlaneFrame(self.base_angles(shared, ctx), pairing=self.pairing))

    def base_angles(self, shared, ctx):
        """Σ_a position_a ω_a [B or 1, L, G or 1, D/2] in closed form: no sum over sites that could drift.

        shared: of `begin`; (perturbation or None, shared frequencies or None for the block's own)."""
        noise, omega = shared or (None, None)
        omega = self.frequencies() if omega is None else omega
        position = self.coordinates(noise, self.one_image(ctx))[:, :, None, None]
        # a product and a sum, no dot: accelerators would round its factors
        return (position * jnp.moveaxis(omega, 0, -1).astype(position.dtype)).sum(-1)

    def frequencies(self):
        """ω [A, G or 1, D/2]; a parameter where learned."""
        heads = 1 if self.angle_share_heads else self.dims.kv_heads
        if not self.learned:
            return self.initial(heads)
        axes = 1 if self.form == "axial" else self.dims.axes  # axial: each plane has its one axis

        def init(key, shape):
            if self.freq_init == "normal":
                return 0.02 * jax.random.normal(key, shape)
            omega = self.initial(heads, key)
            return jnp.broadcast_to(omega.sum(0, keepdims=True) if self.form == "axial" else omega, shape)

        omega = self.param("freq", init, (axes, heads, self.dims.head_dim // 2))
        return omega * self.planes_of_axes() if self.form == "axial" else omega

    def planes_of_axes(self):
        """[A, 1, D/2]: 1 where a plane of the axial form turns with the axis."""
        axes = self.dims.axes
        return jnp.repeat(jnp.eye(axes), self.dims.head_dim // (2 * axes), -1)[:, None]

    def initial(self, heads, key=None):
        """The published frequencies; `key` draws the directions of the mixed form."""
        planes = self.dims.head_dim // 2
        if self.form == "axial":
            axes = self.dims.axes
            return self.planes_of_axes() * jnp.tile(geometric(planes // axes, self.base, self.dtype), axes)
        if self.form == "1d":
            integers = jnp.arange(planes, dtype=wide(self.dtype))
            return (integers if self.freq == "integer" else geometric(planes, self.base, self.dtype))[None, None]
        if key is None:
            phi = jnp.pi * (jnp.arange(heads) + 0.5) / heads
        else:
            phi = jax.random.uniform(key, (heads,), maxval=2 * jnp.pi)
        phi = phi[:, None] + jnp.array([0, jnp.pi / 2])  # [heads, 2]: first and second half of the planes
        direction = jnp.stack([jnp.cos(phi), jnp.sin(phi)])  # [A=2, heads, 2]
        return (direction[..., None] * geometric(planes // 2, self.base, self.dtype)).reshape(2, heads, planes)
