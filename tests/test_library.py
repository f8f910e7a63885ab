"""The library inside models of other people: ten lines each, executed from the text that a user would paste."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import zoo
from jojax import encodings
from jojax.models.attention import journey_attention

LINEN = """\
class Attention(nn.Module):
    encoding: Callable  # encodings.build({"name": "rope", "transport": "qkv"}, dims)

    @nn.compact
    def __call__(self, x, position, segment):  # [B, L, C], [B, L, 1] float, [B, L] the document's number
        q, k, v = (nn.DenseGeneral((H, D), name=name)(x) for name in "qkv")
        restart = jnp.diff(segment, prepend=-1) != 0
        ctx = encodings.Context(position, restart, segment, x=x, residual=x, q=q, k=k)
        encoding = self.encoding(name="encoding")
        _, shared, carry = encoding.begin(x, ctx)
        c = journey_attention(q, k, v, encoding.journey(shared, carry, ctx), ctx, causal=True)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), name="out")(c)
"""
NNX = """\
class Attention(nnx.Module):
    def __init__(self, encoding, rngs):  # encodings.build({"name": "rope", "transport": "qkv"}, dims)
        self.qkv = nnx.LinearGeneral(C, (3, H, D), rngs=rngs)
        self.out = nnx.LinearGeneral((H, D), C, axis=(-2, -1), rngs=rngs)
        self.encoding = nnx.bridge.ToNNX(encoding(), rngs=rngs)  # its parameters: nnx.bridge.lazy_init(model, ...)

    def __call__(self, x, position, segment):  # [B, L, C], [B, L, 1] float, [B, L] the document's number
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        ctx = encodings.Context(position, jnp.diff(segment, prepend=-1) != 0, segment, x=x, residual=x, q=q, k=k)
        _, shared, carry = self.encoding.begin(x, ctx)
        return self.out(journey_attention(q, k, v, self.encoding.journey(shared, carry, ctx), ctx, causal=True))
"""
B, L, C, H, D = 2, 7, 20, 6, 4
DIMS = encodings.Dims(heads=H, kv_heads=H, head_dim=D, width=C, depth=1)
WITH_PARAMETERS = {"name": "joformer", "angle_source": "own_mlp", "angle_init": "normal"}
CASES = [{"name": "rope", "transport": "qkv"}, WITH_PARAMETERS, {"name": "grape_a"}, {"name": "grape_ap"}]
SEGMENT = np.array([[3] * 3 + [8] * 4, [1] * 7])
POSITION = np.array([[0, 1, 2, 0, 1, 2, 3], range(7)], float)[..., None]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def layer_of(text):
    names = dict(nn=nn, nnx=nnx, jnp=jnp, encodings=encodings, journey_attention=journey_attention)
    names |= dict(Callable=Callable, C=C, H=H, D=D)
    exec(text, names)
    return names["Attention"]


def linen(config):
    """f(parameters, x, position, segment), the parameters away from their start, and the tools for both."""
    model = layer_of(LINEN)(encodings.build(config, DIMS, "float64"))
    params = zoo.drawn(model, jnp.zeros((B, L, C)), jnp.asarray(POSITION), jnp.asarray(SEGMENT))
    return lambda params, *given: model.apply({"params": params}, *given), params, jax


def of_nnx(config):
    model = layer_of(NNX)(encodings.build(config, DIMS, "float64"), nnx.Rngs(0))
    nnx.bridge.lazy_init(model, jnp.zeros((B, L, C)), jnp.asarray(POSITION), jnp.asarray(SEGMENT))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda t: np.random.default_rng(t.size).normal(0, 0.3, t.shape), params))
    return lambda model, *given: model(*given), model, nnx


@pytest.mark.parametrize(
    ("make", "config"),
    zoo.some([*((linen, config) for config in CASES), (of_nnx, WITH_PARAMETERS)], 9),
    ids=lambda c: c["name"] if isinstance(c, dict) else c.__name__,
)
def test_ten_lines_are_causal_relative_and_keep_documents_apart(make, config, rng):
    apply, params, tools = make(config)
    run = tools.jit(apply)
    x, position = rng.normal(size=(B, L, C)), jnp.asarray(POSITION)
    out = np.asarray(run(params, x, position, SEGMENT))
    assert out.shape == (B, L, C)
    np.testing.assert_allclose(run(params, x, position + 5, SEGMENT), out, atol=1e-10)
    changed = x.copy()
    changed[:, 2] += 1
    moved = np.abs(np.asarray(run(params, changed, position, SEGMENT)) - out).max(-1) > 1e-6
    want = np.zeros((B, L), bool)
    want[0, 2], want[1, 2:] = True, True  # the document that begins at 3 in row 0 does not see it
    np.testing.assert_array_equal(moved, want)
    permuted = np.asarray(run(params, x[:, ::-1], position, SEGMENT))
    assert np.abs(permuted[1, ::-1] - out[1]).max() > 1e-3  # order matters
    grads = tools.jit(tools.grad(lambda *given: (apply(*given) ** 2).sum()))(params, x, position, SEGMENT)
    sizes = [float(np.abs(g).max()) for g in jax.tree.leaves(grads)]
    assert np.isfinite(sizes).all()
    alive = sum(size > 1e-9 for size in sizes)
    assert alive >= len(sizes) - 1  # where keys stay in place, their bias adds the same to all logits of a row


@pytest.mark.parametrize("text", [LINEN, NNX])
def test_the_texts_stay_short_and_one_is_the_readmes(text):
    assert text == NNX or text in (Path(__file__).resolve().parent.parent / "README.md").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 11


def test_one_layer_is_the_models_own_attention(rng):
    """journey_attention is what a block does: against the plain formula with dense frames, values travelling."""
    q, k, v = (rng.normal(size=(1, L, H, D)) for _ in range(3))
    encoding = encodings.build({"name": "rope", "transport": "qkv"}, DIMS, "float64")(parent=None)
    ctx = encodings.Context(jnp.asarray(POSITION[1:]), restart=None, segment=None)
    journey = encoding.apply({}, None, None, ctx, method="journey")
    got = journey_attention(q, k, v, journey, ctx, causal=False)
    omega, turned = 1e4 ** (-2 * np.arange(D // 2) / D), []
    for angles in np.arange(L)[:, None] * omega:
        rotation = np.zeros((D, D))
        for b, a in enumerate(angles):
            rotation[np.ix_([b, b + D // 2], [b, b + D // 2])] = [[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]
        turned.append(rotation)
    for t, h in np.ndindex(L, H):
        journeys = [turned[t].T @ turned[j] for j in range(L)]
        s = np.array([q[0, t, h] @ p @ k[0, j, h] / D**0.5 for j, p in enumerate(journeys)])
        w = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        np.testing.assert_allclose(got[0, t, h], sum(w[j] * p @ v[0, j, h] for j, p in enumerate(journeys)), atol=1e-12)
