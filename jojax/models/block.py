"""The pre-norm transformer block: norm → attention through the encoding's journey, or a recurrence → norm → MLP.

Names: B rows, L sites, C width, H query heads, G key heads, R = H/G, D head width, F MLP width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jojax.algebra import elements
from jojax.encodings import hooks
from jojax.encodings.base import Context, Dims, shards
from jojax.errors import UserError
from jojax.models import attention, recurrence, sharded
from jojax.models.attention import Sites


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a block is made of; `dims` are the sizes that the encoding sees too."""

    dims: Dims
    mixer: str = "attention"  # attention | recurrence
    mlp_ratio: float = 4.0
    mlp: str = "gelu"  # gelu | swiglu
    norm: str = "layernorm"  # layernorm | rmsnorm
    qk_norm: str = "none"  # none | before | after transport
    window: int = 0  # > 0: a causal site sees the last so many, itself among them; others those less than so far away
    kv_shift: bool = False  # keys and values mixed with those of the site before, by a gate (GRAPE section 6.1)
    bias: bool = True
    eps: float = 1e-5
    dropout: float = 0.0
    layer_scale: float = 0.0  # > 0: every branch times a learned gain a channel, which starts there (arXiv 2103.17239)
    init_std: float = 0.02
    attention: str = "auto"
    dtype: Any = "float32"

    def __post_init__(self):
        for key, valid in (
            ("mixer", ("attention", "recurrence")),
            ("mlp", ("gelu", "swiglu")),
            ("norm", ("layernorm", "rmsnorm")),
            ("qk_norm", ("none", "before", "after")),
        ):
            if getattr(self, key) not in valid:
                raise UserError(f"model.{key} = {getattr(self, key)!r}: choose from {', '.join(valid)}")
        if self.kv_shift and not self.dims.causal:
            raise UserError("model.kv_shift mixes a site with the one before it: it is for causal models")
        if self.mixer == "recurrence":
            recurrence.check(self)

    def make_norm(self, name):
        if self.norm == "rmsnorm":
            return nn.RMSNorm(epsilon=self.eps, dtype=self.dtype, name=name)
        return nn.LayerNorm(epsilon=self.eps, dtype=self.dtype, use_bias=self.bias, name=name)

    def dense(self, features, name, axis=-1, **options):
        options: dict[str, Any] = dict(use_bias=self.bias, dtype=self.dtype) | options
        init = nn.initializers.normal(self.init_std)
        return nn.DenseGeneral(features, axis=axis, kernel_init=init, name=name, **options)


class Block(nn.Module):
    spec: Spec
    encoding: Callable
    advances: bool = True  # False in a model of one block: nobody reads what it would hand on
    capacity: int = 0  # > 0: keys and values go to a cache of so many sites

    @nn.compact
    def __call__(self, state, scanned, ctx: Context, shared, sites: tuple[Sites, Sites], at):
        """state (x [B, L, C], carry); scanned (past, drop-path rate), each may be None; sites of the queries and of
        the keys; at: arrival index of the first site. -> state, the new past or None."""
        x, carry = state
        past, drop_rate = scanned
        encoding = self.encoding(name="encoding")
        if self.spec.mixer == "recurrence":
            mixed, new_past = self.recur(encoding, x, ctx, past)
        else:
            mixed, new_past = self.attend(encoding, x, carry, ctx, shared, sites, at, past)
        x = sharded.lay(x + self.drop(self.scaled(mixed, "mixer"), drop_rate, ctx.train))
        out, hidden = self.feed_forward(self.spec.make_norm("norm_mlp")(x), ctx.train)
        x = x + self.drop(self.scaled(out, "mlp"), drop_rate, ctx.train)
        if self.advances:
            carry = hooks.advance(encoding, shared, carry, hidden, ctx)
        return sharded.lay((x, carry)), new_past

    def recur(self, encoding, x, ctx, past):
        recurrence.check_encoding(encoding)
        h = self.spec.make_norm("norm_mixer")(x)
        out, last = recurrence.Recurrence(self.spec, name="recurrence")(h, ctx.restart, past)
        return nn.Dropout(self.spec.dropout, deterministic=not ctx.train)(out), last if self.capacity else None

    def attend(self, encoding, x, carry, ctx, shared, sites, at, past):
        spec, dims = self.spec, self.spec.dims
        h = spec.make_norm("norm_attention")(x)
        q = spec.dense((dims.heads, dims.head_dim), "query")(h)
        k = spec.dense((dims.kv_heads, dims.head_dim), "key")(h)
        v = spec.dense((dims.kv_heads, dims.head_dim), "value")(h)
        unshifted = (k[:, -1:], v[:, -1:]) if spec.kv_shift else None
        if spec.kv_shift:
            before = (None, None) if past is None else past["shift"]
            k, v = (
                self.shift(h, t, b, ctx.restart, n) for t, b, n in zip((k, v), before, ("key", "value"), strict=True)
            )
        norm = None if spec.qk_norm == "none" else self.qk_norm()
        normed = (q, k) if norm is None else norm(q, k)
        if spec.qk_norm == "before":
            (q, k), norm = normed, None
        prefix = None if past is None else past["encoding"]
        ctx = ctx.replace(residual=x, x=h, q=normed[0], k=normed[1], prefix=prefix)
        journey = hooks.journey(encoding, shared, carry, ctx)
        q, k, v, home = attention.transport(journey, q, k, v, ctx.placed, norm)
        keys = {"key": k, "value": v, "edge": None if journey.edge is None else journey.edge.key}
        new = None
        if self.capacity:
            keys = self.store(keys, past, at)
            new = {"cache": keys, "encoding": journey.prefix, "shift": unshifted}
        o = attention.attend(
            q,
            keys["key"],
            keys["value"],
            *sites,
            causal=dims.causal,
            scale=attention.scale_of(journey, dims.head_dim),
            window=spec.window,
            edge=journey.edge,
            edge_key=keys["edge"],
            implementation=spec.attention,
        )
        out = spec.dense(x.shape[-1], "out", axis=(-2, -1))(home(o))
        return nn.Dropout(spec.dropout, deterministic=not ctx.train)(out), new

    def shift(self, h, t, before, restart, name):
        """a_t y_{t−1} + (1 − a_t) y_t, a = σ(h W) a key head; nothing comes before a document's first site.

        t [B, L, G, D]; before [B, 1, G, D], the last site of the chunk before, or None."""
        gate = nn.Dense(t.shape[2], use_bias=False, dtype=self.spec.dtype, name=f"shift_{name}")
        gate = nn.sigmoid(gate(h))[..., None]
        before = elements.shift(t, 0 if before is None else before[:, 0], shards=shards())
        before = jnp.where(restart[..., None, None], 0, before)
        return gate * before + (1 - gate) * t

    def qk_norm(self):
        """q, k -> q, k: RMS norm over the head width, one gain for all heads."""
        norms = [nn.RMSNorm(epsilon=self.spec.eps, dtype=self.spec.dtype, name=n) for n in ("norm_q", "norm_k")]
        return lambda *qk: tuple(norm(t) for norm, t in zip(norms, qk, strict=True))

    def store(self, keys, past, at):
        def put(buffer, new):
            return lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), at, axis=1)

        if past is None:
            empty = jax.tree.map(lambda t: jnp.zeros((t.shape[0], self.capacity, *t.shape[2:]), t.dtype), keys)
        else:
            empty = past["cache"]
        return jax.tree.map(put, empty, keys)

    def feed_forward(self, x, train):
        """-> output [B, L, C], activation [B, L, F] (what `advance` reads)."""
        spec = self.spec
        F = round(spec.mlp_ratio * spec.dims.width)
        up = spec.dense(F, "mlp_in")(x)
        if spec.mlp == "swiglu":
            hidden = nn.silu(spec.dense(F, "mlp_gate")(x)) * up
        else:
            hidden = nn.gelu(up, approximate=False)
        out = spec.dense(x.shape[-1], "mlp_out")(hidden)
        return nn.Dropout(spec.dropout, deterministic=not train)(out), hidden

    def scaled(self, branch, name):
        if not self.spec.layer_scale:
            return branch
        start = nn.initializers.constant(self.spec.layer_scale)
        return branch * self.param(f"layer_scale_{name}", start, branch.shape[-1:]).astype(branch.dtype)

    def drop(self, branch, rate, train):
        """Stochastic depth: leave the whole branch out for an example, with probability `rate` (an array)."""
        if not train or rate is None:
            return branch
        keep = 1 - rate
        shape = (branch.shape[0],) + (1,) * (branch.ndim - 1)
        mask = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)
        return branch * (mask / keep).astype(branch.dtype)
