"""What attention does in a trained model, in numbers: taken at the end of a run (`config.eval.diagnostics` rows of
held-out data, at the longest length that is evaluated, at most LONGEST sites), kept in result.json.

Of every block, each a mean over rows and sites:
  entropy   [heads]: of a query's weights, over the log of how many keys it sees: 1 = uniform, 0 = one key
  reach     [heads]: Σ_j α_kj · distance, in sites or patches
  beyond    [heads]: the weight on keys further away than the training length, of queries that have such (text)
  steps     {mean, std} [heads, planes]: radians in (−π, π] from a site to the next (text); of frames that are not
            planes, the sizes of the step's eigen-angles, first head, largest first
  values    {distance, alike [heads, n]}: `coherence.of_values`: 1 = all values at that distance are turned alike
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jojax import coherence
from jojax.encodings.base import wide
from jojax.encodings.frames import PlaneFrame
from jojax.models import attention

LONGEST = 2048
POINTS = 32  # of a curve


def measure(job, params):
    """-> {protocol, blocks: [{…}]}, plain lists of numbers. params: whole, on one device."""
    config, trained = job.config, getattr(job.config.data, "length", 0)
    rows = config.eval.diagnostics
    length = min(max((trained, *config.eval.get("lengths", ()))), LONGEST) if trained else 0
    if job.model.encoding(parent=None).BOUNDED_LENGTH:
        length = min(length, trained)
    batch = coherence.held_out_batch(job, length, rows)
    length = batch["tokens"].shape[1] if trained else 0
    seen = coherence.watch(job, params, batch)
    blocks = [block(job, params, number, pair, trained) for number, pair in enumerate(seen)]
    return {"protocol": {"rows": len(batch["weight"]), "length": length, "training_length": trained}, "blocks": blocks}


def block(job, params, number, pair, trained):
    ctx, journey = pair
    d = coherence.distances(ctx, job.model.spec.dims.causal)
    alpha = weights(job, params, number, ctx, journey)
    seen, spread, reach, beyond = (np.asarray(t, float) for t in of_queries(alpha, d, trained))
    several = seen > 1
    found = {
        "entropy": per_head(spread / np.log(np.maximum(seen, 2)), several),
        "reach": per_head(reach, several),
    }
    if trained and (d >= trained).any():
        has = np.broadcast_to((d >= trained).any(-1), several.shape)
        found["beyond"] = per_head(beyond, has)
    if trained and journey.frame is not None:
        found["steps"] = steps(journey.frame, ctx)
    if journey.value_frame is not None:
        x = coherence.some_of(coherence.often(d), POINTS)
        alike = turned_alike(journey, ctx, x) if trained else coherence.of_values(journey, ctx, d, x)[0]
        found["values"] = {"distance": x, "alike": np.round(alike, 5)}
    return found


def turned_alike(journey, ctx, points):
    """The first of `coherence.of_values`, in a row where site k has one other at distance n: k − n. [heads, points]"""
    (away, home), L = coherence.sent(journey, ctx), ctx.k.shape[1]

    def at(n):
        there = (jnp.arange(L) >= n)[:, None, None]
        mean = jnp.where(there, home(jnp.roll(away, n, axis=2)), 0).sum(2).mean(1) / (L - n)
        return jnp.sqrt((mean**2).sum(-1).mean(0))

    return np.asarray(jax.jit(lambda points: lax.map(at, points))(jnp.asarray(points))).T


@jax.jit  # in one pass: α is by far the largest array here
def of_queries(alpha, d, trained):
    """α [B, H, k, j], d [k, j] -> [B, H, k] each: keys seen, −Σ α log α, Σ α · distance, Σ α of what is further away
    than the training length."""
    parts = (alpha > 0, jax.scipy.special.entr(alpha), alpha * jnp.maximum(d, 0), jnp.where(d >= trained, alpha, 0))
    return tuple(t.sum(-1) for t in parts)


def per_head(table, where):
    """[B, H, k] -> [H]"""
    return np.round(np.where(where, table, 0).sum((0, 2)) / np.maximum(where.sum((0, 2)), 1), 6)


def weights(job, params, number, ctx, journey):
    """α [B, H, k, j]: what attention makes of values that are one-hot, so every journey and implementation counts."""
    spec, gains = job.model.spec, None
    if spec.qk_norm == "after":
        gains = [params["blocks"][name]["scale"][number] for name in ("norm_q", "norm_k")]
    return _weights(ctx, journey.replace(value_frame=None), gains, spec.eps, spec.dims.causal, spec.window)


@functools.partial(jax.jit, static_argnames=("eps", "causal", "window"))
def _weights(ctx, journey, gains, eps, causal, window):
    def norm(*qk):
        rms = nn.RMSNorm(epsilon=eps)
        return tuple(rms.apply({"params": {"scale": gain}}, t) for t, gain in zip(qk, gains, strict=True))

    B, L, G, _ = ctx.k.shape
    q, k = (t.astype(wide(t.dtype)) for t in (ctx.q, ctx.k))
    one_hot = jnp.broadcast_to(jnp.eye(L, dtype=k.dtype)[:, None], (B, L, G, L))
    more: dict = dict(causal=causal, window=window, norm=norm if gains else None, implementation="xla")
    return jnp.moveaxis(attention.journey_attention(q, k, one_hot, journey, ctx, **more), 1, 2)


def steps(frame, ctx):
    if isinstance(frame, PlaneFrame):
        turns = np.angle(np.exp(1j * np.diff(np.asarray(frame.angles, float), axis=1)))
        turns = np.moveaxis(turns, 2, 0).reshape(turns.shape[2], -1, turns.shape[3])  # [heads, sites, planes]
    else:
        turns = coherence.eigen_angles(frame, ctx, step=True).T[None]
    return {"mean": np.round(turns.mean(1), 6), "std": np.round(turns.std(1), 6)}
