"""Runs of two processes: the numbers of one, stopped and gone on with as one; what ends one ends the other in time."""

import contextlib
import json
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
def pair(*commands, port=None):
    """Two processes of one run, of one device each; commands: ARGS of both, or of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port or free.getsockname()[1]}"
    made = []
    for rank, command in enumerate(commands if len(commands) > 1 else commands * 2):
        env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
        made.append(runs.start([*command, *FLAGS], env=environment(devices=1, **env)))
    try:
        yield made
    finally:
        for process in made:
            process.kill()


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


def test_two_processes_stopped_at_one_step_and_gone_on_with_as_one(tmp_path):
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
def test_two_processes_to_the_end_and_evaluated_by_two(tmp_path):
    with pair(arguments(LM, lm(), tmp_path)) as both:
        (code, out, err), (other, silent, err1) = ended(both)
    assert (code, other) == (0, 0), out + err + err1
    assert "result.json" in out and "result" not in silent
    as_one(tmp_path)
    one = tmp_path / "one"
    shutil.copytree(tmp_path, one, ignore=shutil.ignore_patterns("one"))
    command = ["-m", "jojax.evaluate", "--lengths=16,32", "--workdir"]
    runs.run([*command, str(one)], env=environment(devices=1))
    with pair([*command, str(tmp_path)]) as both:
        (code, out, err), (other, silent, err1) = ended(both)
    assert (code, other) == (0, 0), out + err + err1
    key = "extrapolation-16-32"
    for length, scores in runs.result(one)[key]["lengths"].items():
        found = runs.result(tmp_path)[key]["lengths"][length]
        assert found["scored"] == scores["scored"] and found["loss"] == pytest.approx(scores["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_ends_the_other_in_time(dead, tmp_path):
    long = lm(steps=20_000, eval__every_steps=0, checkpoint__every_steps=50)
    with pair(arguments(LM, long, tmp_path)) as both:
        until_step(both, tmp_path, 20)
        both[dead].kill()
        start = time.monotonic()
        code, out, err = ended([both[1 - dead]], within=60)[0]
        assert time.monotonic() - start < 20, err
    assert code not in (0, 143), out + err
    assert "another process of this run is gone" in err or "another task died" in err, err


@pytest.mark.slow
def test_a_process_that_fails_alone_says_why_and_the_other_ends(tmp_path):
    """The second has other data than the first."""
    bad = lm(data__valid_path="gone.jsonl")
    with pair(arguments(LM, lm(), tmp_path), arguments(LM, bad, tmp_path)) as both:
        (code, _, err), (other, _, err1) = ended(both, within=60)
    assert other == 2 and re.search(r"error: .*gone\.jsonl does not exist", err1), err1
    assert code != 0 and "another" in err, err


@pytest.mark.slow
def test_bad_input_is_told_by_all_alike(tmp_path):
    with pair(arguments(LM, lm(model__heads=3), tmp_path)) as both:
        both = ended(both, within=60)
    for code, _, err in both:
        assert code == 2 and "model.heads = 3: change one" in err, err


@pytest.mark.slow
def test_a_workdir_that_is_not_shared(tmp_path):
    with pair(*(arguments(LM, lm(), tmp_path / str(rank)) for rank in (0, 1))) as both:
        both = ended(both, within=90)
    for code, _, err in both:
        assert code == 2 and re.search(r"error: process 1 does not see what process 0 writes to .*shared?", err), err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


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
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
