"""Laws of an encoding on its own, without a model: what its journey says of the way between two sites.

A law is a function of a sample; it answers a residual, which is nothing where the law holds, or NaN where the sample
could not have shown that it fails. `jojax.laws` has the table of all laws.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jojax import encodings
from jojax.encodings import hooks
from jojax.encodings.base import Dims
from jojax.errors import UserError
from jojax.models import attention

TEXT = Dims(heads=6, kv_heads=3, head_dim=8, width=20, depth=3, vocab=17, length=64)  # so that no axis passes for
DIMS = {  # another
    "text": TEXT,
    "vision": dataclasses.replace(TEXT, head_dim=16, axes=2, grid=(2, 7), vocab=0, length=0, causal=False),
}
SITES = {"text": 11, "vision": 14}
ODD = {"head_dim": (5, 6, 10), "width": (18, 21), "kv_heads": (1, 6)}


class Sample:
    """An encoding (a `config.encoding`) for models of a kind, 'text' or 'vision', with random parameters."""

    def __init__(self, config, kind):
        self.config, self.kind, self.dims, self.L = dict(config), kind, DIMS[kind], SITES[kind]
        self.encoding = encodings.build(self.config, self.dims, "float64")(parent=None)

    def context(self, seed=0, dims=None):
        """A context of random content: sites of one document, at the places of text or of a grid."""
        rng, dims, L = np.random.default_rng(seed), dims or self.dims, self.L
        position = np.indices(dims.grid).reshape(2, -1).T if dims.axes == 2 else np.arange(L)[:, None]
        return encodings.Context(
            position=jnp.asarray(position[None], float),
            restart=jnp.arange(L)[None] == 0,
            segment=jnp.zeros((1, L), jnp.int32),
            tokens=jnp.asarray(rng.integers(0, dims.vocab, (1, L), np.int32)) if dims.vocab else None,
            residual=jnp.asarray(rng.normal(size=(1, L, dims.width))),
            x=jnp.asarray(rng.normal(size=(1, L, dims.width))),
            q=jnp.asarray(rng.normal(size=(1, L, dims.heads, dims.head_dim))),
            k=jnp.asarray(rng.normal(size=(1, L, dims.kv_heads, dims.head_dim))),
        )

    @functools.cached_property
    def ctx(self):
        return self.context()

    @functools.cached_property
    def weights(self):
        """Parameters of all hooks, N(0, 1)."""
        rng = np.random.default_rng(5)
        return jax.tree.map(lambda t: jnp.asarray(rng.normal(size=t.shape)), shapes(self.encoding, self.ctx))

    @functools.cached_property
    def compiled(self):
        return jax.jit(lambda weights, ctx: self.encoding.apply(weights, ctx.residual, ctx, method=first_block))

    def journey(self, ctx):
        return self.compiled({"params": self.weights}, ctx)

    @functools.cached_property
    def here(self):
        """The journey in its own context."""
        return self.journey(self.ctx)

    def frames(self):
        return [f for f in (self.here.frame, self.here.value_frame) if f is not None]


def opening(encoding, x, ctx):
    """What goes into the blocks, and the journey of the first; all hooks are called."""
    x, shared, carry = hooks.begin(encoding, x, ctx)
    journey = hooks.journey(encoding, shared, carry, ctx)
    hooks.advance(encoding, shared, carry, ctx.x, ctx)
    return x, journey


def first_block(encoding, x, ctx):
    return opening(encoding, x, ctx)[1]


def shapes(encoding, ctx):
    """Of the parameters of all hooks."""
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), ctx.residual, ctx, method=first_block))
    return like.get("params", {})


@jax.jit
def there_and_back(frame, x):
    return frame.apply(x), frame.invert(x), frame.dual(x)


def norms(s):
    """By how much frames of queries, keys and values change the length of a vector, there and back."""
    given, kept = np.random.default_rng(1).normal(size=s.ctx.k.shape), [0.0]
    for frame in s.frames():
        moved = there_and_back(frame, given)
        sizes = [np.linalg.norm(x, axis=-1) for x in moved]
        turns = np.abs(moved[0] - given).max() > 1e-3
        kept.append(np.abs(np.array(sizes) / np.linalg.norm(given, axis=-1) - 1).max() if turns else math.nan)
    return np.max(kept)


@jax.jit
def columns(frame, like):
    return [frame.apply(jnp.broadcast_to(e, like.shape))[0] for e in jnp.eye(like.shape[-1], dtype=like.dtype)]


def dense(frame, like):
    """A [L, G, D, D] of row 0, column by column."""
    return np.stack([np.asarray(column, float) for column in columns(frame, like)], -1)


def between(journey, j, k, like):
    """All that the journey says of the way from site j to k, at row 0; like: keys [1, L, G, D]."""
    said, L = {}, like.shape[1]
    for which in ("frame", "value_frame"):
        if getattr(journey, which) is not None:
            a = dense(getattr(journey, which), like)
            said[which] = np.linalg.solve(a[k], a[j])
    if journey.lift is not None:
        query, key = journey.lift
        key = jnp.repeat(key, query.shape[2] // key.shape[2], 2)
        said["lift"] = (query[0, k] * (key[0, j] - key[0, k])).sum(-1)  # up to what the query alone adds
    if journey.edge is not None:
        edge = journey.edge
        state, order = jnp.zeros((1, edge.query.shape[2], L)), jnp.tri(L, dtype=bool)[None]
        said["edge"] = edge.step(state, edge.query, edge.key, order, edge.weights)[0][0, :, k, j]
    return said


def apart(a, b):
    """The largest difference between two answers of `between`."""
    return max((np.abs(a[name] - b[name]).max() for name in a), default=0.0)


def both_ways(s):
    """By how much it says something else backwards, or in another order of arrival. NaN where what needs an order is
    not refused in an encoder, or anything else is."""
    found, ctx = [], s.ctx
    if s.here.lift is not None:
        query, key = s.here.lift
        bias = jnp.einsum("khr,jhr->hkj", query[0], jnp.repeat(key[0], query.shape[2] // key.shape[2], 1))
        bias = bias - jnp.diagonal(bias, 0, 1, 2)[..., None]  # what the query alone adds does nothing
        found.append(np.abs(bias - bias.swapaxes(1, 2)).max())
    if s.here.frame is not None:  # what shrinks one way grows the other
        a = dense(s.here.frame, ctx.k)
        found.append(np.abs(a @ a.swapaxes(-1, -2) - np.eye(a.shape[-1])).max())
    order = np.arange(s.L)
    order[[4, 8]] = order[[8, 4]]  # a site between 2 and 7 for one that is not, with all that it has
    names = ("residual", "x", "q", "k", "tokens", "position")
    swapped = ctx.replace(**{n: None if getattr(ctx, n) is None else getattr(ctx, n)[:, order] for n in names})
    found.append(apart(between(s.here, 2, 7, ctx.k), between(s.journey(swapped), 2, 7, ctx.k)))
    try:
        encodings.build(s.config, dataclasses.replace(s.dims, causal=False))
        refused = False
    except UserError as error:
        refused = "needs an order" in str(error)
    return np.max(found) if refused == s.encoding.CAUSAL_ONLY else math.nan


def detours(s):
    """By how much the journey from site 2 to 7 changes with what stands at 3 to 6: tokens, content, coordinates."""
    ctx, other = s.ctx, s.context(seed=1)
    inside = (np.arange(s.L) > 2) & (np.arange(s.L) < 7)

    def mixed(a, b):
        return jnp.where(inside.reshape(1, s.L, *[1] * (a.ndim - 2)), b, a)

    changed = {n: mixed(getattr(ctx, n), getattr(other, n)) for n in ("residual", "x", "q", "k")}
    if ctx.tokens is not None:
        ctx = ctx.replace(tokens=jnp.arange(s.L)[None])
        changed["tokens"] = mixed(ctx.tokens, ctx.tokens + 5)
    changed["position"] = mixed(ctx.position, ctx.position[:, ::-1] + (30 if s.dims.axes == 1 else 0))
    here, there = s.journey(ctx), s.journey(ctx.replace(**changed))
    before, after = between(here, 2, 7, ctx.k), between(there, 2, 7, ctx.k)
    elsewhere = between(here, 3, 7, ctx.k)  # another start is another journey
    moves = all(np.abs(elsewhere[n] - before[n]).max() > 1e-6 for n in before)
    return apart(before, after) if moves else math.nan


def ends(s):
    """0 where more sites than trained with are refused by a number, 1 where they are answered. NaN where as many as
    trained with are refused, or the number is not told."""

    def refusal(**changes):
        try:
            encoding = encodings.build(s.config, dataclasses.replace(s.dims, **changes), "float64")(parent=None)
            shapes(encoding, s.ctx)
        except UserError as error:
            return str(error)
        return None

    sizes = ((2, 7), (2, 6)) if s.kind == "vision" else (s.L, s.L - 1)
    same, longer = (refusal(**{"grid" if s.kind == "vision" else "length": size}) for size in sizes)
    if longer is None and same is None:
        return 1.0
    return 0.0 if same is None and str(np.prod(sizes[1])) in str(longer) else math.nan


def odd_sizes(s):
    """Of head_dim, width and kv_heads that divide badly, how many end neither in an answer nor in a UserError that
    names the size."""
    bad = 0
    for key, value in ((key, value) for key, values in ODD.items() for value in values):
        dims = dataclasses.replace(s.dims, **{key: value})
        try:
            shapes(encodings.build(s.config, dims, "float64")(parent=None), s.context(dims=dims))
        except UserError as error:
            bad += f"{key} = {value}" not in str(error)
        except Exception:
            bad += 1
    return float(bad)


def bfloat16(s):
    """How far the journey from site 2 to 7, or what is added before the blocks, is in bfloat16 from that in float32, in
    units of what is to be expected.

    Contents are rounded by 2⁻⁹, positions and angles are float32, 2⁻²⁴: so the answer should be that of other inputs,
    contents off by 2⁻⁸ and positions by 2⁻²³ of themselves, and what that changes in float32 is the unit, times 4. At
    positions up to 60,000; 4,000 for frames that stretch, whose exponents grow with positions, and for images."""
    rng = np.random.default_rng(2)
    weights = jax.tree.map(lambda t: 0.1 * np.float32(t), s.weights)
    contents = {n: np.asarray(getattr(s.ctx, n), jnp.bfloat16) for n in ("residual", "x", "q", "k")}

    def said(dtype, shift, off=False):
        given = {n: np.asarray(t, dtype) * np.asarray(1 + off * rng.choice([-(2**-8), 2**-8], t.shape), dtype)
                 for n, t in contents.items()}  # fmt: skip
        position = np.float32(np.asarray(s.ctx.position) + shift)
        position *= 1 + np.float32(off * rng.choice([0, 2**-23], position.shape))  # never below a whole number
        ctx = s.ctx.replace(**given, position=position)
        encoding = encodings.build(s.config, s.dims, dtype)(parent=None)
        x, journey = encoding.apply({"params": weights}, ctx.residual, ctx, method=opening)
        return between(journey, 2, 7, np.zeros(s.ctx.k.shape, np.float32)) | {"x": np.asarray(x, float)}

    shifts = [0, 4_000] + [60_000] * (s.kind == "text" and s.encoding.NORM_PRESERVING)
    found = []
    with jax.enable_x64(False):
        for shift in shifts[: 1 if s.encoding.BOUNDED_LENGTH and not s.encoding.RELATIVE else None]:
            want, got = said("float32", shift), said("bfloat16", shift)
            found.append(apart(want, got) / (4 * apart(want, said("float32", shift, off=True)) + 1e-6))
    return np.max(found)


@functools.partial(jax.jit, static_argnames=("causal", "block"))
def attended(q, k, v, edge, segment, causal, block):
    """An output of attention [1, L, G, R, D] and the gradients of one number of it; block 0 = xla."""
    at = attention.Sites(jnp.arange(q.shape[1]), segment)

    def run(q, k, v, edge):
        more = dict(causal=causal, scale=0.5, edge=edge, edge_key=None if edge is None else edge.key)
        out = (
            attention.chunked(q, k, v, at, at, block=block, **more) if block else attention.xla(q, k, v, at, at, **more)
        )
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), grads = jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)(q, k, v, edge)
    return out, [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]


def blocks(s):
    """Attention with the bias of this encoding in key blocks of 4 against the whole, in values and gradients. Frames
    and lifts are features of queries and keys there, which no block cuts."""
    rng, (_, L, G, D) = np.random.default_rng(3), s.ctx.k.shape
    q, k, v = (rng.normal(size=(1, L, G, *more, D)) for more in ((s.dims.heads // G,), (), ()))
    segment = jnp.asarray([[3] * 5 + [8] * (L - 5)])
    whole, cut = (attended(q, k, v, s.here.edge, segment, s.dims.causal, block) for block in (0, 4))
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True))
