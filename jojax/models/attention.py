"""One attention for every encoding. q, k, v arrive transported; a low-rank bias rides as extra q/k features, a path sum
(edge) is added block by block. `xla` is the truth, `chunked` (O(L) memory) is tested equal to it.

Shapes: q [B, Lq, G, R, D] (R query heads share key head G), k [B, Lk, G, D], v [B, Lk, G, E] -> [B, Lq, G, R, E].
Logits and softmax in float32 or wider. Who sees whom goes by arrival index and document, never by position.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jojax.encodings.base import Context, Edge, Journey, wide
from jojax.errors import UserError

IMPLEMENTATIONS = ("auto", "xla", "chunked")
CHUNKED_FROM = 1024  # keys; `auto` takes the O(L) path from here on
EMPTY = -2  # segment of a cache slot not yet written; padding is −1


@struct.dataclass
class Sites:
    index: jax.Array  # [L] arrival
    segment: jax.Array | None  # [B, L] document; None = all one


def visible(query: Sites, key: Sites, causal: bool):
    """[B or 1, Lq, Lk] bool, or None where everything is seen."""
    seen = None
    if query.segment is not None and key.segment is not None:
        seen = query.segment[:, :, None] == key.segment[:, None, :]
    if causal:
        order = key.index[None, None, :] <= query.index[None, :, None]
        seen = order if seen is None else seen & order
    return seen


def attend(q, k, v, query: Sites, key: Sites, *, causal, scale, edge=None, edge_key=None, implementation="auto"):
    """Softmax attention; a row that sees no key yields zeros. `scale` is 1/√head_dim of the model."""
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"attention = {implementation!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = "chunked" if k.shape[1] >= CHUNKED_FROM else "xla"
    function = xla if implementation == "xla" else chunked
    return function(q, k, v, query, key, causal=causal, scale=scale, edge=edge, edge_key=edge_key)


def logits(q, k, scale):
    """[B, G, R, Lq, Lk], float32 or wider. Heads lead, so that each product is one of plain matrices."""
    B, Lq, G, R, D = q.shape
    rows, columns = jnp.moveaxis(q, 1, 3).reshape(B, G, R * Lq, D), jnp.moveaxis(k, 1, 2)
    s = jnp.einsum("bgqd,bgkd->bgqk", rows, columns, preferred_element_type=wide(q.dtype))
    return s.reshape(B, G, R, Lq, -1) * scale


def weighted(p, v):
    """Σ_k p v, [B, G, R, Lq, E] in p's dtype; p [B, G, R, Lq, Lk] is rounded to v's."""
    rows = p.reshape(*p.shape[:2], -1, p.shape[-1]).astype(v.dtype)
    out = jnp.einsum("bgqk,bgke->bgqe", rows, jnp.moveaxis(v, 1, 2), preferred_element_type=p.dtype)
    return out.reshape(*p.shape[:-1], -1)


def xla(q, k, v, query, key, *, causal, scale, edge=None, edge_key=None):
    s = logits(q, k, scale)
    seen = visible(query, key, causal)
    if edge is not None:
        state = jnp.zeros((q.shape[0], q.shape[2] * q.shape[3], q.shape[1]), s.dtype)
        everyone = jnp.ones((1, q.shape[1], k.shape[1]), bool) if seen is None else seen
        bias = edge.step(state, edge.query, edge_key, everyone, edge.weights)[0]
        s = s + bias.reshape(-1, *s.shape[1:])
    if seen is not None:
        s = jnp.where(seen[:, None, None], s, jnp.finfo(s.dtype).min)
    p = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    if seen is not None:
        p = jnp.where(seen[:, None, None], p, 0)  # a row that sees nothing
    total = p.sum(-1)[..., None]
    out = weighted(p, v) / jnp.where(total == 0, 1, total)  # not the weights: saves a pass over [Lq, Lk]
    return jnp.moveaxis(out, 3, 1).astype(v.dtype)


def chunked(q, k, v, query, key, *, causal, scale, edge=None, edge_key=None, block=512):
    """Query blocks one after the other; in each, key blocks from last to first with a running softmax. Memory is
    O(L) backwards too: each query block is recomputed, and its key scan keeps one carry of a block's size a step."""
    Lq, Lk = q.shape[1], k.shape[1]
    size_q, size_k = min(block, Lq), min(block, Lk)
    segment = query.segment, key.segment
    queries = dict(q=q, edge=None if edge is None else edge.query, index=query.index, segment=segment[0])
    keys = dict(k=k, v=v, edge=edge_key, index=key.index, segment=segment[1], real=jnp.ones(Lk, bool))
    keys = split(keys, size_k)

    @jax.checkpoint
    def one_query_block(part):
        sites = Sites(part["index"], part["segment"])
        own = None if edge is None else edge.replace(query=part["edge"])
        return scan_keys(part["q"], keys, sites, own, causal, scale, v.dtype)

    out = lax.map(one_query_block, split(queries, size_q))  # [n, B, size_q, G, R, E]
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *out.shape[3:])[:, :Lq]


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


def scan_keys(q, keys, query: Sites, edge: Edge | None, causal, scale, dtype):
    """Online softmax over key blocks, last to first; -> [B, size_q, G, R, E]."""
    B, Lq, G, R, _ = q.shape
    width = keys["v"].shape[-1]
    low = jnp.finfo(wide(q.dtype)).min
    zero = jnp.zeros((B, G, R, Lq), wide(q.dtype))

    @jax.checkpoint
    def body(carry, part):
        top, total, acc, state = carry
        seen = part["real"][None, None, :]
        order = visible(query, Sites(part["index"], part["segment"]), causal)
        seen = jnp.broadcast_to(seen, (1, Lq, seen.shape[-1])) if order is None else seen & order
        s = logits(q, part["k"], scale)
        if edge is not None:
            bias, state = edge.step(state, edge.query, part["edge"], seen, edge.weights)
            s = s + bias.reshape(-1, *s.shape[1:])
        seen = seen[:, None, None]
        s = jnp.where(seen, s, low)
        new = jnp.maximum(top, s.max(-1))
        p = jnp.where(seen, jnp.exp(s - new[..., None]), 0)
        fade = jnp.exp(top - new)
        acc = acc * fade[..., None] + weighted(p, part["v"])
        return (new, total * fade + p.sum(-1), acc, state), None

    start = (zero + low, zero, jnp.zeros((B, G, R, Lq, width), zero.dtype), zero.reshape(B, G * R, Lq))
    (_, total, acc, _), _ = lax.scan(body, start, keys, reverse=True)
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return jnp.moveaxis(out, 3, 1).astype(dtype)


def journey_attention(q, k, v, journey: Journey, ctx: Context, *, causal=True, implementation="auto"):
    """c_k of the formula of `jojax.encodings.base`, for whole sequences: q [B, L, H, D], k [B, L, G, D], v [B, L, G, E]
    -> [B, L, H, E]. Documents (`ctx.segment`) do not see each other."""
    scale, edge, sites = q.shape[-1] ** -0.5, journey.edge, Sites(jnp.arange(q.shape[1]), ctx.segment)
    q, k, v, home = transport(journey, q, k, v, ctx.placed)
    edge_key = None if edge is None else edge.key
    more = dict(causal=causal, scale=scale, edge=edge, edge_key=edge_key, implementation=implementation)
    return home(attend(q, k, v, sites, sites, **more))


def transport(journey: Journey, q, k, v, placed=None, norm=None):
    """q [B, L, H, D] -> [B, L, G, R, D], k and v [B, L, G, ...]: all in the frames of their sites, a low-rank bias as
    features; and the way home for the output, to [B, L, H, E]. `norm` (q, k -> q, k) acts between the two."""

    def placed_frame(frame):
        return frame if frame is None or placed is None else frame.where(placed)

    B, L, H, D = q.shape
    q = q.reshape(B, L, k.shape[2], -1, D)
    frame, value_frame = placed_frame(journey.frame), placed_frame(journey.value_frame)
    if frame is not None:
        q, k = frame.dual(q), frame.apply(k)
    if norm is not None:
        q, k = norm(q, k)
    if journey.lift is not None:
        lift = journey.lift
        if placed is not None:
            lift = tuple(jnp.where(placed[..., None, None], t, 0) for t in lift)
        q, k = with_lift(q, k, lift, D)
    if value_frame is None:
        return q, k, v, lambda o: o.reshape(B, L, H, -1)
    back = value_frame.invert if journey.restore else lambda o: o
    return q, k, value_frame.apply(v), lambda o: back(o).reshape(B, L, H, -1)


def with_lift(q, k, lift, head_dim):
    """Append a low-rank bias as features of q and k, so that every kernel can take it.

    q [B, L, G, R, D], k [B, L, G, D]; lift (query [B, L, H, r], key [B, L, G, r]), float32 or wider. Each
    feature is split into three terms that bfloat16 holds exactly, products below 2⁻²⁴ left out: the bias keeps
    float32's precision in bfloat16 and where accelerators round the factors of a float32 product."""
    lift_q, lift_k = lift
    lift_q = lift_q.reshape(*q.shape[:4], -1) * head_dim**0.5
    if jnp.finfo(q.dtype).bits <= 32:
        high_q, high_k = terms(lift_q), terms(lift_k)
        pairs = [(i, j) for i in range(3) for j in range(3) if i + j < 3]
        lift_q = jnp.concatenate([high_q[i] for i, _ in pairs], -1)
        lift_k = jnp.concatenate([high_k[j] for _, j in pairs], -1)
    return jnp.concatenate([q, lift_q.astype(q.dtype)], -1), jnp.concatenate([k, lift_k.astype(k.dtype)], -1)


def terms(x):
    """x as three terms that bfloat16 holds exactly, x ≈ a + b + c."""
    parts, info = [], jnp.finfo(jnp.bfloat16)
    for _ in range(3):
        # reduce_precision, not a cast: XLA may drop a cast and its way back
        parts.append(lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant))
        x = x - parts[-1]
    return parts
