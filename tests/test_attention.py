"""The attention implementations against each other and against plain loops; masks, lifts, edges, cached slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from configs.encodings import preset
from jojax import laws
from jojax.encodings.base import Edge
from jojax.encodings.grape_ap import LogSigmoidStep
from jojax.errors import UserError
from jojax.models import attention
from jojax.models.attention import Sites

B, LQ, LK, G, R, D, E = 2, 7, 11, 3, 2, 4, 5
ALPHA = 2.0 ** -np.arange(6)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def inputs(rng, queries=LQ):
    shapes = ((B, queries, G, R, D), (B, LK, G, D), (B, LK, G, E), (B, queries, G * R, 8), (B, LK, G, 8))
    return [jnp.asarray(rng.normal(size=s)) for s in shapes]


def sites(rng, queries=LQ):
    """Queries are the last sites; a row of documents; one query that sees no key."""
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (B, LK)), 1))
    own = segment[:, LK - queries :].at[0, 0].set(77)
    return Sites(jnp.arange(LK - queries, LK), own), Sites(jnp.arange(LK), segment)


def weighted(function, block, causal, edge, query, key, window=0):
    """A scalar of the output, so that gradients can be compared too."""

    def run(q, k, v, eq, ek):
        e = Edge(eq, ek, LogSigmoidStep(), jnp.asarray(ALPHA)) if edge else None
        more = {"window": window} | ({} if function is attention.xla else {"block": block})
        out = function(q, k, v, query, key, causal=causal, scale=0.5, edge=e, edge_key=ek, **more)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3, 4), has_aux=True))


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize(
    ("causal", "window", "blocks"), [(True, 0, (3, 4, 64)), (False, 0, (3, 4, 64)), (True, 4, (3,)), (False, 3, (2,))]
)
def test_chunked_equals_xla_in_values_and_gradients(rng, causal, window, blocks, edge):
    args, (query, key) = inputs(rng), sites(rng)
    (_, want), grads = weighted(attention.xla, 0, causal, edge, query, key, window)(*args)
    assert (want[0, 0] == 0).all()  # the query without keys
    assert all(np.isfinite(g).all() for g in grads)
    for block in blocks:
        (_, got), other = weighted(attention.chunked, block, causal, edge, query, key, window)(*args)
        np.testing.assert_allclose(got, want, atol=1e-12)
        for a, b in zip(other, grads, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 3), (False, 3), (False, 0)])
def test_xla_equals_loops(rng, causal, window):
    (q, k, v, *_), (query, key) = inputs(rng), sites(rng)
    got = attention.attend(q, k, v, query, key, causal=causal, scale=0.5, window=window, implementation="xla")
    want = np.zeros(got.shape)
    for b, t, g, r in np.ndindex(B, LQ, G, R):
        at = t + LK - LQ
        first, last = (at - window + 1, at + window - 1) if window else (0, LK)
        near = [j for j in range(LK) if first <= j <= (at if causal else last)]
        seen = [j for j in near if key.segment[b, j] == query.segment[b, t]]
        if seen:
            w = np.exp([0.5 * float(q[b, t, g, r] @ k[b, j, g]) for j in seen])
            want[b, t, g, r] = (w / w.sum()) @ np.asarray(v)[b, seen, g]
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(("causal", "hidden", "own"), [(True, slice(4), slice(8, LK)), (False, slice(8, LK), slice(4))])
def test_chunked_does_not_touch_blocks_outside_of_the_window(rng, causal, hidden, own):
    """Values there are no numbers, which any product with them would show."""
    q, k, v, *_ = inputs(rng, LK)
    at, v = Sites(jnp.arange(LK), None), v.at[:, hidden].set(jnp.nan)

    @functools.partial(jax.jit, static_argnums=1)
    def run(q, window):
        def number(q):
            out = attention.chunked(q, k, v, at, at, causal=causal, scale=0.5, window=window, block=4)[:, own]
            return out.sum(), out

        (_, out), grad = jax.value_and_grad(number, has_aux=True)(q)
        return out, grad[:, own]

    assert all(np.isfinite(t).all() for t in run(q, 4))
    assert not any(np.isfinite(t).any() for t in run(q, 9))  # that reaches the block


def test_a_lift_is_a_bias(rng):
    q, k, *_ = inputs(rng, LK)
    lift = jnp.asarray(rng.normal(size=(B, LK, G * R, 3))), jnp.asarray(rng.normal(size=(B, LK, G, 3)))
    s = attention.logits(*attention.with_lift(q, k, lift, D**-0.5), 1)
    bias = np.einsum("bqgrf,bkgf->bgrqk", lift[0].reshape(B, LK, G, R, 3), lift[1])
    np.testing.assert_allclose(s, attention.logits(q, k, D**-0.5) + bias, atol=1e-12)


def test_a_lift_keeps_its_precision_in_bfloat16():
    """ALiBi at position 60,000: one bfloat16 feature would be off by 100, the split one by less than 0.01."""
    at = jnp.asarray([60_000.0, 59_997.0, 4_001.0], jnp.float32)
    q, k = jnp.zeros((1, 3, 1, 1, 8), jnp.bfloat16), jnp.zeros((1, 3, 1, 8), jnp.bfloat16)
    slope = jnp.full((1, 3, 1, 1), 0.25, jnp.float32)
    lift = slope, at.reshape(1, 3, 1, 1)
    s = attention.logits(*attention.with_lift(q, k, lift, 8**-0.5), 1)[0, 0, 0]
    np.testing.assert_allclose(s[0], 0.25 * at, atol=1e-2)
    one = (slope * 8**0.5).astype(jnp.bfloat16).astype("float32")[0, 0, 0, 0] * at.astype(jnp.bfloat16) * 8**-0.5
    assert np.abs(np.asarray(one) - 0.25 * np.asarray(at)).max() > 1  # why it is split


def test_auto_takes_the_linear_memory_path_for_long_keys(rng, monkeypatch):
    (q, k, v, *_), (query, key) = inputs(rng), sites(rng)
    called = []
    monkeypatch.setattr(attention, "chunked", lambda *a, **k: called.append(1))
    monkeypatch.setattr(attention, "CHUNKED_FROM", LK)
    attention.attend(q, k, v, query, key, causal=True, scale=1.0)
    monkeypatch.setattr(attention, "CHUNKED_FROM", LK + 1)
    attention.attend(q, k, v, query, key, causal=True, scale=1.0)
    assert called == [1]


def test_unknown_implementation_lists_the_valid_ones(rng):
    (q, k, v, *_), (query, key) = inputs(rng), sites(rng)
    with pytest.raises(Exception, match="attention = 'flash': choose from auto, xla, chunked, cudnn, splash"):
        attention.attend(q, k, v, query, key, causal=True, scale=1.0, implementation="flash")


def test_chunked_memory_is_linear():
    """Temporaries, forwards and backwards: four times the length takes about four times as much, not sixteen."""

    def temporaries(function, L):
        q, k = jax.ShapeDtypeStruct((1, L, 1, 1, 16), jnp.float32), jax.ShapeDtypeStruct((1, L, 1, 16), jnp.float32)
        at = Sites(jnp.arange(L), None)
        loss = lambda q, k, v: function(q, k, v, at, at, causal=True, scale=0.25).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = (temporaries(attention.chunked, L) for L in (2048, 8192))
    assert long < 6 * short, (short, long)
    assert temporaries(attention.xla, 8192) > 12 * temporaries(attention.xla, 2048)


@pytest.mark.parametrize("name", zoo.some(["alibi", "grape_ap_strict"]))
def test_chunked_memory_is_linear_in_scanned_layers(name):
    """Masks and biases that all layers share are not made at once for all blocks; `xla` makes them."""

    def temporaries(implementation, L):
        dims = dict(length=L, heads=2, kv_heads=2, width=8, vocab=5)
        model, tokens = zoo.lm(name, "float32", tuple(dims.items()), attention=implementation), jnp.zeros((1, L), int)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        loss = jax.jit(jax.grad(lambda params: model.apply(params, tokens).sum()))
        return loss.lower(params).compile().memory_analysis().temp_size_in_bytes

    short, long = (temporaries("chunked", L) for L in (1024, 4096))
    assert long < 4 * short, (short, long)
    assert temporaries("xla", 2048) > 3 * temporaries("xla", 1024)


@functools.cache
def windowed(name):
    return laws.models.Subject(preset(name), "text", window=4)


def test_windows_site_by_site_in_chunked_attention_equal_the_whole():
    """A bias along the path; beside a window that sees all."""
    s = windowed("grape_ap_strict")
    assert laws.models.site_by_site(s, "chunked") < 1e-10
    assert laws.models.far(s.whole, zoo.subject("grape_ap_strict", "text").whole) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("law", ["chunks", "packed", "causal"])
@pytest.mark.parametrize("name", ["grape_ap_strict", "fox"])
def test_laws_of_windows(name, law):
    assert getattr(laws.models, law)(windowed(name)) < 1e-10


def test_a_window_from_a_class_token_is_refused():
    model = zoo.vit_of({"name": "none"}, window=2)
    with pytest.raises(UserError, match=r"model\.window = 2: the class token, .* set model\.pool = 'mean'"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 15, 3)))
