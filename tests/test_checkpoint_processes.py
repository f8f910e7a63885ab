"""Checkpoints when processes die, disks fill and two processes share a run. The children run the tests' own
states."""

import os
import signal
import socket
import subprocess
import sys
import time

from jojax.checkpoint import Checkpoints
from test_checkpoint import at, same, start

CHILD = """
import resource, sys
sys.path.insert(0, {tests!r})
import test_checkpoint as t
made, like = t.start()
"""


def child(code, *args, before=CHILD, **kwargs):
    """A process of its own, with this file as `t`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import conftest\n" + before.format(tests=os.path.dirname(__file__)) + code
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, text=True, **kwargs)


FULL = """
from jojax import cli, checkpoint
def main(_):
    with checkpoint.Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, made, t.META)
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))   # as good as a full disk
        checkpoints.save(2, made, t.META)
        checkpoints.wait()
cli.run_main(main, ["prog"])
"""


def test_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path):
    done = child(FULL, tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 2
    assert err.startswith("error: cannot write checkpoints to") and "File too large" in err, err
    assert err.count("\n") == 1 and out == "", err
    _, like = start()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert checkpoints.restore_latest(like) is not None


ENDLESS = """
from jojax.checkpoint import Checkpoints
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    for step in range(1, 10_000):
        checkpoints.save(step, t.at(made, step), t.META | {"step": step})
        print(step, flush=True)
"""


def test_kill_while_saving_leaves_a_good_checkpoint(tmp_path):
    """Saving without a pause, killed at two moments: what is visible is whole."""
    made, like = start()
    for turn, delay in enumerate((0.0, 0.03)):
        workdir = tmp_path / str(turn)
        running = child(ENDLESS, workdir, stdout=subprocess.PIPE)
        while int(running.stdout.readline()) < 5:
            pass
        time.sleep(delay)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
        assert running.returncode == -signal.SIGKILL
        with Checkpoints(workdir) as checkpoints:
            restored, meta = checkpoints.restore_latest(like)
            assert meta["step"] >= 4
            same(restored, at(made, meta["step"]))
            # leftovers of the save that was cut off are gone
            names = [p.name for p in (workdir / "checkpoints").iterdir()]
            assert all(name.isdigit() for name in names), names


PAIR = """
import jax, os, pathlib
import numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("127.0.0.1:" + sys.argv[3], 2, int(sys.argv[2]))
from jojax import checkpoint, shard
from jojax.checkpoint import Checkpoints
made, like = t.start()
rank = jax.process_index()
mesh = jax.tree.leaves(made)[0].sharding.mesh
rows = shard.local_rows(16, mesh)
whole = np.arange(16 * 3).reshape(16, 3)
batch = shard.to_global(whole[rows], mesh)
assert batch.shape == (16, 3) and len(rows) == 8
for piece in batch.addressable_shards:
    assert np.array_equal(piece.data, whole[piece.index])
count = np.arange(16)[:, None]
assert int(jax.jit(lambda x: (x * count).sum())(batch)) == (whole * count).sum()
assert shard.any_process(rank == 1) and not shard.any_process(False)
seen, damage = [], checkpoint.damage
checkpoint.damage = lambda folder: seen.append(folder.name) or damage(folder)
with Checkpoints(sys.argv[1]) as checkpoints:
    for step in (10, 20):
        checkpoints.save(step, t.at(made, step), t.META | {"step": step})
    checkpoints.wait()
    if rank == 0:
        t.truncate(t.largest(pathlib.Path(sys.argv[1], "checkpoints", "20")))
    shard.any_process(True)   # a barrier
    restored, meta = checkpoints.restore_latest(like)
    assert meta["step"] == 10 and int(restored.step) == 10
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(t.at(made, 10)), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.array_equal(x.data, y.data)
assert seen == [["20", "10"], []][rank]   # one reads all files
print("fine", rows[0])
"""


def test_two_processes_share_batches_and_checkpoints(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = CHILD.replace("made, like = t.start()", "")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pair = [child(PAIR, tmp_path / "run", rank, port, before=before, **pipes) for rank in (0, 1)]
    said = [running.communicate(timeout=120) for running in pair]
    assert [running.returncode for running in pair] == [0, 0], said[0][1] + said[1][1]
    assert sorted(out.strip().split("\n")[-1] for out, _ in said) == ["fine 0", "fine 8"]
    assert "20 is damaged" in said[0][0] and "damaged" not in said[1][0]
    made, like = start()
    with Checkpoints(tmp_path / "run") as checkpoints:  # what two processes saved, one restores
        same(checkpoints.restore_latest(like)[0], at(made, 10))
