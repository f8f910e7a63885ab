"""What encodings claim of themselves, for every preset, on the encoding alone: what is claimed holds, what is not
claimed fails. The claim RELATIVE is in test_contract.py and test_vit.py, STREAMS in test_contract.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_contract
import zoo
from configs.encodings import PRESETS, preset
from jojax import encodings
from jojax.errors import UserError

VISION_ONLY = sorted(set(zoo.VISION) - set(zoo.TEXT))
L, WIDTH = 10, 20  # sites; the vision grid is 2 × 5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def dims_of(name, **changes):
    return zoo.vit_dims(**({"grid": (2, 5)} | changes)) if name in VISION_ONLY else zoo.lm_dims(**changes)


def encoding_of(name, **changes):
    return encodings.build(preset(name), dims_of(name, **changes), "float64")(parent=None)


def context(name, seed=0):
    """A context of random content: sites of one document, at the places of text or of a grid."""
    rng = np.random.default_rng(seed)
    dims = dims_of(name)
    position = np.indices((2, 5)).reshape(2, -1).T if dims.axes == 2 else np.arange(L)[:, None]
    return encodings.Context(
        position=position[None].astype(float),
        restart=np.arange(L)[None] == 0,
        segment=np.zeros((1, L), np.int32),
        tokens=rng.integers(0, zoo.V, (1, L)) if dims.vocab else None,
        residual=rng.normal(size=(1, L, WIDTH)),
        x=rng.normal(size=(1, L, WIDTH)),
        q=rng.normal(size=(1, L, dims.heads, dims.head_dim)),
        k=rng.normal(size=(1, L, dims.kv_heads, dims.head_dim)),
    )


def first_block(encoding, x, ctx):
    _, shared, carry = encoding.begin(x, ctx)
    return encoding.journey(shared, carry, ctx)


def journey_of(encoding, params, ctx):
    return encoding.apply({"params": params}, ctx.residual, ctx, method=first_block)


def params_of(encoding, ctx):
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), ctx.residual, ctx, method=first_block))
    return zoo.noisy(jax.tree.map(lambda t: np.zeros(t.shape), like.get("params", {})), 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_norm_preserving(name):
    """Frames of queries, keys and values keep the length of every vector, there and back."""
    ctx, encoding = context(name), encoding_of(name)
    journey = journey_of(encoding, params_of(encoding, ctx), ctx)
    given, kept = np.random.default_rng(1).normal(size=ctx.k.shape), []
    for frame in (journey.frame, journey.value_frame):
        if frame is not None:
            sizes = [np.linalg.norm(f(given), axis=-1) for f in (frame.apply, frame.invert, frame.dual)]
            kept.append(np.abs(np.array(sizes) / np.linalg.norm(given, axis=-1) - 1).max())
            assert np.abs(frame.apply(given) - given).max() > 1e-3  # they do turn
    preserved = max(kept, default=0) < 1e-12
    assert preserved == encoding.NORM_PRESERVING, kept


def dense(frame, like):
    """A [L, G, D, D] of row 0, column by column."""
    units = np.eye(like.shape[-1])
    return np.stack([np.asarray(frame.apply(np.broadcast_to(e, like.shape)))[0] for e in units], -1)


def between(journey, j, k, like):
    """All that the journey says of the way from site j to k, at row 0; like: keys [1, L, G, D]."""
    said = {}
    for which in ("frame", "value_frame"):
        if getattr(journey, which) is not None:
            a = dense(getattr(journey, which), like)
            said[which] = np.linalg.solve(a[k], a[j])
    if journey.lift is not None:
        query, key = journey.lift
        key = jnp.repeat(key, query.shape[2] // key.shape[2], 2)
        said["lift"] = (query[0, k] * (key[0, j] - key[0, k])).sum(-1)  # up to what the query alone adds
    if journey.edge is not None:
        state = jnp.zeros((1, journey.edge.query.shape[2], L))
        order = np.tri(L, dtype=bool)[None]
        edge = journey.edge
        said["edge"] = edge.step(state, edge.query, edge.key, order, edge.weights)[0][0, :, k, j]
    return said


def two_sided(encoding, params, ctx):
    """Does it say the same in both directions, whatever the order in which sites come?"""
    journey = journey_of(encoding, params, ctx)
    if journey.lift is not None:
        query, key = journey.lift
        bias = jnp.einsum("khr,jhr->hkj", query[0], jnp.repeat(key[0], query.shape[2] // key.shape[2], 1))
        bias = bias - jnp.diagonal(bias, 0, 1, 2)[..., None]  # what the query alone adds does nothing
        if np.abs(bias - bias.swapaxes(1, 2)).max() > 1e-9:
            return False
    if journey.frame is not None:
        a = dense(journey.frame, ctx.k)
        if np.abs(a @ a.swapaxes(-1, -2) - np.eye(a.shape[-1])).max() > 1e-9:
            return False  # what shrinks one way grows the other
    order = np.arange(L)
    order[[4, 8]] = order[[8, 4]]  # a site between 2 and 7 for one that is not, with all that it has
    names = ("residual", "x", "q", "k", "tokens", "position")
    swapped = {n: None if getattr(ctx, n) is None else getattr(ctx, n)[:, order] for n in names}
    now, then = (between(journey_of(encoding, params, c), 2, 7, c.k) for c in (ctx, ctx.replace(**swapped)))
    return all(np.abs(now[n] - then[n]).max() < 1e-9 for n in now)


@pytest.mark.parametrize("name", PRESETS)
def test_causal_only(name):
    """Where sites have no order, what needs one is refused, and nothing else is."""
    ctx, encoding = context(name), encoding_of(name)
    assert two_sided(encoding, params_of(encoding, ctx), ctx) != encoding.CAUSAL_ONLY
    if encoding.CAUSAL_ONLY:
        with pytest.raises(UserError, match="needs an order: use it in a causal model"):
            encoding_of(name, causal=False)
    else:
        encoding_of(name, causal=False)


@pytest.mark.parametrize("name", PRESETS)
def test_flat(name):
    """The journey from site 2 to 7 does not change with what stands at 3 to 6: tokens, content, coordinates."""
    ctx, other, encoding = context(name), context(name, seed=1), encoding_of(name)
    ctx = ctx.replace(tokens=None if ctx.tokens is None else np.arange(L)[None])
    inside = (np.arange(L) > 2) & (np.arange(L) < 7)

    def mixed(a, b):
        return np.where(inside.reshape(1, L, *[1] * (a.ndim - 2)), b, a)

    changed = {n: mixed(getattr(ctx, n), getattr(other, n)) for n in ("residual", "x", "q", "k")}
    if ctx.tokens is not None:
        changed["tokens"] = mixed(ctx.tokens, ctx.tokens + 5)
    changed["position"] = mixed(ctx.position, ctx.position[:, ::-1] + (30 if ctx.position.shape[-1] == 1 else 0))
    params = params_of(encoding, ctx)
    before, after = (between(journey_of(encoding, params, c), 2, 7, c.k) for c in (ctx, ctx.replace(**changed)))
    moved = max((np.abs(before[n] - after[n]).max() for n in before), default=0)
    assert (moved < 1e-9) == encoding.FLAT, moved
    moves = between(journey_of(encoding, params, ctx), 3, 7, ctx.k)  # another start is another journey
    assert all(np.abs(moves[n] - before[n]).max() > 1e-6 for n in before)


@pytest.mark.parametrize("name", PRESETS)
def test_bounded_length(name):
    """More sites than trained with are refused: exactly where there is a table."""
    shorter = {"grid": (2, 4)} if name in VISION_ONLY else {"length": L - 1}
    same = {} if name in VISION_ONLY else {"length": L}
    ctx = context(name)
    for changes, longer in ((same, False), (shorter, True)):
        encoding = encoding_of(name, **changes)

        def trace(encoding=encoding):
            jax.eval_shape(lambda: encoding.init(jax.random.key(0), ctx.residual, ctx, method=first_block))

        if longer and encoding.BOUNDED_LENGTH:
            sites = 8 if name in VISION_ONLY else L - 1
            with pytest.raises(UserError, match=f"end at {sites}, the input has {L}"):
                trace()
        else:
            trace()


def test_models_refuse_what_a_bounded_encoding_has_no_answer_for():
    """A cache beyond the table, for positions to come; a grid that is smaller, or as large in another shape."""
    toks = jnp.zeros((1, 3), int)
    for name, refused in (("learned", True), ("sinusoidal", False)):
        model = zoo.lm(name, dims=(("length", 8),))
        params = zoo.drawn(model, toks)
        jax.eval_shape(lambda p, m=model: m.apply({"params": p}, toks, capacity=8), params)
        if refused:
            with pytest.raises(UserError, match="ends at 8 positions; a cache of 9 is beyond it"):
                model.apply({"params": params}, toks, capacity=9)
        else:
            jax.eval_shape(lambda p, m=model: m.apply({"params": p}, toks, capacity=9), params)
    model, key = zoo.vit("learned"), jax.random.key(0)
    for shape in ((1, 6, 15, 3), (1, 10, 12, 3)):
        with pytest.raises(UserError, match=r"a table of \(4, 5\) patches, the image has"):
            jax.eval_shape(lambda s=shape: model.init(key, jnp.zeros(s)))


def test_streams_is_tested_for_all_that_claim_it():
    """By test_contract.py, under one transport: that decides nothing about what is handed on."""
    (mark,) = test_contract.test_any_chunking_equals_the_whole.pytestmark
    covered = [{**preset(n), "transport": None} for n in mark.args[1]]
    for name in set(PRESETS) - set(VISION_ONLY):
        assert encoding_of(name).STREAMS  # all do; one that does not would have to be shown to fail
        assert {**preset(name), "transport": None} in covered, name
