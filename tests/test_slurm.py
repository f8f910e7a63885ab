"""A sweep on a real SLURM: two-task jobs that are preempted, signalled and gone on with to the end."""

import re
import subprocess
import sys

import pytest

import runs
import slurm
from jojax import writer
from scripts.launch import points

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]

CONFIG = """
from configs import quickstart
from jojax import config

def get_config(arg=None):
    return config.apply_overrides(quickstart.get_config(arg), {given})

def sweep():
    yield {{"arg": "encoding=rope"}}
    yield {{"arg": "encoding=alibi"}}
"""


def test_jobs_of_two_tasks_are_preempted_signalled_and_finished(tmp_path):
    (tmp_path / "slurm").mkdir()
    given = runs.lm(steps=200, checkpoint__every_steps=0, eval__every_steps=0)
    (tmp_path / "mine.py").write_text(CONFIG.format(given=given))
    rope, alibi = (tmp_path / "runs" / f"mine-encoding={name}" for name in ("rope", "alibi"))
    with slurm.cluster(tmp_path / "slurm") as env:
        env = runs.environment(devices=1, PYTHONPATH=str(runs.ROOT)) | {"SLURM_CONF": env["SLURM_CONF"]}

        def said(*command):
            return slurm.said(env, *command)

        def sweep():
            command = [sys.executable, str(runs.ROOT / "scripts/sweep.py"), "--config=mine.py", "--slurm"]
            done = subprocess.run(
                [*command, "partition=low", "ntasks=2"],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        def log(workdir):
            path = workdir.with_name(f"{workdir.name}.log")
            return path.read_text() if path.exists() else ""

        def until(workdir, step):
            slurm.wait_for(lambda: any(line["step"] >= step for line in writer.read_metrics(workdir)))

        jobs = re.findall(r"to do, submitted as job (\d+)", sweep())
        assert len(jobs) == 2
        again = sweep()
        assert "submitted" not in again
        for workdir, job in zip((rope, alibi), jobs, strict=True):
            assert re.search(rf"runs/{workdir.name}: .* \(job {job}, \w+\)", again), again
        until(rope, 5)
        assert re.match(r"running  step \d+/200  loss \d.*  ETA ", points.progress(rope))

        said("sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 1")  # preempts
        slurm.wait_for(lambda: re.search(r"stopped by SIGTERM after step \d+", log(rope)))

        until(alibi, 5)
        said("scancel", "--signal=TERM", jobs[1])  # what --signal sends before the time limit
        slurm.wait_for(lambda: re.search(r"stopped by SIGTERM after step \d+", log(alibi)))

        def ended():
            for job in jobs:  # which SLURM would keep waiting for two minutes
                said("scontrol", "update", f"JobId={job}", "StartTime=now")
            return not said("squeue", "--noheader")

        slurm.wait_for(ended, 240)
        for workdir in (rope, alibi):
            result = runs.result(workdir)
            assert result["state"] == "finished" and result["devices"]["processes"] == 2
            assert "going on from step" in log(workdir)
        again = sweep()
        assert "submitted" not in again and again.count("finished  loss") == 2
        told = [sys.executable, "-c", "import os; from jojax import hosts; print(hosts.of_several(os.environ))"]
        assert said("srun", "--ntasks=1", *told) == "False\n" and said("srun", "--ntasks=2", *told) == "True\n" * 2
