"""Rotary frames with angles linear in the coordinates: θ_i = Σ_a position_ia ω_a (RoFormer, arXiv 2104.09864).

`transport='qkv'` is JoFormer-fixed, equal to VO-RoPE / RoVE: values are rotated too and the output is rotated back.

Frequencies ω_a [A, G or 1, D/2]:
- form '1d': one axis; geometric ω_b = base^(−2b/D), or integer ω_b = b rad/step (the released Wikipedia baseline);
- form 'axial': planes split between the axes, y half then x half; ω_k = base^(−k/n), n planes an axis, base 100
  (RoPE-Axial, arXiv 2403.13298); any number of axes
- form 'mixed': all planes turn with both axes: magnitude base^(−4t/D), base 10, direction φ per head in the first
  half of the planes and φ + π/2 in the second (RoPE-Mixed, arXiv 2403.13298). More axes have as many groups of planes,
  their directions orthonormal (ours).

`fraction` p: only the ⌊pn⌋ fastest of n planes turn (an axis or group), at the frequencies that they have among all n
(p-RoPE, arXiv 2410.06205); the others carry no position.

`scale_method` takes text at `scale_factor` s times the training length L (`trained_length`, 0 = data.length), with
frequencies slowed down by plane; for evaluation, or for training on from a model without it:
- pi: ω/s (position interpolation, arXiv 2306.15595)
- ntk: base · s^(D/(D−2)), so that ω_b s^(−b/(D/2−1)): the fastest plane keeps its pace, the slowest has ω/s
- yarn (arXiv 2309.00071): (1 − γ)ω/s + γω, γ rising from 0 for planes that turn once in L to 1 for those that turn 32
  times or more; and q·k times (0.1 ln s + 1)². The ramp is over turns as in the paper, not over plane numbers as in its
  code. Values, where they travel, are turned by the same frequencies.

Learned frequencies start at these values (freq_init 'rope', φ drawn at random) or at N(0, 0.02²) ('normal', the
vision models of JoFormer). Deviation: the directions of a fixed 'mixed' form are spread evenly over the heads, since
a random draw that is no parameter could not be reproduced from the checkpoint; JoFormer's fixed "combined"
frequencies are unpublished.
"""

import itertools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.operators import phases
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
    fraction: float = 1.0
    scale_method: str = "none"
    scale_factor: float = 1.0
    trained_length: int = 0

    CHOICES: ClassVar[dict[str, tuple]] = Spatial.CHOICES | {
        "form": ("1d", "axial", "mixed"),
        "freq": ("geometric", "integer"),
        "pairing": ("half", "interleaved"),
        "freq_init": ("rope", "normal"),
        "scale_method": ("none", "pi", "ntk", "yarn"),
    }

    def check(self):
        super().check()
        D, axes = self.dims.head_dim, self.dims.axes
        if axes != {"1d": 1, "mixed": max(axes, 2)}.get(self.form, axes):
            raise UserError(
                f"encoding.form = {self.form!r} does not fit the model's coordinates, which have {axes} axes"
            )
        if (self.form == "axial" or self.reads_initial) and D % (2 * axes):
            raise UserError(
                f"encoding.form = {self.form!r} splits the planes of a head: make model.head_dim = {D} "
                f"divisible by {2 * axes}"
            )
        if self.fraction > 1 or self.turning < 1:
            raise UserError(
                f"encoding.fraction = {self.fraction}: needs a part of the {D // (2 * axes)} planes, up to 1"
            )
        if self.scale_method != "none" and self.scale_factor <= 1:
            raise UserError(
                f"encoding.scale_method = {self.scale_method!r}: set encoding.scale_factor to the number of training "
                "lengths, above 1"
            )
        if self.scale_method == "ntk" and "base" in self.idle():
            raise UserError("encoding.scale_method = 'ntk' is for geometric frequencies: use pi or yarn")
        if self.scale_method == "yarn" and not (self.trained_length or self.dims.length):
            raise UserError("encoding.scale_method = 'yarn' needs the training length: set encoding.trained_length")

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
        if self.form != "1d":
            idle["scale_method"] = "text (form = '1d')"
        if self.scale_method == "none":
            idle["scale_factor"] = "scale_method = 'pi', 'ntk' or 'yarn'"
        if self.scale_method != "yarn":
            idle["trained_length"] = "scale_method = 'yarn'"
        return idle

    @property
    def reads_initial(self) -> bool:
        """Are the published frequencies used, if only as a start?"""
        return not self.learned or self.freq_init == "rope"

    @property
    def has_shareable(self) -> bool:
        """Are there parameters that all blocks may share?"""
        return self.learned

    @property
    def turning(self) -> int:
        """Planes that turn, an axis or group."""
        return int(self.fraction * (self.dims.head_dim // (2 * self.dims.axes)))

    def travel(self, frame, value_frame=None, **rest):
        sharper = self.scale_method == "yarn" and "qk" in self.transport
        temperature = (0.1 * math.log(self.scale_factor) + 1) ** -2 if sharper else 1.0
        return super().travel(frame, value_frame, temperature=temperature, **rest)

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
        return phases(self.coordinates(noise, self.one_image(ctx)), omega)

    def frequencies(self):
        """ω [A, G or 1, D/2] as they turn: by `fraction` and `scale_method`."""
        heads, n = 1 if self.angle_share_heads else self.dims.kv_heads, self.dims.head_dim // (2 * self.dims.axes)
        omega = self.learned_frequencies(heads) if self.learned else self.initial(heads)
        if self.fraction < 1:
            omega = omega * jnp.tile(jnp.arange(n) < self.turning, self.dims.axes)
        s = self.scale_factor
        if self.scale_method == "ntk":
            return omega * s ** (-jnp.arange(n, dtype=omega.dtype) / max(n - 1, 1))
        if self.scale_method == "none":
            return omega
        turns = jnp.abs(omega) * (self.trained_length or self.dims.length) / (2 * jnp.pi)
        keep = ((turns - 1) / 31).clip(0, 1) if self.scale_method == "yarn" else 0
        return omega * (keep + (1 - keep) / s)

    def learned_frequencies(self, heads):
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
        size = geometric(planes // self.dims.axes, self.base, self.dtype)
        return (directions(self.dims.axes, heads, key)[..., None] * size).reshape(-1, heads, planes)


def directions(axes, heads, key):
    """Of the groups of planes, orthonormal: [A, heads, A groups]. A turn in each pair of axes, one after the other,
    by angles that `key` draws or that are spread evenly over the heads."""
    pairs = list(itertools.combinations(range(axes), 2))
    if key is None:
        phi = jnp.broadcast_to(jnp.pi * (jnp.arange(heads) + 0.5) / heads, (len(pairs), heads))
    else:
        phi = jax.random.uniform(key, (len(pairs), heads), maxval=2 * jnp.pi)
    whole = jnp.broadcast_to(jnp.eye(axes, dtype=phi.dtype)[:, None], (axes, heads, axes))
    for (a, b), angle in zip(pairs, phi, strict=True):
        c, s = jnp.cos(angle), jnp.sin(angle)
        first, second = whole[..., a], whole[..., b]
        whole = whole.at[..., a].set(c * first + s * second).at[..., b].set(c * second - s * first)
    return whole
