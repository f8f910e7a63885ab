"""Models whose rows, parameters, heads and sites are split over devices, against the same models on one, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax import shard
from jojax.encodings.base import Edge
from jojax.errors import UserError
from jojax.models import attention
from jojax.models.attention import Sites

B, L = 4, 24
DIMS = dict(heads=4, kv_heads=2, head_dim=4, width=20, depth=2, vocab=18)
ALL = dict(fsdp=2, tensor=2, sequence=2)


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    monkeypatch.setattr(shard, "SMALLEST_SPLIT", 8)
    with jax.enable_x64(True):
        yield


def mesh_of(sizes):
    return shard.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


@functools.cache
def texts():
    """Rows of documents: one ends where the second shard begins, others lie across."""
    rng = np.random.default_rng(3)
    lengths = ((7, 10, 7), (12, 12), (24,), (1, 18, 5))
    segment = np.array([np.repeat(np.arange(len(row)), row) for row in lengths], np.int32)
    position = np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths], np.int32)
    tokens, targets = rng.integers(0, DIMS["vocab"], (2, B, L), np.int32)
    weight = rng.random((B, L)).round(2)
    return dict(tokens=tokens, targets=targets, segment=segment, position=position, weight=weight)


def text_loss(model, params, batch):
    given = {key: batch[key] for key in ("position", "segment", "targets")}
    nll = model.apply({"params": params}, batch["tokens"], **given, rngs={"encoding": jax.random.key(0)})
    return (nll * batch["weight"]).sum(), nll


def image_loss(model, params, batch):
    logits = model.apply({"params": params}, batch["image"])
    return (logits**2).sum(), logits


def on(sizes, loss, model, params, batch):
    """Values and gradients on a mesh of these sizes."""
    mesh = mesh_of(sizes)
    params = jax.device_put(params, shard.shardings(params, mesh))
    batch = shard.to_global(batch, mesh)
    run = jax.value_and_grad(functools.partial(loss, model), has_aux=True)
    return jax.device_get(jax.jit(shard.within(mesh, run))(params, batch))


def same_on(sizes, loss, model, batch, *inputs):
    params = zoo.drawn(model, *inputs)
    (_, want), want_grads = on(dict(data=1), loss, model, params, batch)
    (_, got), grads = on(sizes, loss, model, params, batch)
    np.testing.assert_allclose(got, want, atol=1e-10)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(want_grads))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-11 * scale), grads, want_grads)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("jo_projected+fox", dict(attention="chunked", kv_shift=True)),
        slow("fire", dict(attention="chunked")),
        slow("alibi", dict(attention="xla", qk_norm="after", norm="rmsnorm", mlp="swiglu")),
        slow("jo_blocks", dict(attention="xla")),
        slow("none", dict(mixer="recurrence", attention="auto")),
    ],
)
def test_texts(name, spec):
    dims = DIMS | (dict(kv_heads=4) if "mixer" in spec else {})
    model = zoo.lm(name, dims=tuple(dims.items()), model=(("loss_chunk", 5),), **spec)
    same_on(ALL, text_loss, model, texts(), jnp.zeros((1, 2), jnp.int32))


@pytest.mark.parametrize("name", ["rel_bias_2d", slow("comrope_ld")])
def test_images(name):
    dims = dict(heads=4, kv_heads=2, head_dim=8, width=20, depth=2)
    model = zoo.vit(name, dims=tuple(dims.items()))
    image = np.random.default_rng(1).normal(size=(B, 8, 15, 3))
    same_on(dict(data=2, fsdp=2, tensor=2), image_loss, model, {"image": image}, image[:1])


def test_a_step_that_counts_its_own_heads_is_refused():
    class Step:
        def __call__(self, state, query, key, visible, weights):
            return jnp.zeros((1, 4, query.shape[1], key.shape[1])), state

    def run(q, k):
        at, edge = Sites(jnp.arange(L), None), Edge(jnp.zeros((1, L, 1, 1)), jnp.zeros((1, L, 1, 1)), Step())
        return attention.attend(q, k, k, at, at, causal=True, scale=1.0, edge=edge, edge_key=edge.key)

    q, k = jnp.zeros((B, L, 2, 2, 4)), jnp.zeros((B, L, 2, 4))
    assert jax.eval_shape(run, q, k).shape == q.shape
    with pytest.raises(UserError, match=r"answers for 4 heads where a device has 2: .* mesh\.tensor=1"):
        jax.eval_shape(shard.within(mesh_of(dict(tensor=2)), run), q, k)
