"""ComRoPE (CVPR 2025, arXiv 2506.03737): rotations exp(Σ_a u_a A_a) in blocks, by skew generators A_a that commute.

Block j of a head has one free matrix P_j, its generator B_j = P_j − P_jᵀ, and turns by exp(s_j B_j) with

- partition 'ap' (axial, equation 8):              s_j = u_a,  a = j mod axes; head_dim divisible by axes · block
- partition 'ld' (linearly dependent, equation 10): s_j = Σ_a θ_aj u_a; θ a head ('head', the paper) or for all heads
  ('shared', the released code)

The law R(x)ᵀR(y) = R(y − x) holds exactly. With free projections the function class is that of plain RoPE with
learned frequencies; larger blocks change the optimisation (see `fold`).

Starts: 'normal', P ~ N(0, init_std²) (unpublished; the code's default of 1 is a placeholder); 'zero', P = 0, no
rotation, as for fine-tuning; 'spectrum', the frequencies of RoPE-Axial (ap) or RoPE-Mixed (ld) in a random basis, ours.
θ ~ N(0, 1) but for 'spectrum'. Queries and keys travel as published; values with `transport`.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.exponential import exp_phases
from jojax.algebra.operators import phases, plane_generator, skew
from jojax.encodings.coordinates import Spatial
from jojax.encodings.frames import BlockFrame
from jojax.encodings.rope import geometric
from jojax.errors import UserError


class ComRoPE(Spatial):
    partition: str = "ap"
    block: int = 8
    ld_theta: str = "head"
    angle_init: str = "normal"
    init_std: float = 0.02
    coord: str = "unit_center"
    cls_pos: str = "center"

    CHOICES: ClassVar[dict[str, tuple]] = Spatial.CHOICES | {
        "partition": ("ap", "ld"),
        "ld_theta": ("head", "shared"),
        "angle_init": ("normal", "zero", "spectrum"),
    }

    @property
    def STARTS_AS(self):
        return {"name": "none"} if self.angle_init == "zero" else None

    def check(self):
        super().check()
        D, unit = self.dims.head_dim, self.block * (self.dims.axes if self.partition == "ap" else 1)
        if self.block < 2 or D % unit:
            raise UserError(
                f"encoding.block = {self.block} with partition = {self.partition!r}: needs blocks of 2 or more and "
                f"model.head_dim = {D} divisible by {unit}"
            )
        if self.angle_init == "spectrum" and self.partition == "ld" and self.dims.axes != 2:
            raise UserError("encoding.angle_init = 'spectrum' with partition = 'ld' is RoPE-Mixed's: it is for images")

    def idle(self):
        idle = super().idle()
        if self.partition != "ld":
            idle["ld_theta"] = "partition = 'ld'"
        if self.angle_init != "normal":
            idle["init_std"] = "angle_init = 'normal'"
        return idle

    @property
    def blocks(self):
        return self.dims.head_dim // self.block

    @nn.compact
    def begin(self, x, ctx):
        return x, self.noise(ctx), None

    @nn.compact
    def journey(self, shared, carry, ctx):
        u = self.coordinates(shared, self.one_image(ctx))  # [B or 1, L, A]
        generator, theta = self.turns()
        phase = phases(u, theta)  # [B or 1, L, G or 1, m]
        phase = jnp.broadcast_to(phase, (*phase.shape[:2], self.dims.kv_heads, self.blocks))
        return self.travel(BlockFrame(exp_phases(generator.astype(u.dtype), phase)))

    def turns(self):
        """B [G, m, b, b] and θ [A, G or 1, m]: block j turns by exp(Σ_a θ_aj u_a B_j)."""
        p = self.param("p", self.start, (self.dims.kv_heads, self.blocks, self.block, self.block))
        if self.partition == "ap":
            axis = jnp.arange(self.blocks) % self.dims.axes
            return skew(p), (axis == jnp.arange(self.dims.axes)[:, None, None]).astype(p.dtype)
        heads = self.dims.kv_heads if self.ld_theta == "head" else 1
        return skew(p), self.param("theta", self.directions, (self.dims.axes, heads, self.blocks))

    def generators(self):
        generator, theta = self.turns()
        return theta[..., None, None] * generator

    def start(self, key, shape):
        """P [G, m, b, b]"""
        if self.angle_init != "spectrum":
            std = self.init_std if self.angle_init == "normal" else 0.0
            return std * jax.random.normal(key, shape)
        planes, axes, j = self.block // 2, self.dims.axes, jnp.arange(self.blocks)
        if self.partition == "ap":  # block j is number j // axes of its axis
            first, base, size = j // axes * planes, 100.0, self.extents()[j % axes]
        else:  # the second half of the blocks repeats the first, at right angles
            first, base, size = j % -(-self.blocks // 2) * planes, 10.0, jnp.ones(self.blocks)
        count = self.dims.head_dim // (2 * axes)
        w = size[:, None] * geometric(count, base, self.dtype)[first[:, None] + jnp.arange(planes)]  # [m, b/2]
        basis = jnp.linalg.qr(jax.random.normal(key, shape))[0][..., : 2 * planes]
        return basis @ plane_generator(w) @ basis.swapaxes(-1, -2) / 2

    def directions(self, key, shape):
        """θ [A, G or 1, m]"""
        if self.angle_init != "spectrum":
            return jax.random.normal(key, shape)
        phi = jax.random.uniform(key, (shape[1], 1), maxval=2 * jnp.pi)
        phi = phi + jnp.where(jnp.arange(self.blocks) < -(-self.blocks // 2), 0, jnp.pi / 2)
        return self.extents()[:, None, None] * jnp.stack([jnp.sin(phi), jnp.cos(phi)])

    def extents(self):
        """[A]: a coordinate of one is so many patches."""
        return jnp.ones(self.dims.axes) if self.coord == "index" else jnp.asarray(self.dims.trained, jnp.float32)
