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
- token_mlp: δ of z = E[token] plus s times that of own_mlp's z, with s = 0 at the start (the notes' pmlp)
- templates: z = E[token]_κ, the one of `angle_templates` that fits W x best: κ = argmax_κ E[token]_κ·W x, gradients
  those of its softmax (cbd). Our reading: the notes do not say what the dot product is with
x is the block's normalised input, or its raw residual with `angle_ln=False` (the Wikipedia experiments).

δ = π tanh z ('tanh'), ω tanh z with the initial ω ('tanh_freq'), LayerNorm(z) ('norm'), |LayerNorm(z)| ('norm_abs'),
ω (1 + tanh LayerNorm(z)) ('norm_freq') or z ('none'). `angle_noise` multiplies it by a draw from Uniform(−1, 1) as of
`accumulated`: own_mlp with norm_abs is then the notes' lf, token_table with norm_freq their rpemb4.

`accumulate='none'` adds δ_t of site t alone to its base angle: with `angle_base='zero'` it is the
author's arm without a path, θ_t = a_t up to a constant (jo_projected_pointwise), which does not extrapolate in his
runs; with the base it is RoPE plus content. The released code sums the suffix of −a instead, the exclusive prefix of
a up to a constant: to use its weights, negate base and content angles. The prefix is causal bit for bit and streams.

On a grid, which the paper leaves open, 'none' is a potential: journeys are its differences, whatever the way (flat).
'raster' sums δ over all sites before one in reading order, told by the coordinates and not by the order of arrival:
so every site has its frame and an encoder may use it, but a journey depends on what stands between (curved). Sums
along a row and then a column depend on that choice of way and are left out.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra import elements
from jojax.encodings.accumulated import uniform
from jojax.encodings.base import path_sum, wide
from jojax.encodings.build import options
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
    angle_templates: int = 4
    angle_noise: bool = False
    accumulate: str = "prefix"
    step_convention: str = "source"  # source: the sum leaves the query's own step out; query: it has it
    journey_sign: int = 1  # -1: the inverse family T = P⁻¹
    v_angles: str = "same"  # fixed: values through t·ω only; stop: no gradient through the values' angles

    CHOICES: ClassVar[dict[str, tuple]] = Rope.CHOICES | {
        "angle_source": ("position", "token_table", "ffn_flow", "own_mlp", "linear", "token_mlp", "templates"),
        "angle_bound": ("tanh", "tanh_freq", "norm", "norm_abs", "norm_freq", "none"),
        "angle_base": ("rope", "zero"),
        "angle_init": ("zero", "normal"),
        "accumulate": ("prefix", "raster", "none"),
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
        return not self.content or self.accumulate == "none"

    @property
    def RELATIVE(self):
        return not self.angle_noise  # draws belong to positions

    @property
    def has_shareable(self):
        return self.learned or self.angle_source == "token_table"

    @property
    def STARTS_AS(self):
        """Plain RoPE, where content angles start at zero beside its own."""
        if (self.angle_base, self.angle_init, self.journey_sign) != ("rope", "zero", 1):
            return None
        skipped = () if self.learned else ("angle_share_layers",)
        return {"name": "rope"} | {o: getattr(self, o) for o in options(Rope) if o not in skipped}

    def check(self):
        super().check()
        tokens = self.angle_source in ("token_table", "ffn_flow", "token_mlp", "templates")
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
        if self.content and self.accumulate == "raster" and self.dims.axes == 1:
            raise UserError("encoding.accumulate = 'raster' reads a grid row by row: for text it is 'prefix'")
        if self.angle_templates < 2:
            raise UserError(f"encoding.angle_templates = {self.angle_templates}: needs 2 or more to choose from")
        if self.content and self.angle_init == "zero" and "norm" in self.angle_bound:
            raise UserError(
                f"encoding.angle_bound = {self.angle_bound!r} with angle_init = 'zero' divides by nothing: "
                "set angle_init = 'normal'"
            )

    def idle(self):
        idle = super().idle()
        if not self.content:
            idle |= dict.fromkeys(("angle_bound", "angle_init", "accumulate"), "content angles (angle_source)")
        for option, sources in (
            ("angle_ln", ("own_mlp", "linear", "token_mlp", "templates")),
            ("angle_hidden_mult", ("own_mlp", "token_mlp")),
            ("angle_templates", ("templates",)),
        ):
            if self.angle_source not in sources:
                idle[option] = f"angle_source = {' or '.join(map(repr, sources))}"
        if self.FLAT:
            idle["step_convention"] = "accumulated content angles"
        if not self.CAUSAL_ONLY:
            idle["angle_noise"] = "content angles with accumulate = 'prefix'"
        if self.transport != "qkv":
            idle["v_angles"] = "transport = 'qkv'"
        if not self.turns_by_base:
            unread = "learned", "fraction", "scale_method", "coord", "cls_pos", "perturb_sigma"
            idle |= dict.fromkeys(unread, "angle_base = 'rope'")
        return idle

    @property
    def turns_by_base(self) -> bool:
        return self.angle_base == "rope" or self.v_angles == "fixed"

    @property
    def reads_initial(self):
        return (self.turns_by_base and super().reads_initial) or "freq" in self.angle_bound

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
            turns = self.steps(shared_z if carry is None else carry, ctx).astype(linear.dtype)
            turns, last = self.along(turns, ctx, elements.wrapped_add, 0.0)
            angles = angles + 2 * jnp.pi * turns
        of_values = {"same": None, "fixed": linear, "stop": jax.lax.stop_gradient(angles)}[self.v_angles]
        return self.travel(self.frame(angles), None if of_values is None else self.frame(of_values), prefix=last)

    def frame(self, angles):
        return PlaneFrame(self.journey_sign * angles, pairing=self.pairing)

    def along(self, step, ctx, mul, one):
        """What `accumulate` makes of step [B, L, ...] at each site, and what it hands on; mul(earlier, later)."""
        if self.accumulate == "none":
            return step, None
        if self.accumulate == "prefix":
            before, through, last = path_sum(step, ctx, mul, one)
            return before if self.step_convention == "source" else through, last

        def put(t, at):
            return jnp.take_along_axis(t, at.reshape(*at.shape, *[1] * (t.ndim - 2)), 1)

        if ctx.placed is not None:
            step = jnp.where(ctx.placed.reshape(*ctx.placed.shape, *[1] * (step.ndim - 2)), step, one)
        order = jnp.lexsort(jnp.moveaxis(ctx.position, -1, 0)[::-1])  # [B, L], rows first
        before, through, _ = elements.prefix(put(step, order), mul, one)
        return put(before if self.step_convention == "source" else through, jnp.argsort(order)), None

    def steps(self, given, ctx):
        """δ in turns, [B, L, G or 1, D/2]."""
        turns = self.bounded(self.raw(given, ctx), "angle_norm")
        if self.angle_source == "token_mlp":
            gate = self.param("angle_gate", nn.initializers.zeros, ())
            turns += gate * self.bounded(self.own_mlp(ctx, nn.initializers.normal(0.02)), "angle_norm_mlp")
        return turns * uniform(self, ctx, turns.shape[2:]) if self.angle_noise else turns

    def raw(self, given, ctx):
        """z [B, L, (G or 1)·D/2] of this block."""
        if given is not None:
            return given
        if self.angle_source in ("token_table", "token_mlp"):
            return self.table(ctx)
        if self.angle_source == "own_mlp":
            return self.own_mlp(ctx, self.weights_init())
        z = self.project(self.read(ctx), "angle_out")
        if self.angle_source == "linear":
            return z
        templates = self.table(ctx, self.angle_templates)
        fit = (templates * z[:, :, None]).sum(-1)  # [B, L, K]
        soft = nn.softmax(fit)
        chosen = nn.one_hot(fit.argmax(-1), self.angle_templates, dtype=fit.dtype) + soft - jax.lax.stop_gradient(soft)
        return (chosen[..., None] * templates).sum(2)

    def bounded(self, z, name):
        """δ in turns, [B, L, G or 1, D/2]."""
        if "norm" in self.angle_bound:
            z = nn.LayerNorm(dtype=z.dtype, name=name)(z)
            z = jnp.abs(z) if self.angle_bound == "norm_abs" else z
        z = z.reshape(*z.shape[:2], -1, self.angles_a_head)
        if self.angle_bound == "tanh":
            return 0.5 * jnp.tanh(z)
        if "freq" in self.angle_bound:
            z = jnp.tanh(z) + (self.angle_bound == "norm_freq")
            z = z * jnp.linalg.norm(self.initial(z.shape[2]), axis=0)
        return z / (2 * jnp.pi)

    @property
    def angles_a_head(self):
        return self.dims.head_dim // 2

    @property
    def outputs(self):
        return self.angles_a_head * (1 if self.angle_share_heads else self.dims.kv_heads)

    def weights_init(self):
        return nn.initializers.zeros if self.angle_init == "zero" else nn.initializers.normal(0.02)

    def read(self, ctx):
        return ctx.x if self.angle_ln else ctx.residual

    def own_mlp(self, ctx, init):
        width = round(self.angle_hidden_mult * self.dims.width)
        hidden = nn.Dense(width, dtype=self.dtype, name="angle_in")(self.read(ctx))
        return self.project(nn.gelu(hidden, approximate=False), "angle_out", init)

    def project(self, x, name, init=None):
        dense = nn.Dense(self.outputs, dtype=wide(self.dtype), kernel_init=init or self.weights_init(), name=name)
        return dense(x)  # in float32 even under bfloat16: the sum over a path multiplies the rounding of a step

    def table(self, ctx, *several):
        shape = (*several, self.outputs)
        embed = nn.Embed(self.dims.vocab, math.prod(shape), embedding_init=self.weights_init(), name="angle_table")
        return embed(ctx.tokens).astype(wide(self.dtype)).reshape(*ctx.tokens.shape, *shape)
