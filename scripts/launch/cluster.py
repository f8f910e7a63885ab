"""The points of a sweep as SLURM jobs, and as commands for a Cloud TPU pod."""

import shlex
import subprocess
import sys
from pathlib import Path

from jojax.errors import UserError

# what a job has unless the options say otherwise; the signal is for its time limit, with preemption comes one anyway
DEFAULTS = {"requeue": "", "open-mode": "append", "signal": "TERM@120"}

SCRIPT = """\
#!/bin/bash
{options}
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi  # srun does not read it
srun {command}
code=$?
# stopped by a signal, after a checkpoint: to the queue again, to go on from it
if [ $code = {preempted} ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def options(texts: list[str]) -> dict[str, str]:
    """['partition=gpu', 'exclusive'] -> {'partition': 'gpu', 'exclusive': ''}"""
    pairs = (text.lstrip("-").partition("=")[::2] for text in texts)
    return dict(pairs)


def script(workdir: Path, command: list[str], given: dict[str, str], preempted: int) -> str:
    """The batch script of one point. `given`: options of sbatch."""
    log = str(workdir.with_name(f"{workdir.name}.log")).replace("%", "%%")
    asked = {"job-name": workdir.name, "output": log} | DEFAULTS | given
    lines = [f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "") for key, value in asked.items()]
    line = shlex.join([sys.executable, *command])
    return SCRIPT.format(options="\n".join(lines), command=line, preempted=preempted)


def queued() -> dict[str, str]:
    """{name: 'job 12, RUNNING'} of this user's jobs."""
    lines = _slurm(["squeue", "--me", "--noheader", "--format=%j|%i|%T"]).splitlines()
    return {name: f"job {number}, {state}" for name, number, state in (line.rsplit("|", 2) for line in lines)}


def submit(text: str) -> str:
    """-> the job's number."""
    return _slurm(["sbatch", "--parsable"], text).strip().partition(";")[0]


def _slurm(command, text=""):
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not here: run this where SLURM is, or look at the scripts by --print"
        ) from None
    if done.returncode:
        raise UserError(f"{command[0]} refused: {done.stderr.strip()}")
    return done.stdout


def tpu(command: list[str], name: str, zone: str) -> str:
    """The shell command that runs one point on all hosts of a pod."""
    inside = shlex.join(["python3", *command, "--distributed"])
    outside = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, f"--zone={zone}", "--worker=all"]
    return shlex.join([*outside, f"--command=cd jojax && {inside}"])
