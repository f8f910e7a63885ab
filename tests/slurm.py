"""A SLURM of one node on this machine, for tests: Debian's slurmctld, slurmd and slurm-client, run as root."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")

# jobs of `low` go back to the queue where one of `high` wants the node
CONF = """\
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing():
    """Why there can be no SLURM here, or ''."""
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "SLURM's daemons are started as root"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in made:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in made]


@contextlib.contextmanager
def cluster(folder):
    """-> the environment in which srun, sbatch, … speak to it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, ports=free_ports(2), host=socket.gethostname().partition(".")[0]))
    env = os.environ | {"SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as stack:
        for command in (["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf), "-N", "localhost"]):
            with (folder / f"{command[0]}.out").open("w") as out:
                daemon = subprocess.Popen(command, env=env, stdout=out, stderr=out)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
        wait_for(lambda: said(env, "sinfo", "--noheader", "--format=%t").strip() == "idle")
        try:
            yield env
        finally:
            said(env, "scancel", "--me")
            wait_for(lambda: not said(env, "squeue", "--noheader"))


def said(env, *command):
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else done.stderr


def wait_for(true, seconds=60):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)
