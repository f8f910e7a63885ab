"""Runs of two processes: the numbers of one, stopped and gone on with as one; what ends one ends the other in time."""

import contextlib
import re
import shutil
import signal
import socket
import time

import pytest

import runs
from jojax import hosts, writer
from jojax.errors import UserError
from runs import LM, STEPS, arguments, environment, lm, told, trained

GIVEN = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
SLURM |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def less(env, name):
    return {key: value for key, value in env.items() if key != name}


@pytest.mark.parametrize("env", [SLURM, TPU, KUBERNETES], ids=["SLURM", "TPU", "Kubernetes"])
def test_a_full_set_of_several(env):
    assert hosts.of_several(env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7"},  # ssh into a job's node
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # a batch script
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # any pod
    ],
)
def test_one_process(env):
    assert not hosts.of_several(env) and not hosts.given(env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (less(SLURM, "SLURM_STEP_NODELIST"), r"SLURM_NTASKS=2 .* but SLURM_STEP_NODELIST is not set: .* with srun"),
        (less(TPU, "TPU_WORKER_ID"), r"TPU_WORKER_HOSTNAMES=a,b .* but TPU_WORKER_ID is not set: .*--nodistributed"),
        (less(KUBERNETES, "KUBERNETES_SERVICE_HOST"), r"JOB_COMPLETION_INDEX=0 .* KUBERNETES_SERVICE_HOST is not"),
        *((less(GIVEN, name), rf"is set, but {name} is not: set all three or none") for name in GIVEN),
        (GIVEN | {"JAX_PROCESS_ID": "2"}, r"JAX_PROCESS_ID=2: give HOST:PORT, how many .* from 0 on"),
        (GIVEN | {"JAX_COORDINATOR_ADDRESS": "h"}, r"JAX_COORDINATOR_ADDRESS=h, .*: give HOST:PORT"),
    ],
)
def test_a_part_of_a_set_is_told(env, words):
    with pytest.raises(UserError, match=words):
        hosts.given(env) or hosts.of_several(env)


def test_what_three_variables_say():
    assert hosts.given(GIVEN)["num_processes"] == 2 and hosts.given(GIVEN)["process_id"] == 1


# ------------------------------------------------------------------------------------ two processes
FLAGS = ("--heartbeat_timeout=10", "--connect_timeout=60")


@contextlib.contextmanager
def pair(*commands):
    """Two processes of one run, of one device each; commands: ARGS of both, or of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        made = []
        for rank, command in enumerate(commands if len(commands) > 1 else commands * 2):
            env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
            made.append(stack.enter_context(runs.start([*command, *FLAGS], env=environment(devices=1, **env))))
            stack.callback(made[-1].kill)
        yield made


def ended(processes, within=120):
    """-> [(exit code, stdout, stderr)]"""
    said = [process.communicate(timeout=within) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def until_step(processes, workdir, step):
    while max((line["step"] for line in writer.read_metrics(workdir)), default=0) < step:
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.01)


def as_one(workdir):
    """Every line and number as of one process alone."""
    for mine, other in zip(told(workdir), told(trained()), strict=True):
        assert mine == pytest.approx(other, rel=1e-4), mine
    mine, other = runs.result(workdir), runs.result(trained())
    for key in ("state", "scored", "protocol", "steps", "tokens"):
        assert mine[key] == other[key], key
    assert mine["metrics"] == pytest.approx(other["metrics"], rel=1e-4)
    for length, scores in other["extrapolation"]["lengths"].items():
        found = mine["extrapolation"]["lengths"][length]
        assert found["scored"] == scores["scored"] and found["loss"] == pytest.approx(scores["loss"], rel=1e-4)


CHILD = """
import os, signal, sys
from absl import flags
from jojax import hosts
from jojax.errors import UserError
what, folder, *given = sys.argv[1:]
hosts.define_flags()
flags.FLAGS(["prog", *given])
hosts.SHARED = 2
hosts.start()
import jax
from jojax import shard
with hosts.together(folder):
    asked, rank, told = shard.Asked(shard.make_mesh({"data": -1})), jax.process_index(), []
    for step in range(8):
        told.append(asked(rank == 1 and step >= 3))
        if step == 6:
            print("asked at", told.index(True), flush=True)
        if step == 6 and what == "input":
            raise UserError("bad input")
        if step == 6 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_processes_agree_and_tell_bad_input_alike(tmp_path):
    with pair(["-c", CHILD, "input", str(tmp_path / "run")]) as both:
        both = ended(both)
    for code, out, err in both:
        assert code == 2 and out.endswith("asked at 5\n") and err == "error: bad input\n", both
    assert list(tmp_path.iterdir()) == []  # nothing is left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "code", "words"),
    [
        ("input", 1, 2, "error: bad input\n"),
        ("kill", 0, -signal.SIGKILL, ""),  # the one that the others ask who is there
    ],
)
def test_a_process_that_fails_alone_says_why_and_the_other_ends(what, rank, code, words, tmp_path):
    commands = [["-c", CHILD, what if rank == mine else "", str(tmp_path)] for mine in (0, 1)]
    with pair(*commands) as both:
        made = ended(both, within=60)
    assert made[rank][0] == code and words in made[rank][2]
    assert made[1 - rank][0] not in (0, 2), made
    assert re.search("error: another process of this run is gone|another task died", made[1 - rank][2]), made


@pytest.mark.slow
def test_a_workdir_that_is_not_shared(tmp_path):
    with pair(*(["-c", CHILD, "", str(tmp_path / str(rank))] for rank in (0, 1))) as both:
        both = ended(both)
    for rank, (code, _, err) in enumerate(both):
        words = f"error: process 1 does not see what process 0 writes to {tmp_path / str(rank)}: --workdir must be a"
        assert code == 2 and err.startswith(words) and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_stopped_by_a_signal_to_one_and_gone_on_with_as_one(tmp_path):
    """SIGTERM to the second, after an evaluation of a split that two processes cannot share evenly."""
    with pair(arguments(LM, lm(), tmp_path)) as both:
        until_step(both, tmp_path, 11)
        both[1].send_signal(signal.SIGTERM)
        (code, out, err), (other, silent, err1) = ended(both)
    assert (code, other) == (143, 143), out + err + err1
    assert "SIGTERM: saving and stopping" in err1 and "in 2 process(es)" in out and "step" not in silent
    step = int(re.search(r"stopped by a signal to another process after step (\d+)", out)[1])
    assert 11 <= step < STEPS and (tmp_path / "checkpoints" / str(step)).is_dir()
    out, _ = runs.run(arguments(LM, lm(), tmp_path), env=environment(devices=1))
    assert f"going on from step {step}" in out
    as_one(tmp_path)


@pytest.mark.slow
def test_begun_as_one_ended_and_evaluated_by_two(tmp_path):
    shutil.copytree(trained(), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "30")
    (tmp_path / "result.json").unlink()
    evaluate = ["-m", "jojax.evaluate", "--lengths=32,64", "--workdir", str(tmp_path)]
    for command in (arguments(LM, lm(), tmp_path), evaluate):
        with pair(command) as both:
            (code, out, err), (other, silent, err1) = ended(both)
        assert (code, other) == (0, 0), out + err + err1
        assert "extrapolation.png" in out and "valid" not in silent
        as_one(tmp_path)
    mine, other = (runs.result(folder) for folder in (tmp_path, trained()))
    assert mine["evaluation"]["scored"] == other["scored"]
    assert mine["evaluation"]["loss"] == pytest.approx(other["metrics"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_killed_process_ends_the_other_in_time(tmp_path):
    with pair(arguments(LM, lm(steps=20_000, eval__every_steps=0, checkpoint__every_steps=50), tmp_path)) as both:
        until_step(both, tmp_path, 20)
        both[1].kill()
        start = time.monotonic()
        ((code, out, err),) = ended(both[:1], within=60)
    assert time.monotonic() - start < 30, err
    assert code not in (0, 143) and ("error: another process of this run is gone" in err or "task died" in err), (
        out + err
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_come(rank, tmp_path):
    env = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
    command = [*arguments(LM, lm(), tmp_path), "--connect_timeout=3"]
    start = time.monotonic()
    _, err = runs.run(command, code=2, env=environment(devices=1, **env))
    assert time.monotonic() - start < 40
    assert "error: not all processes came together within --connect_timeout=3 seconds" in err, err


@pytest.mark.slow
def test_no_cluster(tmp_path):
    _, err = runs.run([*arguments(LM, lm(), tmp_path), "--distributed"], code=2)
    assert err.startswith("error: jax finds no cluster here") and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []
