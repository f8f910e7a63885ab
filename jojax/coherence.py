"""What journeys do at a distance: to a key that equals the query, to a logit, to a value that many sites share.

Read off the contract: a forward pass is watched, and what the encoding answered to a block's Context is measured, so
that the user's own encodings work too. Distances are those of query k and key j (k − j; in images, between patches,
rounded); tables are [heads, k, j], means over the rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jojax import task
from jojax.data import windows
from jojax.encodings.base import Encoding

PROBES = 8


def watch(job, params, batch):
    """[(Context, Journey)] of every block: what the encoding was asked and what it answered; q and k as its frames get
    them, before a norm that comes after those."""
    seen, inside, bare, after = [], [], {}, job.model.spec.qk_norm == "after"

    def keep(*pair):
        seen.append(jax.tree.map(np.array, pair))  # copies: the buffers are the program's

    def look(following, args, kwargs, call):
        if after and call.module.name in ("norm_q", "norm_k"):
            bare[call.module.name[-1]] = args[0]  # the latest before the journey is what gates read
        if inside or not isinstance(call.module, Encoding) or call.method_name != "journey":
            return following(*args, **kwargs)
        inside.append(call)  # the hook may call that of its parent
        journey = following(*args, **kwargs)
        inside.clear()
        jax.debug.callback(keep, args[-1].replace(**bare), journey, ordered=True)
        return journey

    forward(job, params, batch, look)
    return [jax.tree.map(jnp.asarray, placed(*pair)) for pair in seen]


def forward(job, params, batch, look):
    """A pass without training, all methods through `look` (flax's interceptor), whose callbacks are done after it."""
    with nn.intercept_methods(look):
        jax.block_until_ready(jax.jit(lambda *given: job.loss(*given, None, False)[0])(params, batch))
    jax.effects_barrier()


def held_out_batch(job, length, most):
    """So many rows of the valid split, spread over all of it: images, or windows of `length` tokens, shorter where no
    document is that long."""
    transform = lambda row: row  # noqa: E731
    if job.unit != "tokens":
        rows, transform = job.valid
    elif isinstance(job, task.Probe):
        rows = job.rows("valid", length)
    else:
        corpus = job.corpus("valid")
        length = min(length, int(corpus.predictions().max()))
        rows = windows.common_windows(corpus, [length])[length]
    chosen = [transform(rows[int(i)]) for i in np.linspace(0, len(rows) - 1, min(most, len(rows)))]
    return {key: np.stack([row[key] for row in chosen]) for key in chosen[0]}


def placed(ctx, journey):
    """Frames are the identity at sites without a place."""
    if ctx.placed is not None:
        frames = {name: getattr(journey, name) for name in ("frame", "value_frame")}
        journey = journey.replace(**{name: frame and frame.where(ctx.placed) for name, frame in frames.items()})
    return ctx, journey


def distances(ctx, causal):
    """[k, j] int; −1 for pairs that do not see each other or have no place."""
    at = np.asarray(ctx.position[0], float)
    d = np.rint(np.linalg.norm(at[:, None] - at[None], axis=-1)).astype(int)
    there = np.ones(len(at), bool) if ctx.placed is None else np.asarray(ctx.placed[0])
    seen = there[:, None] & there & (np.tri(len(at), dtype=bool) if causal else True)
    return np.where(seen, d, -1)


def often(d):
    """[n]: the distances that enough pairs have."""
    return np.flatnonzero(np.bincount(d[d >= 0]) >= len(d) / 4)


def some_of(x, most):
    """At most so many of ascending numbers, the near ones closer together."""
    return np.unique(x[np.geomspace(1, len(x), min(most, len(x))).round().astype(int) - 1])


def by_distance(table, d):
    """Those distances, and the means over all pairs at each of them, [heads, n]."""
    x, seen = often(d), d >= 0
    sums = np.array([np.bincount(d[seen], of_head[seen]) for of_head in np.asarray(table, float)])
    return x, sums[:, x] / np.bincount(d[seen])[x]


def probes(vectors, ctx):
    """[n, D] -> [n, B, L, G, D], the same at every site."""
    return jnp.broadcast_to(vectors[:, None, None, None], (len(vectors), *ctx.k.shape)).astype(ctx.position.dtype)


def match(frame, ctx):
    """tr P_{j→k} / D: the mean of zᵀ P_{j→k} z over all unit vectors z."""
    B, D = ctx.k.shape[0], ctx.k.shape[-1]
    basis = probes(jnp.eye(D), ctx)
    return jnp.einsum("nbkgd,nbjgd->gkj", jax.vmap(frame.dual)(basis), jax.vmap(frame.apply)(basis)) / (B * D)


def real_match(frame, ctx):
    """The mean of q_kᵀ P_{j→k} k_j / ‖q_k‖‖k_j‖, also over the query heads of a key head."""
    q, k = (t / jnp.maximum(jnp.linalg.norm(t, axis=-1, keepdims=True), 1e-12) for t in (ctx.q, ctx.k))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    q, k = (q, k) if frame is None else (frame.dual(q), frame.apply(k))
    return jnp.einsum("bkgrd,bjgd->gkj", q, k) / (q.shape[0] * q.shape[3])


def bias(journey, ctx, causal):
    """b_kj − b_kk (of what belongs to the query alone, the softmax sees nothing); None where nothing is added."""
    parts, (B, L, H) = [], ctx.q.shape[:3]
    if journey.lift is not None:
        query, key = journey.lift
        parts.append(jnp.einsum("bkhr,bjhr->bhkj", query, jnp.repeat(key, H // key.shape[2], axis=2)))
    if journey.edge is not None:
        edge, seen = journey.edge, jnp.ones((1, L, L), bool)
        start = jnp.zeros((B, H, L), edge.query.dtype)
        seen = jnp.tril(seen) if causal else seen
        parts.append(edge.step(start, edge.query, edge.key, seen, edge.weights)[0])
    total = sum(parts) if parts else None
    return None if total is None else (total - jnp.diagonal(total, axis1=-2, axis2=-1)[..., None]).mean(0)


def sent(journey, ctx):
    """Random unit vectors in the value frame of every site, [PROBES, B, L, G, D], and the way home for their like."""
    v = np.random.default_rng(0).normal(size=(PROBES, ctx.k.shape[-1]))
    v = probes(jnp.asarray(v / np.linalg.norm(v, axis=-1, keepdims=True)), ctx)
    home = jax.vmap(journey.value_frame.invert) if journey.restore else lambda y: y
    return jax.vmap(journey.value_frame.apply)(v), home


def of_values(journey, ctx, d, points):
    """‖mean P_{j→k} v‖ at the distances `points`, root of the mean square over unit vectors v: [2, heads, points].

    First of the mean over all pairs at a distance (1 = whatever lies there, it turns v alike); then of the mean over
    the sites that a query has up to a distance, for the queries that have all of them, root of their mean square."""
    away, home = sent(journey, ctx)
    d, far = jnp.asarray(d), jnp.asarray(d.max(1))

    def at(n):
        here = (d == n).astype(away.dtype)
        alike = home(jnp.einsum("kj,nbjgd->nbkgd", here, away)).sum(2).mean(1) / here.sum()
        near = ((d >= 0) & (d <= n)).astype(away.dtype)
        near = near / jnp.maximum(near.sum(1, keepdims=True), 1)
        up_to = (home(jnp.einsum("kj,nbjgd->nbkgd", near, away)) ** 2).sum(-1).mean((0, 1))  # [k, heads]
        whole = (far >= n).astype(away.dtype)
        return jnp.sqrt(jnp.stack([(alike**2).sum(-1).mean(0), whole @ up_to / whole.sum()]))

    return np.moveaxis(np.asarray(jax.jit(lambda points: lax.map(at, points))(jnp.asarray(points))), 0, -1)


def eigen_angles(frame, ctx, step):
    """[D/2, sites], first row and head, largest first: of P_{t→t+1} (step), or of A_t."""
    there = jax.vmap(frame.apply)(probes(jnp.eye(ctx.k.shape[-1]), ctx))
    if step:
        there = jax.vmap(frame.invert)(jnp.roll(there, 1, axis=2))[:, :, 1:]
    matrices = np.moveaxis(np.asarray(there[:, 0, :, 0], float), 0, -1)  # columns are what the basis became
    return np.sort(np.abs(np.angle(np.linalg.eigvals(matrices))), -1)[:, ::-2].T


def added(job, params, ctx):
    """[L, C]: what `begin` adds to embeddings of zero in the first row; None: nothing."""
    encoding, zeros = job.model.encoding(parent=None), jnp.zeros_like(ctx.residual)
    variables = {"params": params.get("encoding", {})}
    x, _, _ = encoding.apply(variables, zeros, ctx, method="begin", rngs=task.evaluation_rngs())
    return np.asarray(x[0], float) if np.any(x) else None


def cosines(vectors):
    """[L, C] -> [1, L, L]"""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return (unit @ unit.T)[None]
