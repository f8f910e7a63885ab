"""One run on one, two and eight devices, parameters split, data and parameters split: the same start, the same losses.
Eight devices with the data alone split are tested against four in test_resume."""

import functools

import jax
import numpy as np
import pytest

import runs
from jojax import loop, metrics, shard, state, tree
from runs import lm

SPEC = "configs/quickstart.py:smoke,encoding=jo_projected"
# wide enough that fsdp splits the tables and the MLP
MODEL = {"model.width": 64, "data.vocab": 300, "model.mlp_ratio": 4.0}
MESHES = {
    "data=1": (1, {}),
    "fsdp=2": (2, {"mesh.data": 1, "mesh.fsdp": 2}),
    "data=4,fsdp=2": (8, {"mesh.data": 4, "mesh.fsdp": 2}),
}


@functools.cache
def five_steps(name):
    """(first state, losses, last state as NumPy) of the training loop's parts on that mesh."""
    devices, mesh = MESHES[name]
    with pytest.MonkeyPatch.context() as patch:  # fewer devices than this process has
        patch.setattr(shard, "make_mesh", functools.partial(shard.make_mesh, devices=jax.devices()[:devices]))
        run = loop.Run(runs.config_of(SPEC, lm() | MODEL | mesh), SPEC, runs.FOLDER)
    run.open_data()
    now = state.init_state(run.job.init, run.tx, run.mesh, 0)
    first = tree.leaves(jax.device_get(now))
    split = {n for n, leaf in tree.leaves(now.params).items() if not leaf.sharding.is_fully_replicated}
    losses = []
    data = run.batches(0)
    for _ in range(5):
        now = run.step_fn(now, shard.to_global(next(data), run.mesh))
        losses.append(metrics.averages(now.sums)["loss"])
    data.close()
    return first, losses, tree.leaves(jax.device_get(now)), split


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MESHES)[:0:-1])
def test_same_start_and_losses(name):
    first, losses, last, split = five_steps(name)
    start, want, end, _ = five_steps("data=1")
    runs.same(first, start)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert len(set(want)) == 5
    for leaf, array in last.items():
        np.testing.assert_allclose(array, end[leaf], rtol=1e-2, atol=1e-4, err_msg=leaf)
    assert split >= {"blocks/mlp_in/kernel", "blocks/mlp_out/kernel", "embed/embedding", "head/kernel"}
    assert not five_steps("data=1")[3]
