"""One run on one device and on several, every way that the mesh splits it: the same start, the same losses, and no more
traffic between devices than the split needs. Eight devices with the data alone split are tested against four in
test_resume."""

import collections
import contextlib
import functools
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest

import runs
from configs.encodings import preset
from jojax import convert, evaluate, generate, loop, metrics, shard, state, tree
from runs import lm

SPEC = "configs/quickstart.py:smoke,encoding=jo_projected"


def overrides(sizes, dtype="float32"):
    """Rows of several documents; wide enough that fsdp splits the tables and the MLP."""
    wide = {"model.width": 64, "data.vocab": 300, "model.mlp_ratio": 4.0, "model.depth": 2}
    return lm(dtype=dtype) | wide | {f"mesh.{axis}": size for axis, size in (dict(data=1) | sizes).items()}


@contextlib.contextmanager
def first_devices(sizes):
    """Meshes are made of the first of this process's devices, as many as `sizes` wants."""
    with pytest.MonkeyPatch.context() as patch:
        whole, devices = shard.make_mesh, jax.devices()[: math.prod(sizes.values())]
        patch.setattr(shard, "make_mesh", lambda sizes, *_: whole(sizes, devices))
        yield


def made(sizes, dtype="float32"):
    """A run's parts on so many devices."""
    with first_devices(sizes):
        return loop.Run(runs.config_of(SPEC, overrides(sizes, dtype)), SPEC, runs.FOLDER)


def trained_on(sizes, workdir, **more):
    """(metrics, losses) of a whole run on so many devices."""
    with first_devices(sizes):
        short = {"steps": 4, "eval.lengths": (), "eval.every_steps": 0}
        assert runs.train_here(SPEC, overrides(sizes) | short | runs.dotted(more), workdir) == 0
    return runs.result(workdir)["metrics"], list(runs.losses(workdir).values())


@functools.cache
def five_steps(dtype="float32", **sizes):
    """(first state, losses, last state as NumPy, split parameters, compiled step) of the training loop's parts."""
    run = made(sizes, dtype)
    run.open_data()
    now = state.init_state(run.start, run.mesh, 0)
    first = tree.leaves(jax.device_get(now))
    split = {n for n, leaf in tree.leaves(now.params).items() if not leaf.sharding.is_fully_replicated}
    losses, step = [], run.step_fn.lower(now, run.abstract_batch()).compile()
    data = run.batches(0)
    for _ in range(5):
        now = step(now, shard.to_global(next(data), run.mesh))
        losses.append(metrics.averages(now.sums)["loss"])
    data.close()
    return first, losses, tree.leaves(jax.device_get(now)), split, step.as_text()


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "sizes", [dict(tensor=2, sequence=2), slow(dict(fsdp=2)), slow(dict(tensor=2)), slow(dict(sequence=2))]
)
def test_same_start_and_losses(sizes, capfd):
    first, losses, last, split, _ = five_steps(**sizes)
    start, want, end, whole, _ = five_steps()
    runs.same(first, start)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert len(set(want)) == 5 and not whole
    large = {"blocks/mlp_in/kernel", "blocks/mlp_out/kernel", "embed/embedding", "head/kernel"}
    assert split >= large if set(sizes) != {"sequence"} else not split
    for leaf, array in last.items():
        np.testing.assert_allclose(array, end[leaf], rtol=1e-2, atol=1e-4, err_msg=leaf)
    assert "rematerialization" not in capfd.readouterr().err


def traffic(text):
    """(kind, elements) of each array that a compiled program's collectives bring to a device; a loop's count once."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for shape in re.findall(r"\[([\d,]*)\]", result):
            yield kind, math.prod(map(int, filter(None, shape.split(","))))


# of the 15 parameters 11 have more than 256 elements
TRAFFIC = {
    # gathered: mlp_in and mlp_out before each pass of a block, embedding and head once; reduced: gradients
    "fsdp": {"all-gather": 2 * 2 + 2, "all-reduce": 11},
    # reduced: the embedding; out, mlp_out, advance; backwards mlp_in, query, key, value, and the head. Gathered: the
    # two cotangents of what `begin` and `advance` answer, whose heads are split; advance's gradient, which lies whole
    "tensor": {"all-reduce": 1 + 3 + 4 + 1, "all-gather": 2 + 1},
    # gathered: keys, values, the parts' totals, their cotangents; cut again: those of keys, values; reduced: gradients
    "sequence": {"all-gather": 2 + 1 + 1, "reduce-scatter": 2, "all-reduce": 11},
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", TRAFFIC)
def test_no_more_travels_than_the_split_needs(axis):
    """Of arrays larger than one number a site: no logits, no activation twice, no message for each step of a scan."""
    found = list(traffic(five_steps(**{axis: 2})[-1]))
    assert collections.Counter(kind for kind, size in found if size > 8 * 32) == TRAFFIC[axis]
    assert {kind for kind, _ in found} == set(TRAFFIC[axis])
    assert max(size for _, size in found) <= max(300 * 64, 8 * 32 * 64)


@pytest.mark.slow
def test_a_split_run_is_read_as_on_one_device(tmp_path, monkeypatch):
    """Its metrics, its losses at another length, the text that it writes."""
    short = {"steps": 3, "eval.lengths": (64,)}
    assert runs.train_here(SPEC, overrides(dict(data=2, tensor=2, sequence=2)) | short, tmp_path) == 0

    def text():
        return list(generate.load(tmp_path).tokens(list(b"The river"), 5))

    def losses(record):
        return [record["extrapolation"]["lengths"]["64"][key] for key in ("loss", "tail_loss")]

    split, written = runs.result(tmp_path), text()
    whole = shard.make_mesh
    monkeypatch.setattr(shard, "make_mesh", lambda sizes, *_: whole(sizes, jax.devices()[:1]))
    one = evaluate.evaluate_run(tmp_path, lengths=(64,))
    one["evaluation"].pop("scored")
    assert split["metrics"] == pytest.approx(one["evaluation"], rel=1e-5)
    assert losses(split) == pytest.approx(losses(one), rel=1e-5)
    assert written == text()


@pytest.mark.slow
def test_stages_cross_their_boundary_and_go_on_behind_it(tmp_path, capsys):
    """As on one device; resumed where the earlier stage ends; and its weights leave and come back as they were."""
    stages = ({"steps": 2, "encoding": preset("jo_fixed")}, {"steps": 2, "reset_optimizer": True})
    given, sizes = dict(stages=stages, optim__ema=0.5, optim__warmup_steps=0), dict(fsdp=2, tensor=2)
    one, split = trained_on({}, tmp_path / "one", **given), trained_on(sizes, tmp_path / "split", **given)
    np.testing.assert_allclose(split[1], one[1], rtol=1e-5)
    assert split[0] == pytest.approx(one[0], rel=1e-5) and len(set(one[1])) == 4
    shutil.rmtree(tmp_path / "split" / "checkpoints" / "4")
    record = runs.result(tmp_path / "split")
    (tmp_path / "split" / "result.json").write_text(json.dumps(record | {"state": "running"}))
    assert trained_on(sizes, tmp_path / "split", **given) == split
    assert "going on from step 2" in capsys.readouterr().out

    exported = convert.export_weights(tmp_path / "split", tmp_path / "weights.safetensors")
    imported = convert.import_weights(tmp_path / "weights.safetensors", tmp_path / "back")
    runs.same(tree.leaves(imported), exported)
    back = evaluate.evaluate_run(tmp_path / "back")["evaluation"]
    assert back["loss"] == pytest.approx(split[0]["loss"], rel=1e-5)


@pytest.mark.slow
def test_bfloat16_follows_one_device():
    one, split = (five_steps("bfloat16", **sizes)[1] for sizes in ({}, dict(tensor=2, sequence=2)))
    np.testing.assert_allclose(split, one, rtol=1e-4)
    assert set(one).isdisjoint(five_steps()[1])
