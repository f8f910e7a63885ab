"""JoFormer: rotary frames whose step angles depend on content and add up along the path (journey operators).

    a_t = ω + δ_t,    Θ_t = Σ_{u<t} a_u,    A_t = R(Θ_t),    values travel too (`transport='qkv'`)

The base part t·ω is used in closed form and only the content part δ is summed, in turns, wrapped exactly: so a model
whose δ is zero (its start, `angle_init='zero'`) equals jo_fixed bit for bit, and a long float32 sum does not drift.

Angle sources (`angle_source`), z_t being the raw output, always float32 or wider:
- position: no content, δ = 0 (jo_fixed); frequencies learned with `learned=True`
- token_table: z = E[token], one table a block or one for all (`angle_share_layers`)
- ffn_flow: z = E[token] in the first block, then W g with g the activation of the previous block's MLP. The model
  behind the published 1.02 ratio. Deviation: the last block's head, which nobody reads, is not stored
- own_mlp: z = W2 GELU(W1 x), width `angle_hidden_mult`·C (the formula in the review of the paper)
- linear: z = W x
x is the block's normalised input, or its raw residual with `angle_ln=False` (the Wikipedia experiments).

δ = π tanh z ('tanh'), ω tanh z with the initial ω ('tanh_freq'), LayerNorm(z) ('norm'), |LayerNorm(z)| ('norm_abs')
or z ('none'). `accumulate='none'` adds δ_t of site t alone to its base angle: with `angle_base='zero'` it is the
author's arm without a path, θ_t = a_t up to a constant (jo_projected_pointwise), which does not extrapolate in his
runs; with the base it is RoPE plus content. The released code sums the suffix of −a instead, the exclusive prefix of
a up to a constant: to use its weights, negate base and content angles. The prefix is causal bit for bit and streams.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.elements import wrapped_add
from jojax.encodings.base import path_sum, wide
from jojax.encodings.frames import PlaneFrame
from jojax.encodings.rope import Rope
from jojax.errors import UserError


class JoFormer(Rope):
    transport: str = "qkv"
    angle_source: str = "ffn_flow"
    angle_bound: str = "tanh"
    angle_base: str = "rope"
    angle_init: str = "zero"  # normal: N(0, 0.02²)
    angle_ln: bool = True
    angle_hidden_mult: float = 4.0
    accumulate: str = "prefix"
    step_convention: str = "source"  # source: the sum leaves the query's own step out; query: it has it
    journey_sign: int = 1  # -1: the inverse family T = P⁻¹
    v_angles: str = "same"  # fixed: values through t·ω only; stop: no gradient through the values' angles

    CHOICES: ClassVar[dict[str, tuple]] = Rope.CHOICES | {
        "angle_source": ("position", "token_table", "ffn_flow", "own_mlp", "linear"),
        "angle_bound": ("tanh", "tanh_freq", "norm", "norm_abs", "none"),
        "angle_base": ("rope", "zero"),
        "angle_init": ("zero", "normal"),
        "accumulate": ("prefix", "none"),
        "step_convention": ("source", "query"),
        "journey_sign": (1, -1),
        "v_angles": ("same", "fixed", "stop"),
    }

    @property
    def content(self) -> bool:
        return self.angle_source != "position"

    @property
    def CAUSAL_ONLY(self):
        return self.content and self.accumulate == "prefix"

    @property
    def FLAT(self):
        return not self.CAUSAL_ONLY

    @property
    def has_shareable(self):
        return self.learned or self.angle_source == "token_table"

    def check(self):
        super().check()
        tokens = self.angle_source in ("token_table", "ffn_flow")
        for wrong, why in (
            (
                tokens and not self.dims.vocab,
                "reads tokens, which this model has not: choose position, own_mlp or linear",
            ),
            (self.content and self.transport == "none", "moves nothing with transport = 'none'"),
            (not self.content and self.angle_base == "zero", "with angle_base = 'zero' has no angles at all"),
        ):
            if wrong:
                raise UserError(f"encoding.angle_source = {self.angle_source!r} {why}")
        if self.content and self.angle_init == "zero" and "norm" in self.angle_bound:
            raise UserError(
                f"encoding.angle_bound = {self.angle_bound!r} with angle_init = 'zero' divides by nothing: "
                "set angle_init = 'normal'"
            )

    def idle(self):
        idle = super().idle()
        if not self.content:
            idle |= dict.fromkeys(("angle_bound", "angle_init", "accumulate"), "content angles (angle_source)")
        if self.angle_source not in ("own_mlp", "linear"):
            idle["angle_ln"] = "angle_source = 'own_mlp' or 'linear'"
        if self.angle_source != "own_mlp":
            idle["angle_hidden_mult"] = "angle_source = 'own_mlp'"
        if not self.CAUSAL_ONLY:
            idle["step_convention"] = "accumulated content angles"
        if self.transport != "qkv":
            idle["v_angles"] = "transport = 'qkv'"
        if not self.turns_by_base:
            idle |= dict.fromkeys(("learned", "fraction", "scale_method"), "angle_base = 'rope'")
        return idle

    @property
    def turns_by_base(self) -> bool:
        return self.angle_base == "rope" or self.v_angles == "fixed"

    @property
    def reads_initial(self):
        return (self.turns_by_base and super().reads_initial) or self.angle_bound == "tanh_freq"

    @nn.compact
    def begin(self, x, ctx):
        x, of_base, _ = super().begin(x, ctx)
        shared_z = carried_z = None
        if self.angle_source == "ffn_flow":
            carried_z = self.table(ctx)
        elif self.angle_source == "token_table" and self.angle_share_layers:
            shared_z = self.table(ctx)
        return x, (of_base, shared_z), carried_z

    @nn.compact
    def advance(self, shared, carry, hidden, ctx):
        return self.project(hidden, "advance") if self.angle_source == "ffn_flow" else carry

    @nn.compact
    def journey(self, shared, carry, ctx):
        of_base, shared_z = shared
        linear = self.base_angles(of_base, ctx)
        angles, last = jnp.zeros_like(linear) if self.angle_base == "zero" else linear, None
        if self.content:
            turns = self.bounded(self.raw(shared_z if carry is None else carry, ctx)).astype(linear.dtype)
            if self.accumulate == "prefix":
                before, through, last = path_sum(turns, ctx, wrapped_add)
                turns = before if self.step_convention == "source" else through
            angles = angles + 2 * jnp.pi * turns
        of_values = {"same": angles, "fixed": linear, "stop": jax.lax.stop_gradient(angles)}[self.v_angles]
        return self.travel(self.frame(angles), self.frame(of_values), prefix=last)

    def frame(self, angles):
        return PlaneFrame(self.journey_sign * angles, pairing=self.pairing)

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

    def bounded(self, z):
        """δ in turns, [B, L, G or 1, D/2]."""
        if "norm" in self.angle_bound:
            z = nn.LayerNorm(dtype=z.dtype, name="angle_norm")(z)
            z = jnp.abs(z) if self.angle_bound == "norm_abs" else z
        z = z.reshape(*z.shape[:2], -1, self.dims.head_dim // 2)
        if self.angle_bound == "tanh":
            return 0.5 * jnp.tanh(z)
        if self.angle_bound == "tanh_freq":
            z = jnp.tanh(z) * jnp.linalg.norm(self.initial(z.shape[2]), axis=0)
        return z / (2 * jnp.pi)

    @property
    def outputs(self):
        return self.dims.head_dim // 2 * (1 if self.angle_share_heads else self.dims.kv_heads)

    def weights_init(self):
        return nn.initializers.zeros if self.angle_init == "zero" else nn.initializers.normal(0.02)

    def project(self, x, name):
        dense = nn.Dense(self.outputs, dtype=wide(self.dtype), kernel_init=self.weights_init(), name=name)
        return dense(x)  # in float32 even under bfloat16: the sum over a path multiplies the rounding of a step

    def table(self, ctx):
        embed = nn.Embed(self.dims.vocab, self.outputs, embedding_init=self.weights_init(), name="angle_table")
        return embed(ctx.tokens).astype(wide(self.dtype))
