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
        (dict(data=-1, tensor=2, sequence=2), (2, 1, 2, 2)),
        (dict(data=2, sequence=-1), (2, 1, 1, 4)),
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
        (dict(data=4, tensor=3), "mesh.tensor=3 .* multiply to 8"),
        (dict(data=-1, sequence=-1), "mesh.data and mesh.sequence"),
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


def test_tensor_splits_heads_units_and_vocabulary_and_fsdp_another_axis():
    for path, shape, want in (
        ("blocks/query/kernel", (3, 64, 8, 16), P(None, "fsdp", "tensor")),
        ("opt_state/1/mu/blocks/query/kernel", (3, 64, 8, 16), P(None, "fsdp", "tensor")),
        ("params/blocks/query/bias", (3, 8, 16), P(None, "tensor")),
        ("params/blocks/key/kernel", (3, 64, 4, 32), P(None, "fsdp", "tensor")),
        ("ema/blocks/value/kernel", (3, 64, 4, 128), P(None, None, "tensor", "fsdp")),
        ("params/blocks/out/kernel", (3, 8, 16, 64), P(None, "tensor", None, "fsdp")),
        ("params/blocks/out/bias", (3, 64), P()),
        ("params/blocks/mlp_in/kernel", (3, 64, 256), P(None, "fsdp", "tensor")),
        ("params/blocks/mlp_gate/bias", (3, 256), P(None, "tensor")),
        ("params/blocks/mlp_out/kernel", (3, 256, 64), P(None, "tensor", "fsdp")),
        ("params/blocks/recurrence/decay/kernel", (3, 64, 8, 16), P(None, "fsdp", "tensor")),
        ("params/blocks/recurrence/out/kernel", (3, 8, 16, 64), P(None, "tensor", None, "fsdp")),
        ("params/blocks/norm_mlp/scale", (3, 64), P()),
        ("params/blocks/encoding/mlp_in", (3, 64, 256), P(None, None, "fsdp")),  # an encoding's own are whole
        ("params/encoding/embed/embedding", (300, 64), P("fsdp")),
        ("params/embed/embedding", (300, 64), P("tensor", "fsdp")),
        ("params/embed/embedding", (301, 64), P(None, "fsdp")),  # nothing but data.vocab would mend it
        ("params/head/kernel", (64, 300), P("fsdp", "tensor")),
        ("params/head/bias", (300,), P("tensor")),
    ):
        assert shard.parameter_spec(path, shape, 4, 2) == want, path


@pytest.mark.parametrize(
    ("path", "shape", "words"),
    [
        ("blocks/query/bias", (2, 4, 8), r"mesh\.tensor=3 must divide model\.heads = 4: change mesh\.tensor, or model"),
        ("blocks/key/kernel", (2, 9, 2, 8), r"mesh\.tensor=3 must divide model\.kv_heads = 2"),
        ("blocks/mlp_out/kernel", (2, 64, 9), r"mesh\.tensor=3 must divide the MLP's width \(model\.mlp_ratio .* = 64"),
    ],
)
def test_tensor_that_does_not_divide_is_refused(path, shape, words):
    with pytest.raises(UserError, match=words):
        shard.parameter_spec(path, shape, 1, 3)


def test_sequence_divides_all_lengths_of_texts_or_is_refused():
    def config(kind="lm", length=32, lengths=(32, 64)):
        return ConfigDict(dict(model=dict(kind=kind), data=dict(length=length), eval=dict(lengths=lengths)))

    split = mesh(data=2, sequence=4)
    shard.check_sites(config(), split)
    shard.check_sites(config("vit", 33), mesh(data=8))
    for given, words in (
        (config(length=33), r"mesh\.sequence=4 must divide data\.length: 33 is no multiple of it, 32 is"),
        (config(lengths=(32, 66)), r"mesh\.sequence=4 must divide eval\.lengths: 66 is no multiple of it, 64 is"),
        (config("vit"), r"mesh\.sequence=4 splits texts .* Set mesh\.sequence=1"),
    ):
        with pytest.raises(UserError, match=words):
            shard.check_sites(given, split)


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


def test_to_global_splits_sites_over_sequence():
    made = mesh(data=2, tensor=2, sequence=2)
    batch = {"tokens": np.arange(4 * 6).reshape(4, 6), "document": np.arange(4)}
    whole = shard.to_global(batch, made)
    for name, array in batch.items():
        np.testing.assert_array_equal(whole[name], array)
    assert {piece.data.shape for piece in whole["tokens"].addressable_shards} == {(2, 3)}
    assert {piece.data.shape for piece in whole["document"].addressable_shards} == {(2,)}
    assert shard.share(made) == (0, 1)


def test_any_process():
    assert shard.any_process(True) is True
    assert shard.any_process(False) is False
