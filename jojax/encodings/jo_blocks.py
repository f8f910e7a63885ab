"""JoFormer with steps that do not commute: rotations of blocks of b dimensions, multiplied along the path.

    R_t = exp(S_t) R(ω),    A_t = R_1 R_2 … R_{t−1},    S_t in so(b) for every block, b (b − 1)/2 content angles δ_t

δ = 0 is jo_fixed (planes of neighbouring dimensions) and blocks of 2, which commute, are jo_projected, where positions
count the sites: the base is a factor of each step too, for here no closed form t·ω can stand beside the product. In
larger blocks a journey depends on the order of what lies between, not on its sum alone: curved, no longer angles. In a
block of odd size the base does not turn the last dimension, and uses the first of the frequencies. `accumulate='none'`
is the frame exp(S_t) R(tω) of a site alone.

Sources, bounds and conventions of the angles are joformer's. The other `journey_sign` is none here: it would be
A_j⁻¹ A_k, no product of a part of k and a part of j. Source: the review of the paper, which leaves this open.

One Newton–Schulz step after the product makes frames orthogonal. Largest entry of |AᵀA − I| over 4,096 steps in
float32, without and with it: 1e-4 to 3e-4 and 4e-7 to 5e-7 (b = 2, 3, 4, 8). The first grows with the steps of one
chunk, the second with its square; what is handed on is made orthogonal too, so that streams do not drift. Work L·D·b²
and memory L·D·b a head.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra import elements, operators
from jojax.encodings.frames import BlockFrame, orthonormal
from jojax.encodings.joformer import JoFormer
from jojax.errors import UserError


def turned(rows, angles):
    """M R(angles): M [..., b, b], angles [..., b // 2] of planes of neighbours. M Rᵀ would turn its rows."""
    n, rows = 2 * angles.shape[-1], rows.astype(angles.dtype)
    return jnp.concatenate(
        [operators.rotate(rows[..., :n], -angles[..., None, :], "interleaved"), rows[..., n:]], axis=-1
    )


class JoBlocks(JoFormer):
    block: int = 4
    pairing: str = "interleaved"

    CHOICES: ClassVar[dict[str, tuple]] = JoFormer.CHOICES | {
        "block": (2, 3, 4, 8),
        "form": ("1d",),
        "pairing": ("interleaved",),
        "angle_source": JoFormer.CHOICES["angle_source"][1:],
        "angle_bound": ("tanh", "norm", "norm_abs", "none"),
        "accumulate": ("prefix", "none"),
        "journey_sign": (1,),
    }

    def check(self):
        super().check()
        if self.dims.head_dim % self.block:
            raise UserError(f"encoding.block = {self.block} must divide model.head_dim = {self.dims.head_dim}")

    @property
    def angles_a_head(self):
        return self.dims.head_dim * (self.block - 1) // 2

    @nn.compact
    def journey(self, shared, carry, ctx):
        of_base, shared_z = shared
        b, m = self.block, self.dims.head_dim // self.block
        omega = self.base_angles(of_base, ctx.replace(position=jnp.ones_like(ctx.position[:1, :1])))
        omega = omega[..., : m * (b // 2)].reshape(*omega.shape[:3], m, b // 2)
        linear = ctx.position[..., None, None] * omega
        step = operators.exp_skew(self.skews(self.steps(shared_z if carry is None else carry, ctx)))
        if self.angle_base == "rope":
            step = turned(step, linear if self.accumulate == "none" else omega)
        path, last = self.along(step, ctx, elements.product, jnp.eye(b))
        frame = BlockFrame(orthonormal(path))
        of_values = {
            "same": frame,
            "fixed": BlockFrame(turned(jnp.broadcast_to(jnp.eye(b), (*linear.shape[:-1], b, b)), linear)),
            "stop": jax.lax.stop_gradient(frame),
        }[self.v_angles]
        return self.travel(frame, of_values, prefix=None if last is None else orthonormal(last))

    def skews(self, turns):
        """S [B, L, G or 1, m, b, b] of angles in turns [B, L, G or 1, m·b(b − 1)/2], below the diagonal row by row."""
        below = jnp.tril_indices(self.block, -1)
        angles = 2 * jnp.pi * turns.reshape(*turns.shape[:3], -1, len(below[0]))
        empty = jnp.zeros((*angles.shape[:-1], self.block, self.block), angles.dtype)
        return operators.skew(empty.at[..., *below].set(angles))
