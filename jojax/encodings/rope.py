"""Rotary frames with angles linear in the coordinates: θ_i = Σ_a position_ia ω_a (RoFormer, arXiv 2104.09864).

`transport='qkv'` is JoFormer-fixed, equal to VO-RoPE / RoVE: values are rotated too and the output is rotated back.

Frequencies ω_a [A, G or 1, D/2]:
- form '1d': one axis; geometric ω_b = base^(−2b/D), or integer ω_b = b rad/step (the released Wikipedia baseline);
- form 'axial': planes split between the axes, y half then x half; ω_k = base^(−k/n), n planes an axis, base 100
  (RoPE-Axial, arXiv 2403.13298);
- form 'mixed': all planes turn with all (two) axes: magnitude base^(−4t/D), base 10, direction φ per head in the
  first half of the planes and φ + π/2 in the second (RoPE-Mixed, arXiv 2403.13298).

Learned frequencies start at these values (freq_init 'rope') or at N(0, 0.02²) ('normal', the vision models of
JoFormer). Deviation: the directions of a fixed 'mixed' form are spread evenly over the heads, since a random draw
that is not a parameter would not be reproducible from the checkpoint.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.encodings import base
from jojax.errors import UserError


class Rope(base.Encoding):
    form: str = "1d"  # 1d | axial | mixed
    base: float = 10_000.0
    freq: str = "geometric"  # geometric | integer (form 1d)
    pairing: str = "half"  # half | interleaved
    learned: bool = False
    freq_init: str = "rope"  # rope | normal
    angle_share_heads: bool = False  # learned: one vector for all heads
    angle_share_layers: bool = False  # learned: one set for all blocks

    @nn.compact
    def begin(self, x, ctx):
        return x, self.frequencies() if self.learned and self.angle_share_layers else None, None

    @nn.compact
    def journey(self, shared, carry, ctx):
        return self.travel(self.plane_frame(self.base_angles(shared, ctx), pairing=self.pairing))

    def base_angles(self, shared, ctx):
        """[B, L, G or 1, D/2] radians, in closed form: no sum that could drift."""
        omega = self.frequencies() if shared is None else shared
        position = ctx.position
        if position.shape[-1] != omega.shape[0]:
            raise UserError(
                f"encoding.form = {self.form!r} has {omega.shape[0]} axes, "
                f"the model's coordinates have {position.shape[-1]}"
            )
        return jnp.einsum("bla,agf->blgf", position, omega.astype(position.dtype))

    def frequencies(self):
        """ω [A, G or 1, D/2], a parameter where learned."""
        if not self.learned:
            return self.initial_frequencies(None)
        heads = 1 if self.angle_share_heads else self.dims.kv_heads
        planes = self.dims.head_dim // 2
        axes = {"1d": 1, "mixed": 2}.get(self.form, self.dims.axes)

        def init(key, shape):
            if self.freq_init == "normal":
                omega = 0.02 * jax.random.normal(key, shape)
                return omega if self.form != "axial" else omega * self.axial_mask()
            if self.freq_init != "rope":
                raise UserError(f"encoding.freq_init = {self.freq_init!r}: choose from rope, normal")
            return jnp.broadcast_to(self.initial_frequencies(key), shape)

        omega = self.param("freq", init, (axes, heads, planes))
        # a learned axial form stays axial: the planes of one axis never see the other
        return omega if self.form != "axial" else omega * self.axial_mask()

    def axial_mask(self):
        axes, planes = self.dims.axes, self.dims.head_dim // 2
        if planes % axes:
            raise UserError(
                f"encoding form 'axial' splits the {planes} planes of a head over {axes} axes: "
                f"make model.head_dim = {self.dims.head_dim} divisible by {2 * axes}"
            )
        return jnp.repeat(jnp.eye(axes), planes // axes, -1)[:, None]

    def initial_frequencies(self, key):
        D, planes = self.dims.head_dim, self.dims.head_dim // 2
        if self.form == "1d":
            index = jnp.arange(planes, dtype=base.wide(self.dtype))
            if self.freq not in ("geometric", "integer"):
                raise UserError(f"encoding.freq = {self.freq!r}: choose from geometric, integer")
            omega = index if self.freq == "integer" else self.base ** (-2 * index / D)
            return omega[None, None]
        if self.form == "axial":
            mask = self.axial_mask()
            n = planes // self.dims.axes
            omega = self.base ** (-jnp.arange(n, dtype=base.wide(self.dtype)) / n)
            return mask * jnp.tile(omega, self.dims.axes)
        if self.form == "mixed":
            return self.mixed_frequencies(key)
        raise UserError(f"encoding.form = {self.form!r}: choose from 1d, axial, mixed")

    def mixed_frequencies(self, key):
        D, heads = self.dims.head_dim, self.dims.kv_heads
        if D % 4:
            raise UserError(f"encoding form 'mixed' halves the planes: make model.head_dim = {D} divisible by 4")
        magnitude = self.base ** (-4 * jnp.arange(D // 4, dtype=base.wide(self.dtype)) / D)
        if key is None:
            phi = jnp.pi * (jnp.arange(heads) + 0.5) / heads
        else:
            phi = jax.random.uniform(key, (heads,), maxval=2 * jnp.pi)
        phi = phi[:, None] + jnp.array([0, jnp.pi / 2])  # [G, 2]: first and second half of the planes
        direction = jnp.stack([jnp.cos(phi), jnp.sin(phi)])  # [A=2, G, 2]
        return (direction[..., None] * magnitude).reshape(2, heads, D // 2)
