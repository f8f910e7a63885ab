"""Meshes, the sharding table, batches."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jojax import shard
from jojax.errors import UserError


def mesh(n=8, **sizes):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | sizes
    return shard.make_mesh(ConfigDict(sizes), jax.devices()[:n])


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (dict(data=-1), (8, 1, 1, 1)),
        (dict(data=-1, fsdp=4), (2, 4, 1, 1)),
        (dict(data=2, fsdp=-1), (2, 4, 1, 1)),
        (dict(data=8), (8, 1, 1, 1)),
        (dict(data=1, fsdp=8), (1, 8, 1, 1)),
    ],
)
def test_mesh_sizes(sizes, shape):
    made = mesh(**sizes)
    assert tuple(made.shape[axis] for axis in shard.AXES) == shape
    assert made.size == 8


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(data=3), "mesh.data=3"),
        (dict(data=-1, fsdp=3), "multiply to 8"),
        (dict(data=-1, fsdp=16), "multiply to 8"),
        (dict(data=-1, fsdp=-1), "mesh.data and mesh.fsdp"),
        (dict(data=0), "mesh.data=0 must be a positive size"),
        (dict(data=4, tensor=2), "mesh.tensor=2 is not supported"),
        (dict(data=4, sequence=-1), "mesh.sequence=-1 is not supported"),
        (dict(data=8, model=1), "mesh.model is not a mesh axis"),
    ],
)
def test_mesh_errors(sizes, words):
    with pytest.raises(UserError, match=words):
        mesh(**sizes)


def test_parameters_split_along_their_largest_divisible_axis():
    big = 2**14
    assert shard.parameter_spec("params/a", (64, 256), 4) == P(None, "fsdp")
    assert shard.parameter_spec("params/a", (256, 64), 4) == P("fsdp")
    assert shard.parameter_spec("params/a", (254, 64, 2), 4) == P(None, "fsdp")  # 4 does not divide 254
    assert shard.parameter_spec("params/a", (255, 65, 3), 4) == P()
    assert shard.parameter_spec("params/a", (big - 4,), 4) == P()  # too small to be worth a gather
    assert shard.parameter_spec("params/a", (big,), 4) == P("fsdp")
    assert shard.parameter_spec("params/a", (big,), 1) == P()


def test_stacked_layers_are_never_split_over_layers():
    shape = (512, 4, 64)
    for path in ("blocks/mlp/kernel", "params/blocks/mlp/kernel", "opt_state/1/mu/blocks/mlp/kernel"):
        assert shard.parameter_spec(path, shape, 4) == P(None, None, "fsdp")
    # the rule is about a path component of that name, not about a part of it
    assert shard.parameter_spec("params/superblocks/kernel", shape, 4) == P("fsdp")
    assert shard.parameter_spec("params/blocks_of/kernel", shape, 4) == P("fsdp")


def test_shardings_of_a_tree_leave_one_device_its_share():
    made = mesh(data=2, fsdp=4)
    tree = {"blocks": {"kernel": np.zeros((3, 64, 256), np.float32)}, "bias": np.zeros(7, np.float32)}
    placed = jax.device_put(tree, shard.shardings(tree, made))
    assert placed["blocks"]["kernel"].addressable_shards[0].data.shape == (3, 64, 64)
    assert placed["bias"].addressable_shards[0].data.shape == (7,)


def test_batch_is_divisible_or_says_what_is():
    made = mesh(data=4, fsdp=2)
    shard.check_batch(16, made)
    shard.check_batch(48, made, accumulate=3)
    with pytest.raises(UserError, match=r"batch_size=12 must be divisible .* 4 · 2 · 1 = 8; try batch_size=16"):
        shard.check_batch(12, made)
    with pytest.raises(UserError, match=r"batch_size=16 .* 4 · 2 · 3 = 24; try batch_size=24"):
        shard.check_batch(16, made, accumulate=3)
    with pytest.raises(UserError, match="batch_size=0"):
        shard.check_batch(0, made)


@pytest.mark.parametrize("sizes", [dict(data=8), dict(data=2, fsdp=4), dict(fsdp=8)])
def test_to_global_keeps_the_rows_and_splits_axis_0(sizes):
    made = mesh(**sizes)
    batch = {"x": np.arange(16 * 3).reshape(16, 3), "y": np.arange(16)}
    whole = shard.to_global(batch, made)
    np.testing.assert_array_equal(whole["x"], batch["x"])
    np.testing.assert_array_equal(whole["y"], batch["y"])
    assert {piece.data.shape for piece in whole["x"].addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(shard.local_rows(16, made), np.arange(16))


def test_any_process():
    assert shard.any_process(True) is True
    assert shard.any_process(False) is False
