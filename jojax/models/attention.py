"""One attention for every encoding. q, k, v arrive transported; a low-rank bias rides as extra q/k features, a path sum
(edge) is added block by block. `xla` is the truth; `chunked` (O(L) memory) and the fused `kernels` are tested equal to
it.

Shapes: q [B, Lq, G, R, D] (R query heads share key head G), k [B, Lk, G, D], v [B, Lk, G, E] -> [B, Lq, G, R, E].
Logits and softmax in float32 or wider. Who sees whom goes by arrival index and document, never by position.
"""

import jax.numpy as jnp
from jax import lax

from jojax.encodings.base import Context, Journey
from jojax.errors import UserError
from jojax.models import kernels, sharded
from jojax.models.chunked import chunked
from jojax.models.kernels import compiled_for, scaled
from jojax.models.scores import EMPTY, Sites, logits, visible, weighted

IMPLEMENTATIONS = ("auto", "xla", "chunked", *kernels.KERNELS)
CHUNKED_FROM = 1024  # keys; `auto` takes the O(L) path from here on

__all__ = ["EMPTY", "Sites", "attend", "chunked", "compiled_for", "journey_attention", "transport", "with_lift", "xla"]


def attend(q, k, v, query: Sites, key: Sites, *, implementation="auto", **options):
    """Softmax attention; a row that sees no key yields zeros. `options` of `xla`: `scale` multiplies q·k (`scale_of`);
    `window` n > 0: a site sees those less than n away, itself among them."""

    def chosen(*given, **options):
        return choose(implementation, *given, **options)(*given, **options)

    return sharded.attend(chosen, q, k, v, query, key, **options)  # a choice for a device's own shapes


def choose(implementation, q, k, v, query, key, *, causal, window=0, edge=None, **_):
    """The function, of the signature of `xla`, for arrays of these shapes. `auto`: the platform's kernel where it can
    and is worth it, else `chunked` for long keys and `xla` for short ones."""
    case = dict(causal=causal, window=window, edge=edge)
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"attention = {implementation!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        long = k.shape[1] >= CHUNKED_FROM
        implementation = kernels.suited(q, k, v, query, key, long, **case) or ("chunked" if long else "xla")
    elif implementation in kernels.KERNELS and (why := kernels.refusal(implementation, q, k, v, **case)):
        raise UserError(f"attention = {implementation!r} {why}: set attention = 'auto'")
    return {"xla": xla, "chunked": chunked, **kernels.KERNELS}[implementation]


def xla(q, k, v, query, key, *, causal, scale, window=0, edge=None, edge_key=None):
    s = logits(q, k, scale)
    seen = visible(query, key, causal, window)
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


def journey_attention(q, k, v, journey: Journey, ctx: Context, *, norm=None, causal=True, **options):
    """c_k of the formula of `jojax.encodings.base`, for whole sequences: q [B, L, H, D], k [B, L, G, D], v [B, L, G, E]
    -> [B, L, H, E]. Documents (`ctx.segment`) do not see each other. `norm`: see `transport`; `options` of `attend`:
    window, implementation."""
    scale, edge, sites = scale_of(journey, q.shape[-1]), journey.edge, Sites(jnp.arange(q.shape[1]), ctx.segment)
    q, k, v, home = transport(journey, q, k, v, ctx.placed, norm)
    edge_key = None if edge is None else edge.key
    return home(attend(q, k, v, sites, sites, causal=causal, scale=scale, edge=edge, edge_key=edge_key, **options))


def scale_of(journey: Journey, head_dim):
    """What multiplies q·k after `transport`: nothing where a lift stands beside, see `with_lift`."""
    return 1.0 if journey.lift is not None else head_dim**-0.5 / journey.temperature


def transport(journey: Journey, q, k, v, placed=None, norm=None):
    """q [B, L, H, D] -> [B, L, G, R, D], k and v [B, L, G, ...]: all in the frames of their sites, a low-rank bias as
    features; and the way home for the output, to [B, L, H, E]. `norm` (q, k -> q, k) acts between the two."""

    def placed_frame(frame):
        return frame if frame is None or placed is None else frame.where(placed)

    B, L, H, D = q.shape
    q = q.reshape(B, L, k.shape[2], -1, D)
    frame = placed_frame(journey.frame)
    value_frame = frame if journey.value_frame is journey.frame else placed_frame(journey.value_frame)
    if frame is not None:
        q, k = frame.dual(q), frame.apply(k)
    if norm is not None:
        q, k = norm(q, k)
    if journey.lift is not None:
        lift = journey.lift
        if placed is not None:
            lift = tuple(jnp.where(placed[..., None, None], t, 0) for t in lift)
        q, k = with_lift(q, k, lift, D**-0.5 / journey.temperature)
    if value_frame is None:
        return q, k, v, lambda o: o.reshape(B, L, H, -1)
    back = value_frame.invert if journey.restore else lambda o: o
    return q, k, value_frame.apply(v), lambda o: back(o).reshape(B, L, H, -1)


def with_lift(q, k, lift, scale):
    """q · scale and k with a low-rank bias appended as features, so that every kernel can take it.

    q [B, L, G, R, D], k [B, L, G, D]; lift (query [B, L, H, r], key [B, L, G, r]), float32 or wider. Each
    feature is split into three terms that bfloat16 holds exactly, products below 2⁻²⁴ left out: the bias keeps
    float32's precision in bfloat16 and where accelerators round the factors of a float32 product. A scale of all
    features together would end that in kernels that have no place for one but q: so it is done before."""
    lift_q, lift_k = lift
    q, lift_q = scaled(q, scale), lift_q.reshape(*q.shape[:4], -1)
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
