"""GRAPE-M: multiplicative group actions G(n) = exp(nL), L skew (GRAPE, sections 2–3, appendices B and D).

`kind`:
- plane: one plane a head, spanned by two learned vectors, at a learned frequency (section 2, Rodrigues)
- freq: canonical planes, learned spectrum θ_i = exp(λ_i/16), λ stored: the released code's "non-contextual" model,
  RoPE at the start. One spectrum a block, for all heads unless `per_head`
- basis: planes in a learned basis B, G(n) = B R(nθ) Bᵀ with the spectrum of freq (section 3.1). `basis` 'cayley':
  B = (I − S)(I + S)⁻¹; 'householder': `reflectors` reflections, an even number; 'unitary': the paper's b_i = 𝒥 a_i
  form, a unitary frame of half the width (exp of an anti-Hermitian matrix). All start at the identity but
  householder's random one
- mix: L of rank 2·planes with overlapping planes, as E K Eᵀ with K a free skew matrix; starts as RoPE of the first
  frequencies in a random subspace (appendix D, thin form)
- ctx: the phase is content: Φ_t = Σ_{u<t} ω_u, angles Φ_t θ, ω = σ((w·x + c)/16), c = log(e^0.001 − 1) as released, so
  that phases start 0.394 times as fast as positions. `phase_fn` 'softplus' is the first version's link, 'one' has no
  content (freq). One ω for all heads unless `per_head`

Images and video (appendix G; kinds freq and basis): G(u, v, …) = exp(uLˣ + vLʸ + …) obeys
the relative law where the generators commute. `form` 'axial': the planes are split between the axes, each with its own
spectrum; 'mixed': every plane turns with all axes, at signed frequencies of its own, which is the general commuting
form; they start as RoPE-Mixed's with base `base`.

Outer bases cancel in scores; they matter where values travel (`transport`). Gates and phases are float32 or wider.
Deviation: the released code turns by −nθ, which projections absorb; published checkpoints need a sign flipped.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.exponential import exp_phases
from jojax.algebra.operators import phases, plane_generator, skew
from jojax.encodings.base import Rotary, path_sum, wide
from jojax.encodings.frames import PlaneFrame, SubspaceFrame
from jojax.encodings.rope import directions, geometric
from jojax.errors import UserError

KAPPA = 16.0


class GrapeM(Rotary):
    kind: str = "freq"
    base: float = 10_000.0
    form: str = "axial"
    per_head: bool = False
    pairing: str = "half"
    basis: str = "cayley"
    reflectors: int = 8
    planes: int = 2
    phase_fn: str = "sigmoid16"

    CHOICES: ClassVar[dict[str, tuple]] = Rotary.CHOICES | {
        "kind": ("plane", "freq", "basis", "mix", "ctx"),
        "form": ("axial", "mixed"),
        "pairing": ("half", "interleaved"),
        "basis": ("cayley", "householder", "unitary"),
        "phase_fn": ("sigmoid16", "softplus", "one"),
    }

    @property
    def content(self):
        return self.kind == "ctx" and self.phase_fn != "one"

    @property
    def CAUSAL_ONLY(self):
        return self.kind == "ctx"

    @property
    def FLAT(self):
        return not self.content

    @property
    def STARTS_AS(self):
        """Plain RoPE, in text and on an axial grid."""
        if self.kind != "freq" or (self.dims.axes > 1 and self.form != "axial"):
            return None
        form = "1d" if self.dims.axes == 1 else self.form
        kept = {option: getattr(self, option) for option in ("transport", "base", "pairing")}
        return {"name": "rope", "form": form, **kept}

    def check(self):
        super().check()
        D, axes = self.dims.head_dim, self.dims.axes
        if axes > 1 and self.kind not in ("freq", "basis"):
            raise UserError(f"encoding.kind = {self.kind!r} has one axis: for images use freq or basis")
        if D % (2 * axes):
            raise UserError(
                f"encoding grape_m splits planes between axes: make model.head_dim = {D} divisible by {2 * axes}"
            )
        if self.kind == "mix" and not 1 <= self.planes <= D // 2:
            raise UserError(f"encoding.planes = {self.planes}: needs 1 to {D // 2} planes of a head of {D}")
        if self.kind == "basis" and self.basis == "householder" and (self.reflectors < 2 or self.reflectors % 2):
            raise UserError(f"encoding.reflectors = {self.reflectors}: an even number turns, an odd one mirrors")

    def idle(self):
        idle = super().idle()
        for option, kinds in (
            ("base", ("freq", "basis", "mix", "ctx")),
            ("per_head", ("freq", "basis", "ctx")),
            ("pairing", ("freq", "ctx")),
            ("basis", ("basis",)),
            ("planes", ("mix",)),
            ("phase_fn", ("ctx",)),
        ):
            if self.kind not in kinds:
                idle[option] = f"kind = {' or '.join(map(repr, kinds))}"
        if (self.kind, self.phase_fn) == ("ctx", "one"):
            idle["per_head"] = "phases of content"
        if self.dims.axes == 1:
            idle["form"] = "coordinates with several axes"
        if (self.kind, self.basis) != ("basis", "householder"):
            idle["reflectors"] = "basis = 'householder'"
        return idle

    @nn.compact
    def journey(self, shared, carry, ctx):
        at = ctx.position[:1] if self.dims.grid else ctx.position  # a batch of images has one grid
        position, last = at[..., 0], None  # [B or 1, L]
        if self.kind == "plane":
            frame = SubspaceFrame(self.frame_of(2), angles=position[..., None, None] * self.speeds(1))
        elif self.kind == "mix":
            phase = jnp.broadcast_to(position[..., None], (*position.shape, self.dims.kv_heads))
            frame = SubspaceFrame(self.frame_of(2 * self.planes), matrix=exp_phases(self.mixed(), phase))
        elif self.kind == "basis":
            frame = SubspaceFrame(getattr(self, self.basis)(), angles=phases(at, self.velocities()))
        elif self.content:
            phase, _, last = path_sum(self.gate(ctx), ctx)
            frame = PlaneFrame(phase[..., None] * self.spectrum(), pairing=self.pairing)
        else:
            frame = PlaneFrame(phases(at, self.velocities()), pairing=self.pairing)
        return self.travel(frame, prefix=last)

    def velocities(self):
        """θ [A, G or 1, D/2]"""
        axes, planes = self.dims.axes, self.dims.head_dim // 2
        if axes == 1:
            return self.spectrum()[None]
        if self.form == "axial":
            return jnp.repeat(jnp.eye(axes), planes // axes, -1)[:, None] * self.spectrum()

        def start(key, shape):
            size = geometric(planes // axes, self.base, self.dtype)
            return (directions(axes, shape[1], key)[..., None] * size).reshape(shape)

        return self.param("freq", start, (axes, self.dims.kv_heads if self.per_head else 1, planes))

    def generators(self):
        if self.content:
            return super().generators()
        D, G = self.dims.head_dim, self.dims.kv_heads
        if self.kind == "mix":
            e, k = self.frame_of(2 * self.planes), self.mixed()
        elif self.kind == "plane":
            e, k = self.frame_of(2), plane_generator(self.speeds(1))
        else:
            k, e = plane_generator(self.velocities()), jnp.eye(D)
            if self.kind == "basis":
                e = getattr(self, self.basis)()
            elif self.pairing == "half":
                e = e[:, jnp.arange(D).reshape(2, -1).T.ravel()]
        return jnp.broadcast_to(e @ k @ e.swapaxes(-1, -2), (self.dims.axes, G, D, D))[:, :, None]

    def spectrum(self):
        """θ [G or 1, D/2]"""
        axes = self.dims.axes
        start = jnp.log(jnp.tile(geometric(self.dims.head_dim // (2 * axes), self.base, self.dtype), axes))
        scale = KAPPA if self.kind != "ctx" else 1.0  # the contextual model stores log θ itself
        heads = self.dims.kv_heads if self.per_head and self.kind != "ctx" else 1
        shape = (heads, start.size)
        return jnp.exp(self.param("log_freq", lambda _, shape: jnp.broadcast_to(scale * start, shape), shape) / scale)

    def speeds(self, planes):
        """ω [G, planes], one at the start."""
        return jnp.exp(self.param("log_speed", nn.initializers.zeros, (self.dims.kv_heads, planes)))

    def gate(self, ctx):
        """ω_t [B, L, G or 1], 0 to 1 (sigmoid16) or above 0 (softplus)."""
        bias = nn.initializers.constant(math.log(math.expm1(1e-3)))
        heads, dtype = self.dims.kv_heads if self.per_head else 1, wide(self.dtype)
        dense = nn.Dense(heads, dtype=dtype, kernel_init=nn.initializers.zeros, bias_init=bias, name="gate")
        raw = dense(ctx.x)
        return nn.sigmoid(raw / KAPPA) if self.phase_fn == "sigmoid16" else nn.softplus(raw)

    def frame_of(self, columns):
        """E [G, D, columns] with orthonormal columns, from free ones."""
        shape = (self.dims.kv_heads, self.dims.head_dim, columns)
        q, r = jnp.linalg.qr(self.param("span", nn.initializers.normal(1.0), shape))
        # the signs of Gram and Schmidt: else a plane would turn the other way where an entry passes zero
        return q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[:, None]

    def mixed(self):
        """K [G, r, r]"""

        def start(_, shape):
            theta = geometric(self.dims.head_dim // 2, self.base, self.dtype)[: self.planes]
            return jnp.broadcast_to(plane_generator(theta) / 2, shape)

        r = 2 * self.planes
        return skew(self.param("generator", start, (self.dims.kv_heads, r, r)))

    def cayley(self):
        D = self.dims.head_dim
        s = skew(self.param("cayley", nn.initializers.zeros, (self.dims.kv_heads, D, D)))
        one = jnp.eye(D, dtype=s.dtype)
        return jnp.linalg.solve(one + s, one - s)

    def householder(self):
        D = self.dims.head_dim
        v = self.param("mirrors", nn.initializers.normal(1.0), (self.reflectors, self.dims.kv_heads, D))
        v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)

        def mirror(b, v):
            return b - 2 * v[:, :, None] * (v[:, None] @ b), None

        start = jnp.broadcast_to(jnp.eye(D, dtype=v.dtype), (self.dims.kv_heads, D, D))
        return jax.lax.scan(mirror, start, v)[0]

    def unitary(self):
        """exp of an anti-Hermitian matrix of half the width, as a real one on the columns (a_1, 𝒥a_1, a_2, …)."""
        n = self.dims.head_dim // 2
        x = self.param("unitary", nn.initializers.zeros, (2, self.dims.kv_heads, n, n))
        real, imaginary = skew(x[0]), x[1] + x[1].swapaxes(-1, -2)
        whole = jnp.stack([jnp.stack([real, -imaginary], -1), jnp.stack([imaginary, real], -1)], -3)
        return exp_phases(whole.reshape(-1, 2 * n, 2 * n), jnp.ones(self.dims.kv_heads))
