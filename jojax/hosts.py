"""The processes of one run: when there are several, how they find each other, and how none waits for one that is gone.

jax.distributed is started by the three variables GIVEN, by a cluster's full set (CLUSTERS) where it names more than one
process, or by `--distributed`, which a Cloud TPU pod needs; the rest is read by jax's own detection.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from jojax.errors import UserError, first_line
from jojax.writer import writable

flags.disclaim_key_flags()  # --help of a command lists what is defined here, too

GIVEN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# cluster: (what says that there are several processes, what else jax's detection reads there)
CLUSTERS = {
    "SLURM": ("SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")),
    "a TPU pod": ("TPU_WORKER_HOSTNAMES", ("TPU_WORKER_ID",)),
    "Kubernetes": ("JOB_COMPLETION_INDEX", ("KUBERNETES_SERVICE_HOST",)),
}
ALONE = "--nodistributed runs this process alone"
# statuses of a collective or a barrier that another process did not come to
LOST = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|[Gg]loo|NCCL|coordination service")
PARTING, SHARED = 5, 30  # seconds: until a process that failed goes without the others; until they see its file


def define_flags() -> None:
    flags.DEFINE_boolean("distributed", None, f"join the cluster's processes; default: where it names several. {ALONE}")
    flags.DEFINE_integer("connect_timeout", 300, "seconds in which all processes must have started", lower_bound=1)
    flags.DEFINE_integer("heartbeat_timeout", 100, "seconds of silence that mean a process is dead", lower_bound=1)


def start() -> None:
    """Join the other processes of the run, if there are any; to be called before anything is computed."""
    FLAGS = flags.FLAGS
    asked, wait, silence = FLAGS.distributed, FLAGS.connect_timeout, FLAGS.heartbeat_timeout
    if asked is False:
        return
    how = given(os.environ)
    if how.get("num_processes") == 1 or not (how or asked or of_several(os.environ)):
        return
    import jax

    where = how.get("coordinator_address", "the first host")

    def too_late():
        told = f"not all processes came together within --connect_timeout={wait} seconds"
        print(
            f"error: {told}: start the same command for each, where {where} can be reached", file=sys.stderr, flush=True
        )
        os._exit(2)

    timer = threading.Timer(wait, too_late)  # jax's own time-out, which is longer, ends in an abort
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**how, initialization_timeout=wait + 60, heartbeat_timeout_seconds=silence)
    except ValueError as error:
        raise UserError(
            f"jax finds no cluster here ({error}): set {', '.join(GIVEN)}, start the command with srun on SLURM, or "
            f"install jax[k8s] on Kubernetes; {ALONE}"
        ) from error
    except RuntimeError as error:
        raise UserError(f"jax.distributed does not start with {where}: {first_line(error)}") from error
    finally:
        timer.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax took it for a service; the loop has clock.Preemption


def given(env: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of jax.distributed by GIVEN, {} where none is set. UserError: some are, or make no sense."""
    there = [name for name in GIVEN if env.get(name)]
    if not there:
        return {}
    if missing := sorted(set(GIVEN) - set(there)):
        raise UserError(f"{', '.join(there)} is set, but {', '.join(missing)} is not: set all three or none")
    address, count, index = (env[name] for name in GIVEN)
    whole = all(n.isdecimal() for n in (count, index, address.rpartition(":")[2]))
    if not whole or int(index) >= int(count):
        told = ", ".join(f"{name}={env[name]}" for name in GIVEN)
        raise UserError(f"{told}: give HOST:PORT, how many processes there are, and this one's number from 0 on")
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def of_several(env: Mapping[str, str]) -> bool:
    """Do a cluster's variables say that this is one of several processes? UserError where they say so in part."""
    for name, (count, others) in CLUSTERS.items():
        value = env.get(count, "")
        # of an indexed job: how many there are knows Kubernetes alone
        several = value != "" if name == "Kubernetes" else "," in value or (value.isdecimal() and int(value) > 1)
        if several and (missing := [other for other in others if not env.get(other)]):
            raise UserError(
                f"{count}={value} says that this is one of several processes on {name}, but {', '.join(missing)} is "
                f"not set: start each as such a process (on SLURM with srun); {ALONE}"
            )
        if several:
            return True
    return False


@contextlib.contextmanager
def together(workdir: str | os.PathLike):
    """Around all that the processes of a run do in `workdir`: what ends one ends the others, soon, with a sentence.

    One that fails prints why and waits a moment for the others to fail alike; those that have not are told by jax, or
    by the collective that it does not come to. Of a single process nothing is changed."""
    import jax

    try:
        check_shared(Path(workdir))
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1:
            raise
        code, lost = 1, isinstance(error, RuntimeError | ValueError) and LOST.search(str(error))  # jax raises both
        if isinstance(error, UserError):
            code, told = 2, f"error: {error}"
        elif lost:
            told = (
                f"error: another process of this run is gone or does not answer ({first_line(error)}); what it printed "
                "says why. The same command on all hosts goes on from the last checkpoint"
            )
        else:
            told = traceback.format_exc()
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(told, file=sys.stderr, flush=True)
            sys.stdout.flush()
        with contextlib.suppress(RuntimeError):
            if not lost:
                barrier("parting", PARTING)
                sys.exit(code)
        os._exit(code)  # jax's own end would wait for those that do not come


def barrier(name: str, seconds: float) -> None:
    """Until all processes are here. RuntimeError where they are not within so many seconds."""
    from orbax.checkpoint import multihost

    multihost.get_barrier_sync_fn()(key=f"jojax {name}", timeout_ms=round(seconds * 1000))


def check_shared(folder: Path) -> None:
    """UserError on all processes where one does not see what the first writes to `folder`."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return
    token, first = folder / ".shared", jax.process_index() == 0
    mark = np.frombuffer(os.urandom(4), np.uint32)
    if first:
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            token.write_text(str(mark))
    mark = str(multihost_utils.broadcast_one_to_all(mark))
    until = time.monotonic() + SHARED  # network file systems may take their time
    while not (seen := token.exists() and token.read_text() == mark) and time.monotonic() < until:
        time.sleep(0.1)
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.asarray(seen)))
    if first:
        token.unlink()
        with contextlib.suppress(OSError):  # nothing is left where nothing was
            folder.rmdir()
    if blind.size:
        raise UserError(
            f"process {', '.join(map(str, blind))} does not see what process 0 writes to {folder}: "
            "--workdir must be a folder that all hosts share"
        )


def say(*parts) -> None:
    """Print a line, once for all processes."""
    import jax

    if jax.process_index() == 0:
        print(*parts, flush=True)
