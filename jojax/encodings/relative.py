"""Additive biases of a pair of sites: b = b_h(p_i − p_j) a head h, p the coordinates of query i and key j.

`kind`, d = |p_i − p_j|:
- t5 (T5, arXiv 1910.10683): a number a head and bucket of distances. Of n buckets the first half hold one distance
  each, the others grow geometrically up to `max_distance`, the last holds all beyond. Causal models have `buckets` of
  them, encoders half as many for each direction
- kerple (arXiv 2205.09921): `kernel` 'log', −r₁ log(1 + r₂ d), or 'power', −r₁ d^r₂; r₁, r₂ > 0 by softplus, the
  power's r₂ < 2 by a sigmoid. They start at random, r₁ in (0, 2), r₂ in (0, 1)
- fire (arXiv 2310.04418): MLP_h(ψ(d)/ψ(max(L, p_i))), ψ(x) = log(|c| x + 1), one hidden layer of `hidden` units with
  ReLU; c starts at 0.1, L = |learned factor| · `threshold`. From position L on a bias depends on where the query
  stands. The MLP's last bias is left out: it shifts all logits of a row alike
- table (Swin, arXiv 2103.14030): a number a head and displacement on the training grid, Π(2n − 1) of them; `resize`
  fits it to another grid
- alibi (GRAPE, appendix G): −m_h (|Δu| + |Δv| + …), or the Euclidean distance (`norm` 'l2'), ALiBi's slopes m_h

All blocks have their own parameters, or share one set (`share_layers`, as T5 and FIRE-S do). A class token is at no
place: its pairs have bias 0. Deviations: T5 leaves out the scale 1/√d of logits; FIRE and KERPLE are published for
causal models, an encoder takes d as it stands.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jojax.encodings import absolute
from jojax.encodings.base import Edge, Encoding, Journey
from jojax.encodings.grape_a import alibi_slopes
from jojax.errors import UserError

OF_HEADS = ("table", "r1", "r2", "mlp_out", "slopes")  # weights whose last axis is heads; others are for all


@dataclasses.dataclass(frozen=True)
class PairStep:
    """One key block: `function(p_i − p_j [B, Lq, Lk, A], p_i [B, Lq, 1, A], weights, *options)` -> [B, H, Lq, Lk].

    The last entry of a query and a key, [B, L, 1, A + 1], says whether the site has a place."""

    function: Callable
    options: tuple = ()

    def __call__(self, state, query, key, visible, weights):
        at, to = query, key[:, None, :, 0]
        bias = self.function(at[..., :-1] - to[..., :-1], at[..., :-1], weights, *self.options)
        return bias * (at[..., -1] * to[..., -1])[:, None], state


def t5(far, at, weights, bounds, two_sided):
    """bounds: where the buckets of a direction begin, but for the first."""
    far = far[..., 0]
    bucket = jnp.searchsorted(jnp.asarray(bounds), jnp.abs(far) if two_sided else far, "right", method="compare_all")
    return entries(weights["table"], bucket + (len(bounds) + 1) * (far < 0) if two_sided else bucket)


def bucket_bounds(buckets, furthest):
    """Whole numbers, so that no rounding of logarithms decides."""
    exact = buckets // 2
    grown = exact * (furthest / exact) ** (np.arange(1, buckets - exact) / (buckets - exact))
    return *range(1, exact + 1), *(math.ceil(x - 1e-9) for x in grown)


def entries(table, index):
    """table [n, H], index [B, Lq, Lk] -> [B, H, Lq, Lk]"""
    return jnp.moveaxis(jnp.take(table, index, axis=0, mode="clip"), -1, 1)


def kerple(far, at, weights, kernel):
    d = jnp.abs(far[..., 0])[:, None]
    r1, raw = nn.softplus(weights["r1"])[:, None, None], weights["r2"][:, None, None]
    if kernel == "log":
        return -r1 * jnp.log1p(nn.softplus(raw) * d)
    away = jnp.where(d > 0, d, 1)  # 0^r has no gradient
    return -r1 * jnp.where(d > 0, away ** (2 * nn.sigmoid(raw)), 0)


def fire(far, at, weights, threshold):
    def psi(x):
        return jnp.log1p(jnp.abs(weights["c"]) * x)

    longest = jnp.maximum(jnp.abs(weights["threshold"]) * threshold, at[..., 0])
    x = psi(jnp.abs(far[..., 0])) / (psi(longest) + 1e-6)
    hidden = nn.relu(x[..., None] * weights["mlp_in"][:, 0] + weights["mlp_bias"][:, 0])
    return jnp.einsum("bqkf,fh->bhqk", hidden, weights["mlp_out"], precision=jax.lax.Precision.HIGHEST)


def table(far, at, weights, sizes):
    index = 0
    for axis, n in enumerate(sizes):
        index = index * (2 * n - 1) + jnp.round(far[..., axis]).astype(jnp.int32) + n - 1
    return entries(weights["table"], index)


def alibi(far, at, weights, norm):
    d = jnp.abs(far).sum(-1) if norm == "l1" else jnp.sqrt((far * far).sum(-1))
    return -weights["slopes"][:, None, None] * d[:, None]


class Relative(Encoding):
    kind: str = "t5"
    share_layers: bool = False
    buckets: int = 32
    max_distance: int = 128
    kernel: str = "log"
    hidden: int = 32
    threshold: float = 512.0
    norm: str = "l1"

    CHOICES: ClassVar[dict[str, tuple]] = {
        "kind": ("t5", "kerple", "fire", "table", "alibi"),
        "kernel": ("log", "power"),
        "norm": ("l1", "l2"),
    }

    @property
    def RELATIVE(self):
        return self.kind != "fire"

    @property
    def BOUNDED_LENGTH(self):
        return self.kind == "table"

    def check(self):
        super().check()
        if self.kind in ("t5", "kerple", "fire") and self.dims.axes != 1:
            raise UserError(f"encoding.kind = {self.kind!r} has one axis: for images use table or alibi")
        if self.kind == "table" and not self.dims.grid:
            raise UserError("encoding.kind = 'table' is for images: for text use t5, kerple or fire")
        n = self.buckets if self.dims.causal else self.buckets // 2
        if self.kind == "t5" and (n < 2 or self.buckets % 2 or self.max_distance <= n // 2):
            raise UserError(
                f"encoding.buckets = {self.buckets} with max_distance = {self.max_distance}: needs an even number, 2 "
                f"or more a direction, and a distance beyond the {n // 2} that have a bucket each"
            )
        if self.hidden < 1 or self.threshold <= 0:
            raise UserError("encoding.hidden needs 1 unit or more, encoding.threshold a length above 0")

    def idle(self):
        used = {
            "t5": ("buckets", "max_distance"),
            "kerple": ("kernel",),
            "fire": ("hidden", "threshold"),
            "alibi": ("norm",),
        }
        idle = {o: f"kind = {kind!r}" for kind, options in used.items() if kind != self.kind for o in options}
        return idle | ({"share_layers": "a kind with parameters"} if self.kind == "alibi" else {})

    @nn.compact
    def begin(self, x, ctx):
        return x, self.weights() if self.share_layers else None, None

    @nn.compact
    def journey(self, shared, carry, ctx):
        given, sites = ctx.position.shape[1] - (ctx.placed is not None), math.prod(self.dims.grid)
        if self.kind == "table" and given > sites:
            raise UserError(f"relative positions end at {sites}, the input has {given}: resize the table")
        weights = {
            name: (t if name in OF_HEADS else t[..., None]).astype(ctx.position.dtype)
            for name, t in (shared or self.weights()).items()
        }
        at = ctx.position[:1] if self.dims.grid else ctx.position  # a batch of images has one grid
        placed = jnp.ones_like(at[..., :1]) if ctx.placed is None else ctx.placed[: len(at), :, None]
        at = jnp.concatenate([at, placed.astype(at.dtype)], -1)[:, :, None]
        return Journey(edge=Edge(at, at, self.step(), weights))

    def step(self):
        if self.kind == "t5":
            n = self.buckets if self.dims.causal else self.buckets // 2
            return PairStep(t5, (bucket_bounds(n, self.max_distance), not self.dims.causal))
        return {
            "kerple": PairStep(kerple, (self.kernel,)),
            "fire": PairStep(fire, (self.threshold,)),
            "table": PairStep(table, (self.dims.grid,)),
            "alibi": PairStep(alibi, (self.norm,)),
        }[self.kind]

    def weights(self):
        H, F = self.dims.heads, self.hidden
        if self.kind == "t5":
            return {"table": self.param("table", nn.initializers.normal(self.dims.width**-0.5), (self.buckets, H))}
        if self.kind == "table":
            sites = math.prod(2 * n - 1 for n in self.dims.grid)
            return {"table": self.param("table", nn.initializers.truncated_normal(0.02), (sites, H))}
        if self.kind == "kerple":
            r2 = unsoftplus if self.kernel == "log" else lambda r: jax.scipy.special.logit(r / 2)
            return {"r1": self.param("r1", drawn(2, unsoftplus), (H,)), "r2": self.param("r2", drawn(1, r2), (H,))}
        if self.kind == "fire":
            return {
                "c": self.param("c", nn.initializers.constant(0.1), ()),
                "threshold": self.param("threshold", nn.initializers.ones, ()),
                "mlp_in": self.param("mlp_in", symmetric(1.0), (F,)),
                "mlp_bias": self.param("mlp_bias", symmetric(1.0), (F,)),
                "mlp_out": self.param("mlp_out", symmetric(F**-0.5), (F, H)),
            }
        return {"slopes": jnp.asarray(alibi_slopes(H))}


def unsoftplus(r):
    return jnp.log(jnp.expm1(r))


def drawn(high, inverse):
    """Raw values of which `inverse` undoes the link, uniform in (0, high) behind it."""
    return lambda key, shape: inverse(jax.random.uniform(key, shape, minval=0.01, maxval=high))


def symmetric(size):
    return lambda key, shape: jax.random.uniform(key, shape, minval=-size, maxval=size)


def resize(params, old_grid, new_grid):
    """{'table': [(depth,) Π(2 old − 1), H]} -> the same for another grid, bicubic as `absolute.resize`."""
    if "table" not in params:
        return params
    old, new = (tuple(2 * n - 1 for n in grid) for grid in (old_grid, new_grid))
    sites = jnp.moveaxis(params["table"], -2, 0)
    fitted = absolute.resize({"table": sites.reshape(len(sites), -1)}, old, new)["table"]
    return {**params, "table": jnp.moveaxis(fitted.reshape(-1, *sites.shape[1:]), 0, -2)}
