"""JoFormer: rotary frames whose step angles depend on content and add up along the path (journey operators).

    a_t = ω + δ_t,    Θ_t = Σ_{u<t} a_u,    A_t = R(Θ_t),    values travel too (`transport='qkv'`)

The base part t·ω is used in closed form and only the content part δ is summed, in turns, wrapped exactly: so a model
whose δ is zero (its start, `angle_init='zero'`) equals jo_fixed bit for bit, and a long float32 sum does not drift.

Angle sources (`angle_source`), z_t being the raw output:
- position: no content, δ = 0 (jo_fixed); frequencies learned with `learned=True`
- token_table: z = E[token], one table for the model or one a block (`angle_share_layers`)
- ffn_flow: z = E[token] in the first block, then W g with g the activation of the previous block's MLP. The model
  behind the published 1.02 ratio. Deviation: the last block's head, which nobody reads, is not stored
- own_mlp: z = W2 GELU(W1 x), width `angle_hidden_mult`·C (the formula in the review of the paper)
- linear: z = W x
x is the block's normalised input, or its raw residual with `angle_ln=False` (the Wikipedia experiments).

δ = π tanh z ('tanh'), ω tanh z ('tanh_freq'), LayerNorm(z) ('norm'), |LayerNorm(z)| ('norm_abs') or z ('none').
`accumulate='none'` reads δ_t as the angle of site t itself (no path: does not extrapolate in the author's runs).
The released code sums the suffix instead; the exclusive prefix here is the same up to a constant, causal bit for
bit, and can be streamed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import wrapped_add
from jojax.encodings import base, rope
from jojax.errors import UserError

SOURCES = ("position", "token_table", "ffn_flow", "own_mlp", "linear")
BOUNDS = ("tanh", "tanh_freq", "norm", "norm_abs", "none")


class JoFormer(rope.Rope):
    transport: str = "qkv"
    angle_source: str = "ffn_flow"
    angle_bound: str = "tanh"
    angle_base: str = "rope"  # rope | zero
    angle_init: str = "zero"  # zero | normal (0.02)
    angle_ln: bool = True
    angle_hidden_mult: float = 4.0
    accumulate: str = "prefix"  # prefix | none
    step_convention: str = "source"  # source: the sum excludes the query's own step; query: includes it
    journey_sign: int = 1  # -1: the inverse family T = P⁻¹
    v_angles: str = "same"  # same | fixed (values through t·ω only) | stop (no gradient through the values' angles)

    @property
    def CAUSAL_ONLY(self):
        return self.angle_source != "position" and self.accumulate == "prefix"

    @property
    def FLAT(self):
        return not self.CAUSAL_ONLY

    def setup(self):
        for field, valid in (
            ("angle_source", SOURCES),
            ("angle_bound", BOUNDS),
            ("angle_base", ("rope", "zero")),
            ("angle_init", ("zero", "normal")),
            ("accumulate", ("prefix", "none")),
            ("step_convention", ("source", "query")),
            ("journey_sign", (1, -1)),
            ("v_angles", ("same", "fixed", "stop")),
        ):
            value = getattr(self, field)
            if value not in valid:
                raise UserError(f"encoding.{field} = {value!r}: choose from {', '.join(map(str, valid))}")

    @nn.compact
    def begin(self, x, ctx):
        x, shared, _ = super().begin(x, ctx)
        shared_table = self.angle_source == "token_table" and self.angle_share_layers
        if self.angle_source == "ffn_flow" or shared_table:
            z = self.table(ctx)
            return (x, (shared, z), None) if shared_table else (x, (shared, None), z)
        return x, (shared, None), None

    @nn.compact
    def advance(self, shared, carry, hidden, ctx):
        if self.angle_source != "ffn_flow":
            return carry
        return self.project(hidden, "advance").astype(carry.dtype)

    @nn.compact
    def journey(self, shared, carry, ctx):
        shared_freq, shared_z = shared
        fixed = self.base_angles(shared_freq, ctx)
        if self.angle_base == "zero":
            fixed = jnp.zeros_like(fixed)
        if self.angle_source == "position":
            return self.travel(self.turned(fixed))
        z = self.raw(shared_z if carry is None else carry, ctx)
        turns = self.bound(z.astype(base.wide(z.dtype)), fixed.dtype)
        last = None
        if self.accumulate == "prefix":
            before, through, last = base.path_sum(turns, ctx, wrapped_add)
            turns = before if self.step_convention == "source" else through
        frame = self.turned(fixed + 2 * jnp.pi * turns)
        journey = self.travel(frame, prefix=last)
        if self.v_angles == "same" or journey.value_frame is None:
            return journey
        other = self.turned(fixed) if self.v_angles == "fixed" else jax.lax.stop_gradient(frame)
        return dataclasses.replace(journey, value_frame=other)

    def turned(self, angles):
        return self.plane_frame(self.journey_sign * angles, pairing=self.pairing)

    def raw(self, given, ctx):
        """z [B, L, (G or 1)·D/2] of this block."""
        if given is not None:
            return given
        if self.angle_source == "token_table":
            return self.table(ctx)
        x = ctx.x if self.angle_ln else ctx.residual
        if self.angle_source == "own_mlp":
            width = round(self.angle_hidden_mult * self.dims.width)
            x = nn.gelu(nn.Dense(width, dtype=self.dtype, name="angle_in")(x), approximate=False)
        return self.project(x, "angle_out")

    def bound(self, z, dtype):
        """δ in turns, [B, L, G or 1, D/2]."""
        if self.angle_bound in ("norm", "norm_abs"):
            z = nn.LayerNorm(dtype=z.dtype, name="angle_norm")(z)
            z = jnp.abs(z) if self.angle_bound == "norm_abs" else z
        z = z.reshape(*z.shape[:2], -1, self.dims.head_dim // 2)
        if self.angle_bound == "tanh":
            return (0.5 * jnp.tanh(z)).astype(dtype)
        if self.angle_bound == "tanh_freq":
            z = jnp.tanh(z) * self.initial_frequencies(None).sum(0)
        return (z / (2 * jnp.pi)).astype(dtype)

    @property
    def outputs(self):
        return self.dims.head_dim // 2 * (1 if self.angle_share_heads else self.dims.kv_heads)

    def weights_init(self):
        return nn.initializers.zeros if self.angle_init == "zero" else nn.initializers.normal(0.02)

    def project(self, x, name):
        return nn.Dense(self.outputs, dtype=self.dtype, kernel_init=self.weights_init(), name=name)(x)

    def table(self, ctx):
        if not self.dims.vocab:
            raise UserError(
                f"encoding.angle_source = {self.angle_source!r} reads tokens, which this model has not: "
                "choose position, own_mlp or linear"
            )
        embed = nn.Embed(self.dims.vocab, self.outputs, embedding_init=self.weights_init(), name="angle_table")
        return embed(ctx.tokens).astype(self.dtype)
