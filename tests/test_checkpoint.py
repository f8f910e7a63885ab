"""Checkpoints: the same bits back, on other devices too; damage, foreign models, full disks and kills."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jojax import checkpoint, shard, state
from jojax.checkpoint import Checkpoints
from jojax.errors import UserError

META = {"name": "quickstart", "clock": {"seconds": 1.5, "waited": 0.25}, "model": {"width": 8}}


def start(devices=8, width=256, names=("mlp", "head"), tx=None, ema=True, seed=0, **sizes):
    """A state on some of the devices, and its abstract twin. bfloat16, 0-d and split arrays are in it."""
    mesh = shard.make_mesh(ConfigDict(sizes or {"data": 2, "fsdp": devices // 2}), jax.devices()[:devices])

    def init_fn(key):
        keys = jax.random.split(key, len(names))
        shape = (64, width)
        made = {n: {"kernel": jax.random.uniform(k, shape)} for n, k in zip(names, keys, strict=True)}
        return {
            "blocks": made,
            "gain": jnp.ones(()),
            "half": jax.random.uniform(key, (3,)).astype("bfloat16"),
        }

    tx = tx or optax.adam(1e-3)
    begin = state.start(init_fn, tx, ema=ema, aux=("correct",))
    return state.init_state(begin, mesh, seed), state.abstract_state(begin, mesh)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def at(made, step):
    """The state as it may be at another step."""
    return made.replace(step=jnp.full_like(made.step, step), sums={k: v + step for k, v in made.sums.items()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints at 10 and 20; (workdir, state, abstract state). Copy it before damaging it."""
    workdir = tmp_path_factory.mktemp("run")
    made, like = start()
    with Checkpoints(workdir, keep=2) as checkpoints:
        assert checkpoints.restore_latest(like) is None
        for step in (5, 10, 20):
            assert checkpoints.save(step, at(made, step), META | {"step": step})
        assert not checkpoints.save(20, made, META)  # it is there already
    return workdir, made, like


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def test_save_and_restore_are_bit_equal(saved):
    workdir, made, like = saved
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.steps() == [10, 20]  # keep = 2
        restored, meta = checkpoints.restore_latest(like)
    same(restored, at(made, 20))
    assert meta == {"schema": 1, "step": 20} | META
    jax.tree.map(lambda r, want: r.sharding == want.sharding or pytest.fail("another sharding"), restored, like)
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["10", "20"]


@pytest.mark.parametrize(
    ("devices", "sizes"), [(4, dict(data=1, fsdp=4)), (4, dict(data=4)), (1, dict(data=1)), (8, dict(fsdp=8))]
)
def test_restore_to_another_mesh(saved, devices, sizes):
    workdir, made, _ = saved
    _, like = start(devices, **sizes)
    with Checkpoints(workdir) as checkpoints:
        restored, _ = checkpoints.restore_latest(like)
    same(restored, at(made, 20))
    kernel = restored.params["blocks"]["mlp"]["kernel"]
    assert len(kernel.sharding.device_set) == devices
    assert kernel.addressable_shards[0].data.shape == (64, 256 // sizes.get("fsdp", 1))


def test_the_state_may_be_donated_right_after_saving(tmp_path):
    made, like = start()
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    want = jax.device_get(made)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made, META)
        for _ in range(3):
            made = bump(made)
        checkpoints.wait()
        same(checkpoints.restore_latest(like)[0], want)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def largest(folder):
    return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [(truncate, "bytes instead of"), (os.remove, "is missing"), (flip, "has changed since it was written")],
)
def test_a_damaged_checkpoint_is_passed_over(saved, copy, capfd, harm, words):
    """`flip` is the reason for the checksums: orbax itself restores such a checkpoint, with wrong numbers."""
    _, made, like = saved
    harm(largest(copy / "checkpoints" / "20"))
    with Checkpoints(copy) as checkpoints:
        restored, meta = checkpoints.restore_latest(like)
        same(restored, at(made, 10))
        assert meta["step"] == 10
        out, err = capfd.readouterr()
        assert err == "" and out.count("\n") == 1
        assert "checkpoints/20 is damaged" in out and words in out and "set aside as 20.damaged" in out
        assert checkpoints.steps() == [10]
        assert checkpoints.save(20, at(made, 20), META)  # the run comes by here again
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
    assert (copy / "checkpoints" / "20.damaged").is_dir()


def test_damage_to_any_file_is_noticed(saved, copy):
    folder = copy / "checkpoints" / "20"
    listed = [path for item in ("state", "meta") for path in files(folder / item)]
    assert len(listed) > 10
    for path in listed:
        whole = path.read_bytes()
        for harm in (truncate, flip, os.remove):
            harm(path)
            assert path.name in checkpoint.damage(folder)
            path.write_bytes(whole)
    assert checkpoint.damage(folder) == ""
    truncate(folder / "checksums.json")
    assert "checksums.json is not readable" in checkpoint.damage(folder)


def test_no_readable_checkpoint_is_an_error(saved, copy):
    for step in ("10", "20"):
        truncate(largest(copy / "checkpoints" / step))
    with Checkpoints(copy) as checkpoints, pytest.raises(UserError, match=r"none of .* can be read"):
        checkpoints.restore_latest(saved[2])


def test_a_checkpoint_without_its_list_is_tried(saved, copy):
    (copy / "checkpoints" / "20" / "checksums.json").unlink()
    with Checkpoints(copy) as checkpoints:
        restored, _ = checkpoints.restore_latest(saved[2])
    same(restored, at(saved[1], 20))
    # damaged as well: only orbax can tell, and its one before is taken
    (copy / "checkpoints" / "20" / "meta" / "metadata").write_text("{")
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore_latest(saved[2])[1]["step"] == 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(width=128), r"shape: .*params/blocks/mlp/kernel \(64, 256\) -> \(64, 128\)"),
        (dict(names=("mlp", "head", "extra")), "missing: params/blocks/extra/kernel"),
        (dict(names=("mlp",)), "unexpected: params/blocks/head/kernel"),
        (
            dict(names=("mlp", "tail")),
            "missing: params/blocks/tail/kernel; unexpected: params/blocks/head/kernel",
        ),
        (dict(ema=False), "unexpected: ema/blocks/head/kernel, ema/blocks/mlp/kernel, ema/gain"),
        (dict(tx=optax.sgd(0.1)), r"unexpected: opt_state/0/count.* and \d more"),
    ],
)
def test_another_model_is_told_apart(saved, changes, words):
    _, like = start(**changes)
    said = pytest.raises(UserError, match=rf"checkpoints/20 does not fit .*{words}.*choose another workdir")
    with Checkpoints(saved[0]) as checkpoints, said:
        checkpoints.restore_latest(like)
    assert (saved[0] / "checkpoints" / "20").is_dir()  # it is not damaged


def test_difference_lists_a_few():
    many = {f"p{i}": (1,) for i in range(20)}
    found = checkpoint.difference({}, many)
    assert str(found) == "missing: " + ", ".join(f"p{i}" for i in range(8)) + " and 12 more"
    assert not checkpoint.difference(many, many)


def test_a_newer_schema_is_refused(tmp_path):
    made, like = start()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made, META | {"schema": 99})
        checkpoints.wait()
        with pytest.raises(UserError, match="newer version of jojax"):
            checkpoints.restore_latest(like)


def test_another_runs_folder_is_only_read(saved, copy, capfd):
    leftover = copy / "checkpoints" / "30.orbax-checkpoint-tmp"  # a save in progress in a live run
    leftover.mkdir()
    truncate(largest(copy / "checkpoints" / "20"))
    before = sorted(p.name for p in (copy / "checkpoints").iterdir())
    with Checkpoints(copy, read_only=True) as checkpoints:
        assert checkpoints.restore_latest(saved[2])[1]["step"] == 10
        assert not checkpoints.save(40, saved[1], META)
    assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == before
    assert "is damaged" in capfd.readouterr().out
    with pytest.raises(UserError, match=r"there are no checkpoints in .*nowhere"):
        Checkpoints(copy / "nowhere", read_only=True)
    assert not (copy / "nowhere").exists()


# init_from
def test_parameters_only(saved):
    workdir, made, _ = saved
    mine, _ = start(4, names=("mlp", "tail"), seed=9, data=1, fsdp=4)
    for path in (workdir, workdir / "checkpoints", workdir / "checkpoints" / "20"):
        params, found = checkpoint.restore_params(path, mine.params)
    same(params["blocks"]["mlp"], made.params["blocks"]["mlp"])
    same(params["half"], made.params["half"])
    same(params["blocks"]["tail"], mine.params["blocks"]["tail"])  # as it came
    assert params["blocks"]["mlp"]["kernel"].sharding == mine.params["blocks"]["mlp"]["kernel"].sharding
    assert found == checkpoint.Difference(("blocks/tail/kernel",), ("blocks/head/kernel",), ())


def test_parameters_of_another_shape_are_not_taken(saved):
    mine, _ = start(8, width=128, seed=9)
    params, found = checkpoint.restore_params(saved[0], mine.params)
    same(params["blocks"], mine.params["blocks"])
    same(params["gain"], saved[1].params["gain"])
    assert found.shape == tuple(f"blocks/{n}/kernel (64, 256) -> (64, 128)" for n in ("head", "mlp"))


def test_parameters_only_errors(saved, copy, tmp_path):
    mine = saved[1].params
    with pytest.raises(UserError, match=r"no checkpoint at .*nowhere: give a workdir"):
        checkpoint.restore_params(tmp_path / "nowhere", mine)
    with pytest.raises(UserError, match=r"shares no parameter with this model .*missing: other"):
        checkpoint.restore_params(saved[0], {"other": jnp.zeros(3)})
    with pytest.raises(UserError, match=r"checkpoints/20 holds no average\."):
        checkpoint.restore_params(saved[0], mine, "average")
    truncate(largest(copy / "checkpoints" / "20"))
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.restore_params(copy, mine)


# what the machine may do
def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write checkpoints to .*file/run/checkpoints: Not a directory"):
        Checkpoints(tmp_path / "file" / "run")
