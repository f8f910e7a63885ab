"""Sweeps: what is run, skipped and told, here and for clusters (test_slurm.py has a real one)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jojax.errors import UserError
from scripts import sweep
from scripts.launch import cluster, points
from slurm import wait_for
from test_scripts import ROOT, call

SWEEP = """
from configs.quickstart_vit import get_config

def sweep():
    yield {"arg": "encoding=none,smoke", "data.source": "folder", "data.path": "gone"}
    yield {"arg": "encoding=rope_axial,smoke", "seed": 3}
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_skips_what_is_done_and_goes_on_after_a_failure(jobs, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SWEEP)
    broken, done = (point.workdir for point in points.of("mine.py"))
    assert str(done) == "runs/mine-encoding=rope_axial,smoke-seed=3"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps({"state": "finished", "config": {}, "metrics": {"loss": 2.0}}))
    call(sweep, "--config", "mine.py", "--print")
    out, _ = capfd.readouterr()
    assert f"[1/2] {broken}: to do\n" in out and f"[2/2] {done}: finished  loss 2\n" in out
    assert "jojax.train --config=mine.py:encoding=rope_axial,smoke --config.seed=3 --workdir=runs/mine-" in out
    with pytest.raises(SystemExit) as code:
        call(sweep, "--config", "mine.py", "--jobs", str(jobs))
    out, err = capfd.readouterr()
    assert code.value.code == 1 and err.endswith(f"failed:\n  {broken}\n") and f"[2/2] {done}: finished" in out
    if jobs > 1:
        err = (tmp_path / "runs" / f"{broken.name}.log").read_text()
        assert f"{broken}: to do, exit code 2, see runs/" in out
    assert "gone" in err


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_stops_a_sweep(jobs, tmp_path):
    """The runs had it too and end by themselves; what waits is not started."""
    code = f"""
import signal
from pathlib import Path
from scripts.launch import local, points
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background are started without it
run = "import signal, time; from pathlib import Path; signal.signal(2, signal.SIG_DFL); "
run += "Path('began-{{0}}').touch(); time.sleep(15)"
todo = [points.Point(Path(f"runs/{{n}}"), ["-c", run.format(n)], {{}}, "") for n in range(3)]
local.run(todo, {jobs})
"""
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True) as process:
        wait_for(lambda: len(list(tmp_path.glob("began-*"))) == jobs)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    assert len(list(tmp_path.glob("began-*"))) == jobs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "0"], r"--jobs 0: give the number of points to run at a time"),
        (["--jobs", "2", "--slurm"], r"give one of --jobs \(this machine\), --slurm and --tpu"),
        (["--tpu", "pod"], r"--tpu NAME and --zone ZONE go together"),
    ],
)
def test_a_sweep_that_makes_no_sense(arguments, words):
    with pytest.raises(UserError, match=words):
        call(sweep, "--config", str(ROOT / "configs/quickstart.py"), *arguments)


def test_a_sweep_tells_all_points_that_cannot_run_before_any_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.py").write_text("from configs.quickstart_vit import get_config\n")
    with pytest.raises(UserError, match=r"none\.py has no sweep\(\)"):
        points.of("none.py")
    more = '    yield {"arg": "encoding=rope_axis"}\n    yield {"arg": "smoke", "model.patch": 5}\n'
    (tmp_path / "wrong.py").write_text(SWEEP + more)
    with pytest.raises(UserError) as caught:
        call(sweep, "--config", "wrong.py")
    first, *told = str(caught.value).splitlines()
    assert first == "nothing was started, since 2 of 4 points cannot run:"
    assert "rope_axis: no such preset" in told[0] and "no whole number of 5×5 patches" in told[1] and len(told) == 2
    assert not (tmp_path / "runs").exists()


def test_how_far_a_run_is(tmp_path):
    assert points.progress(tmp_path) == "to do"
    config = {"steps": 300, "batch_size": 4, "data": {"length": 32}}
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "config": config}))
    assert points.progress(tmp_path) == "running  no step told yet"
    lines = [{"step": 100, "train/loss": 3.25, "tokens_per_second": 640.0}, {"step": 100, "valid/loss": 9.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert points.progress(tmp_path).startswith("running  step 100/300  loss 3.25  ETA 40s (told ")
    del config["data"]["length"]  # of images and clips
    lines = [{"step": 100, "train/loss": 3.25, "clips_per_second": 10.0}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "config": config}))
    assert points.progress(tmp_path).startswith("running  step 100/300  loss 3.25  ETA 1m20s (told ")
    (tmp_path / "result.json").write_text("{")
    assert "is not JSON" in points.progress(tmp_path)


def test_scripts_and_commands_for_clusters():
    command = ["-m", "jojax.train", "--config=a.py:b", "--workdir=runs/a-b%"]
    given = cluster.options(["partition=gpu", "--time=4:00:00", "exclusive", "signal=TERM@300"])
    lines = cluster.script(Path("runs/a-b%"), command, given, 143).splitlines()
    assert lines[0] == "#!/bin/bash" and f"srun {sys.executable} {' '.join(command)}" in lines
    asked = {line for line in lines if line.startswith("#SBATCH")}
    wanted = "job-name=a-b% output=runs/a-b%%.log requeue open-mode=append signal=TERM@300 partition=gpu time=4:00:00"
    assert asked == {f"#SBATCH --{option}" for option in (*wanted.split(), "exclusive")}
    assert "if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi" in lines
    said = cluster.tpu(command, "pod", "us-central2-b")
    assert said == (
        "gcloud compute tpus tpu-vm ssh pod --zone=us-central2-b --worker=all "
        "'--command=cd jojax && python3 -m jojax.train --config=a.py:b --workdir=runs/a-b% --distributed'"
    )
