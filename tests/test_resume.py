"""Runs that are killed, stopped, moved to other devices and started again end where the uninterrupted run ends."""

import json
import os
import re
import shutil
import signal
import time
import zlib

import numpy as np
import pytest

import runs
from jojax import checkpoint, loop, shard, tree
from jojax.data.stream import train_batches
from runs import LM, STEPS, arguments, environment, lm, told, train, trained

OFTEN = {"checkpoint.every_steps": 3}


class Life:
    """One process of a run, from its start to a signal."""

    def __init__(self, workdir):
        self.workdir, self.begun = workdir, newest(workdir)
        self.before = self.stamp()
        self.process = runs.start(arguments(LM, lm() | OFTEN, workdir), env=environment(devices=1))

    def stamp(self):
        file = self.workdir / "metrics.jsonl"
        return file.stat().st_mtime_ns if file.exists() else 0

    def steps(self):
        """The last step that this life has told of; what a former life told beyond its checkpoint is gone by then."""
        return steps_told(self.workdir) if self.stamp() != self.before else 0

    def until(self, true):
        """Wait, asking every 2 ms; True when true(), False when the process has ended before."""
        while not true():
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def end(self, number):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def steps_told(workdir):
    return max((line["step"] for line in told(workdir)), default=0)


def newest(workdir):
    return max((int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def equal_to_uninterrupted(workdir, *more):
    """Metrics, every line and every bit of the state."""
    mine, other = runs.result(workdir), runs.result(trained())
    for key in ("state", "metrics", "scored", "protocol", "steps", "tokens", *more):
        assert mine[key] == other[key], key
    assert told(workdir) == told(trained())
    runs.same(*runs.states(LM, lm(), workdir, trained()))


def test_killed_twice_stopped_once(tmp_path):
    """kill -9 in mid-run, kill -9 in mid-checkpoint, SIGTERM, and to the end."""
    first = Life(tmp_path)
    assert first.until(lambda: first.steps() >= 5)
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert runs.result(tmp_path)["state"] == "running"

    second = Life(tmp_path)
    unfinished = f"{second.begun + 3}.orbax-checkpoint-tmp*"
    assert second.until(lambda: list((tmp_path / "checkpoints").glob(unfinished)))
    assert second.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert list((tmp_path / "checkpoints").glob(unfinished))
    assert newest(tmp_path) == second.begun  # the save that was cut off does not count

    third = Life(tmp_path)
    assert third.until(lambda: third.steps() >= third.begun + 5)
    code, out, err = third.end(signal.SIGTERM)
    assert code == 143, out + err
    assert ("going on from step" in out) == (third.begun > 0) and "SIGTERM: saving and stopping" in err
    stopped = int(re.search(r"stopped by SIGTERM after step (\d+); the same command goes on", out)[1])
    assert third.begun + 5 <= stopped < STEPS
    assert newest(tmp_path) == stopped == steps_told(tmp_path)

    train(LM, lm() | OFTEN, tmp_path)
    equal_to_uninterrupted(tmp_path, "extrapolation")


@pytest.mark.slow
def test_killed_many_times(tmp_path):
    """At random moments: while starting, training, saving, evaluating or writing the result. So often as KILLS says."""
    rng, kills, number = np.random.default_rng(0), 0, 0
    while kills < int(os.environ.get("KILLS", 4)):
        workdir = tmp_path / str(number)
        life = Life(workdir)
        if kills % 4:  # else while it starts
            life.until(life.steps)
        time.sleep(rng.uniform(0, 3))
        code, out, err = life.end(signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), out + err
        kills += code != 0
        if code == 0:
            equal_to_uninterrupted(workdir, "extrapolation")
            number += 1
    train(LM, lm() | OFTEN, workdir)
    equal_to_uninterrupted(workdir, "extrapolation")


def batch_sums(batch):
    return {key: zlib.crc32(np.asarray(value).tobytes()) for key, value in sorted(batch.items())}


ON_OTHER_DEVICES = """
import sys
sys.path.insert(0, "tests")
import runs, test_resume
from jojax import shard
whole = shard.to_global
def recorded(batch, mesh):
    out = whole(batch, mesh)
    print("BATCH", mesh.size, test_resume.batch_sums(out), flush=True)
    return out
shard.to_global = recorded
sys.exit(runs.train_here(runs.LM, eval(sys.argv[1]), sys.argv[2]))
"""


def test_other_devices_and_resume(tmp_path):
    """Step 10 saved on eight devices, gone on with on four, in another workdir: the same batches, the same losses."""
    shutil.copytree(trained() / "checkpoints" / "10", tmp_path / "one" / "checkpoints" / "10")
    run = loop.Run(runs.config_of(LM, lm()), LM, tmp_path)
    assert run.mesh.size == 8
    with checkpoint.Checkpoints(tmp_path / "one", read_only=True) as one:
        now, meta = one.restore_latest(run.like)
    with checkpoint.Checkpoints(tmp_path / "eight") as eight:
        eight.save(10, now, meta)
    before = runs.snapshot(tmp_path / "eight")
    overrides = lm(resume=str(tmp_path / "eight"), eval__lengths=())
    out, _ = runs.run(["-c", ON_OTHER_DEVICES, repr(overrides), str(tmp_path / "four")], env=environment(devices=4))
    assert "going on from step 10" in out
    assert runs.snapshot(tmp_path / "eight") == before  # another run's folder is only read

    source, transform = run.job.train_source()
    data = train_batches(source, 8, seed=0, start_step=10, transform=transform)
    want = [f"BATCH 4 {batch_sums(shard.to_global(next(data), run.mesh))}" for _ in range(20)]
    data.close()
    got = [line for line in out.splitlines() if line.startswith("BATCH") and "document" not in line]  # not evaluation's
    assert got == want and len(set(want)) == 20

    four, eight = (
        told(tmp_path / "four"),
        [line for line in told(trained()) if line["step"] > 10 or "valid/loss" in line],
    )
    for mine, other in zip(four, eight, strict=True):  # the evaluation at step 10 too: nobody knows if it was done
        assert mine == pytest.approx(other, rel=1e-5 if "train/loss" in mine else 1e-4)


def test_an_end_that_was_cut_off_is_made_up_for(tmp_path):
    """Killed after the last line, before the record was written."""
    shutil.copytree(trained(), tmp_path / "run")
    record = runs.result(trained())
    for key in ("metrics", "extrapolation", "scored"):
        del record[key]
    (tmp_path / "run" / "result.json").write_text(json.dumps(record | {"state": "running"}))
    train(LM, lm(eval__lengths=()), tmp_path / "run")
    equal_to_uninterrupted(tmp_path / "run")


def test_init_from_takes_the_parameters_that_fit(tmp_path, capsys):
    """A new run, of a model with a larger vocabulary: all else as the checkpoint has it, no step, no moments."""
    given = lm(init_from=str(trained()), optim__ema=0.9, data__vocab=300)
    run = loop.Run(runs.config_of(LM, given), LM, tmp_path)
    with checkpoint.Checkpoints(tmp_path) as saved:
        mine = tree.leaves(run.start_state(saved))
    said = capsys.readouterr().out
    assert said.startswith(f"parameters from {trained()}, but shape: ") and said.count("\n") == 1
    (stored,), fit = runs.states(LM, lm(), trained()), set()
    for name, array in mine.items():
        branch, _, leaf = name.partition("/")
        if branch in ("params", "ema"):
            other = stored[f"params/{leaf}"]
            if other.shape != array.shape:
                assert f"{leaf} {other.shape} -> {array.shape}" in said
                continue
            fit.add(leaf)
            np.testing.assert_array_equal(array, other, err_msg=name)
        elif branch == "opt_state":
            assert not np.any(array), name
    assert mine["step"] == 0 and {"blocks/mlp_in/kernel", "norm/scale"} < fit
    assert not {"embed/embedding", "head/kernel", "head/bias"} & fit
    np.testing.assert_array_equal(mine["params/embed/embedding"], mine["ema/embed/embedding"])
