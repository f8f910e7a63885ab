"""The start of a run: sharded from the first byte, the same bits on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from ml_collections import ConfigDict

from jojax import optim, shard, state

MESHES = {
    "one": (1, dict(data=1)),
    "two": (2, dict(data=2)),
    "data": (8, dict(data=8)),
    "fsdp": (8, dict(data=1, fsdp=8)),
    "mixed": (8, dict(data=2, fsdp=4)),
}


class Model(nn.Module):
    """Large enough that fsdp splits it; a uniform and a normal initialiser."""

    @nn.compact
    def __call__(self, x_BC):
        x_BC = nn.Dense(256, name="up", kernel_init=nn.initializers.xavier_uniform())(x_BC)
        x_BC = nn.LayerNorm(name="norm")(x_BC)
        return nn.Dense(160, name="head", kernel_init=nn.initializers.truncated_normal(0.02))(x_BC)


def init_fn(key):
    return Model().init(key, jnp.zeros((1, 96)))["params"]


@functools.cache
def make(name, seed=3):
    devices, sizes = MESHES[name]
    mesh = shard.make_mesh(ConfigDict(sizes), jax.devices()[:devices])
    params = jax.eval_shape(init_fn, jax.random.key(0))
    tx = optim.make(ConfigDict(dict(lr=1e-3)), 10, params)
    return state.init_state(state.start(init_fn, tx, ema=True, aux=("correct",)), mesh, seed), mesh


@pytest.mark.parametrize("name", [name for name in MESHES if name != "one"])
def test_initial_state_is_the_same_bits_on_every_mesh(name):
    first, other = make("one")[0], make(name)[0]
    jax.tree.map(np.testing.assert_array_equal, first, other)


def test_two_seeds_differ():
    a, b = make("one", seed=3)[0], make("one", seed=4)[0]
    assert not np.array_equal(a.params["up"]["kernel"], b.params["up"]["kernel"])


def test_parameters_moments_and_average_are_split():
    made, mesh = make("fsdp")
    adam = made.opt_state[1]
    for tree in (made.params, adam.mu, adam.nu, made.ema):
        kernel = tree["up"]["kernel"]
        assert kernel.shape == (96, 256)
        assert {piece.data.shape for piece in kernel.addressable_shards} == {(96, 32)}
        assert {piece.data.shape for piece in tree["norm"]["scale"].addressable_shards} == {(256,)}
    assert made.step.sharding.is_fully_replicated
    assert mesh.shape["fsdp"] == 8


def test_init_compiles_to_its_shards_only():
    """No device of the fsdp mesh ever holds a whole parameter's worth of output."""
    devices, sizes = MESHES["fsdp"]
    mesh = shard.make_mesh(ConfigDict(sizes), jax.devices()[:devices])

    def big(key):
        return {"w": jax.random.normal(key, (1024, 512))}

    tx = optim.make(ConfigDict(dict(lr=1e-3)), 10, jax.eval_shape(big, jax.random.key(0)))
    start = state.start(big, tx)
    like = state.abstract_state(start, mesh)
    where = jax.tree.map(lambda leaf: leaf.sharding, like)
    compiled = jax.jit(start, out_shardings=where).lower(jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    whole = 1024 * 512 * 4
    assert memory.output_size_in_bytes < 3 * whole / 8 + 4096  # parameters and two moments, an eighth each
    assert memory.temp_size_in_bytes < whole


def test_fresh_state_fields():
    made = make("one")[0]
    assert made.step == 0 and made.step.dtype == jnp.int32
    assert made.bad_step == -1 and made.bad_step.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, made.ema, made.params)
    assert set(made.sums) == {"loss", "count", "grad_norm", "steps", "lr", "correct"}
    assert all(value == 0 and value.dtype == jnp.float32 for value in made.sums.values())


def test_abstract_state_is_the_states_shape():
    made, mesh = make("mixed")
    params = jax.eval_shape(init_fn, jax.random.key(0))
    tx = optim.make(ConfigDict(dict(lr=1e-3)), 10, params)
    like = state.abstract_state(state.start(init_fn, tx, ema=True, aux=("correct",)), mesh)
    assert jax.tree.structure(like) == jax.tree.structure(made)

    def same(a, b):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)

    jax.tree.map(same, like, made)
