"""Attention in O(L) memory: query blocks one after the other; in each, key blocks from last to first with a running
softmax (arXiv 2112.05682, 2205.14135), so that the state of a path sum is one number a row.

Backwards only the outputs and the logarithms of the softmax's sums are kept: weights are recomputed block by block,
key blocks from first to last, the way that the cotangent of the path sum's state runs (GRAPE-AP:
dψ_tℓ = Σ_{j<ℓ} dS_tj). Blocks that causality or the window hides are skipped, in both directions.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jojax.encodings.base import wide
from jojax.models.scores import EMPTY, Sites, gathered, logits, reach, visible, weighted


class Plan(NamedTuple):
    """What is static."""

    causal: bool
    window: int
    scale: float
    step: Callable | None


def chunked(q, k, v, query, key, *, causal, scale, window=0, edge=None, edge_key=None, block=512):
    """As `attention.xla`, which it equals."""
    Lq, Lk = q.shape[1], k.shape[1]
    queries = dict(q=q, edge=None if edge is None else edge.query, index=query.index, segment=query.segment)
    keys = dict(
        k=k, v=v, edge=None if edge is None else edge_key, index=key.index, segment=key.segment, real=jnp.ones(Lk, bool)
    )
    plan = Plan(causal, window, scale, None if edge is None else edge.step)
    weights = None if edge is None else edge.weights
    out = attention(plan, split(queries, min(block, Lq)), split(keys, min(block, Lk)), weights)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [n, B, G, R, size, E]
    return out.reshape(q.shape[0], -1, *out.shape[3:])[:, :Lq]


def split(tree, size):
    """Cut the site axis into blocks (a leading axis), padded with zeros: [B, L, ...] -> [n, B, size, ...]."""

    def cut(name, t):
        if t is None:
            return None
        axis = 0 if name in ("index", "real") else 1
        blocks = -(-t.shape[axis] // size)
        pad = [(0, 0)] * t.ndim
        pad[axis] = (0, blocks * size - t.shape[axis])
        fill = EMPTY if name == "segment" else 0
        t = jnp.pad(t, pad, constant_values=fill)
        t = t.reshape(*t.shape[:axis], blocks, size, *t.shape[axis + 1 :])
        return jnp.moveaxis(t, axis, 0)

    return {name: cut(name, t) for name, t in tree.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(plan, queries, keys, weights):
    """-> [n, B, G, R, size, E]"""
    return forward(plan, queries, keys, weights)[0]


def forward(plan, queries, keys, weights):
    # in a scan over layers jax would take out what does not depend on the layer: the masks of all blocks, O(L²)
    queries, keys, weights = lax.optimization_barrier((queries, keys, weights))
    out, log_total = lax.map(lambda own: softmax(plan, own, keys, weights), queries)
    return out, (queries, keys, weights, out, log_total)


def seen_by(plan, own, part):
    """[B or 1, size, size] bool"""
    real = part["real"][None, None, :]
    order = visible(
        Sites(own["index"], own["segment"]), Sites(part["index"], part["segment"]), plan.causal, plan.window
    )
    return jnp.broadcast_to(real, (1, own["index"].size, real.size)) if order is None else real & order


def where_seen(plan, own, part, do, carry, skipped):
    """`do(carry)`, or `skipped(carry)` for a block of keys that all come too late or too early for all queries."""
    own, part = own["index"], part["index"]  # padding has index 0
    distances = own[0] - part.max(), part[0] - own.max()  # the shortest, to keys before and after
    met = [d <= most for d, most in zip(distances, reach(plan.causal, plan.window), strict=True) if most is not None]
    return lax.cond(functools.reduce(jnp.logical_and, met), do, skipped, carry) if met else do(carry)


def start_state(plan, q):
    B, size, G, R, _ = q.shape
    return None if plan.step is None else jnp.zeros((B, G * R, size), wide(q.dtype))


def softmax(plan, own, keys, weights):
    """One query block -> output [B, G, R, size, E], log of the softmax's sum [B, G, R, size]."""
    q, (B, size, G, R, _) = own["q"], own["q"].shape
    dtype = wide(q.dtype)

    def body(carry, part):
        def see(carry):
            top, total, acc, state = carry
            seen, s = seen_by(plan, own, part), logits(q, part["k"], plan.scale)
            if plan.step is not None:
                bias, state = plan.step(state, own["edge"], part["edge"], seen, weights)
                s = s + bias.reshape(-1, *s.shape[1:])
            seen = seen[:, None, None]
            s = jnp.where(seen, s, jnp.finfo(dtype).min)
            new = jnp.maximum(top, s.max(-1))
            p = jnp.where(seen, jnp.exp(s - new[..., None]), 0)
            fade = jnp.exp(top - new)
            return new, total * fade + p.sum(-1), acc * fade[..., None] + weighted(p, part["v"]), state

        return where_seen(plan, own, part, see, carry, lambda carry: carry), None

    row = jnp.zeros((B, G, R, size), dtype)
    acc = jnp.zeros((*row.shape, keys["v"].shape[-1]), dtype)
    start = (row + jnp.finfo(dtype).min, row, acc, start_state(plan, q))
    (top, total, acc, _), _ = lax.scan(body, start, keys, reverse=True)
    total = jnp.where(total == 0, 1, total)  # a row that sees nothing
    return (acc / total[..., None]).astype(keys["v"].dtype), top + jnp.log(total)


def backward(plan, kept, d_out):
    queries, keys, weights, out, log_total = kept
    floats = {name: keys[name] for name in ("k", "v", "edge") if keys[name] is not None}
    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, wide(t.dtype)), (floats, weights))

    def body(totals, row):
        own, of_keys, of_weights = row_backward(plan, *row, keys, weights, totals[0])
        return (of_keys, jax.tree.map(jnp.add, totals[1], of_weights)), own

    (of_keys, of_weights), of_queries = lax.scan(body, zeros, (queries, out, log_total, d_out))
    like = lambda grads, given: jax.tree.map(lambda g, t: g.astype(t.dtype), grads, given)  # noqa: E731
    nothing = dict(index=None, segment=None)
    of_queries = {name: like(g, queries[name]) for name, g in of_queries.items()}
    of_keys = {name: like(g, keys[name]) for name, g in of_keys.items()}
    edge = {} if plan.step else {"edge": None}
    return {**of_queries, **nothing, **edge}, {**of_keys, **nothing, "real": None, **edge}, like(of_weights, weights)


def row_backward(plan, own, out, log_total, d_out, keys, weights, of_keys):
    """One query block -> cotangents of its features, of the keys' [n, B, size, ...] (`of_keys` so far) and of the
    weights."""
    q, dtype = own["q"], log_total.dtype
    d_rows = jnp.moveaxis(d_out, 3, 1)  # [B, size, G, R, E]
    delta = (d_out.astype(dtype) * out.astype(dtype)).sum(-1)[..., None]
    states = None if plan.step is None else states_before(plan, own, keys, weights)

    def body(carry, given):
        (number, part, state), (carry, of_keys) = given, carry

        def see(carry):
            d_own, d_weights, d_state = carry
            seen, s = seen_by(plan, own, part), logits(q, part["k"], plan.scale)
            if plan.step is not None:
                step = lambda *given: plan.step(*given[:3], seen, given[3])  # noqa: E731
                (bias, _), pull = jax.vjp(step, state, own["edge"], part["edge"], weights)
                s = s + bias.reshape(-1, *s.shape[1:])
            p = jnp.where(seen[:, None, None], jnp.exp(s - log_total[..., None]), 0)
            d_p = logits(d_rows, part["v"], 1)
            d_s = p * (d_p - delta)
            d_k = {"k": gathered(d_s * plan.scale, q), "v": gathered(p, d_rows)}
            d_own = {**d_own, "q": d_own["q"] + jnp.moveaxis(weighted(d_s * plan.scale, part["k"]), 3, 1)}
            if plan.step is not None:
                d_bias = d_s.reshape(d_s.shape[0], -1, *d_s.shape[3:])
                d_bias = d_bias if bias.shape[0] == d_bias.shape[0] else d_bias.sum(0, keepdims=True)
                d_state, d_edge, d_k["edge"], more = pull((d_bias, d_state))
                d_own["edge"] = d_own["edge"] + d_edge
                d_weights = jax.tree.map(jnp.add, d_weights, more)
            return (d_own, d_weights, d_state), jax.tree.map(lambda g, z: g.astype(z.dtype), d_k, none)

        def skip(carry):
            return carry, none

        none = {
            n: jnp.zeros_like(t, wide(t.dtype)) for n, t in part.items() if n in ("k", "v", "edge") and t is not None
        }
        carry, d_k = where_seen(plan, own, part, see, carry, skip)
        # added block by block: a sum of rows' whole cotangents is several passes over all keys for each row
        of_keys = jax.tree.map(lambda t, g: lax.dynamic_update_index_in_dim(t, t[number] + g, number, 0), of_keys, d_k)
        return (carry, of_keys), None

    d_own = {n: jnp.zeros_like(own[n], wide(own[n].dtype)) for n in ("q", "edge") if own[n] is not None}
    start = (d_own, jax.tree.map(lambda t: jnp.zeros_like(t, wide(t.dtype)), weights), start_state(plan, q))
    numbers = jnp.arange(keys["k"].shape[0])
    ((d_own, d_weights, _), of_keys), _ = lax.scan(body, (start, of_keys), (numbers, keys, states))
    return d_own, of_keys, d_weights


def states_before(plan, own, keys, weights):
    """The state with which each key block is met, [n, B, H, size]."""

    def body(state, part):
        def see(state):
            return plan.step(state, own["edge"], part["edge"], seen_by(plan, own, part), weights)[1]

        return where_seen(plan, own, part, see, state, lambda state: state), state

    return lax.scan(body, start_state(plan, own["q"]), keys, reverse=True)[1]


attention.defvjp(forward, backward)
