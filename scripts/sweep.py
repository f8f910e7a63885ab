"""Run every point of a config's `sweep()`: here, one after the other or `--jobs N` at a time, or on a cluster.

    python scripts/sweep.py --config configs/quickstart.py [--jobs 2]
    python scripts/sweep.py --config configs/quickstart.py --slurm partition=gpu nodes=2 gpus-per-node=8 \\
        ntasks-per-node=8 time=4:00:00
    python scripts/sweep.py --config configs/quickstart.py --tpu NAME --zone ZONE | bash

A point is a dict of overrides; its key `arg` is the part behind the colon. Each point runs as
`python -m jojax.train` in runs/<config>-<what changes>. Before anything runs, all that are not finished are built by
shape, and those that cannot run are told; then finished points are skipped, interrupted ones go on, a failed one is
told at the end and does not stop the rest (exit code 1). `--print` shows for each what would run, or how far it is.

Of several jobs here each has an even share of this process's CPU cores, and what it prints goes to runs/NAME.log. On
CPUs small models train faster so: two runs on a core each take less time than one after the other on both.

`--slurm` submits a job for each point, with options of sbatch as key=value; of several tasks (one for each GPU) each is
a process of the run. Output goes to runs/NAME.log. A job that is preempted, or nears its time limit, saves and goes
back to the queue; a point that is in the queue is not submitted again. `--tpu` prints the commands for a Cloud TPU pod,
to be run one after the other; every worker must have this repository in ~/jojax, and a runs/ in it that all share.
"""

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax.errors import UserError  # noqa: E402 — the repository's own package, installed or not
from scripts.launch import cluster, local, points  # noqa: E402


def to_slurm(todo, given, show):
    """Submit what is not finished, or show the scripts."""
    from jojax.loop import EXIT_PREEMPTED

    waiting = {} if show else cluster.queued()
    for number, point in enumerate(todo, 1):
        now = waiting.get(point.workdir.name)
        told = f"[{number}/{len(todo)}] {point.workdir}: {points.progress(point.workdir)}"
        if now or points.finished(point.workdir):
            print(told + (f" ({now})" if now else ""))
            continue
        text = cluster.script(point.workdir, point.command, given, EXIT_PREEMPTED)
        if show:
            print(told, "sbatch <<'END'", text + "END\n", sep="\n")
        else:
            point.workdir.parent.mkdir(exist_ok=True)
            print(f"{told}, submitted as job {cluster.submit(text)}", flush=True)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="configs/FILE.py[:arg]")
    parser.add_argument("--jobs", type=int, help="so many points at a time on this machine")
    parser.add_argument(
        "--slurm", nargs="*", metavar="KEY=VALUE", help="submit SLURM jobs with these options of sbatch"
    )
    parser.add_argument("--tpu", metavar="NAME", help="print the commands for this Cloud TPU pod")
    parser.add_argument("--zone", help="of the pod")
    parser.add_argument("--print", action="store_true", help="show the points and run nothing")
    args = parser.parse_args()
    if sum(given is not None for given in (args.jobs, args.slurm, args.tpu)) > 1:
        raise UserError("give one of --jobs (this machine), --slurm and --tpu")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: give the number of points to run at a time, at least 1")
    if bool(args.tpu) != bool(args.zone):
        raise UserError("--tpu NAME and --zone ZONE go together: they name the pod")
    return args


def main():
    args = parsed()
    todo = points.of(args.config)
    points.check(todo)
    if args.slurm is not None:
        to_slurm(todo, cluster.options(args.slurm), args.print)
    elif args.tpu or args.print:
        for number, point in enumerate(todo, 1):
            print(f"# [{number}/{len(todo)}] {point.workdir}: {points.progress(point.workdir)}")
            command = shlex.join(["python", *point.command])
            print(cluster.tpu(point.command, args.tpu, args.zone) if args.tpu else command)
    elif failed := local.run(todo, args.jobs or 1):
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
