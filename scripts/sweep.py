"""Run every point of a config's `sweep()`, one after the other or `--jobs N` at a time.

    python scripts/sweep.py --config configs/quickstart.py [--jobs 2] [--print]

A point is a dict of overrides; its key `arg` is the part behind the colon. Each point runs as
`python -m jojax.train` in runs/<config>-<what changes>; finished points are skipped, interrupted ones go on, a failed
one is told at the end and does not stop the rest (exit code 1).

Of several jobs each has an even share of this process's CPU cores, and what it prints goes to runs/NAME.log. On CPUs
small models train faster so: two runs on a core each take less time than one after the other on both.
"""

import argparse
import os
import queue
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax import config, writer  # noqa: E402 — the repository's own package, installed or not
from jojax.errors import UserError  # noqa: E402


def points(spec):
    """[(workdir, command)] of a config's sweep. UserError where it has none or a point does not load."""
    path, own = config.split_spec(spec)
    sweep = getattr(config.module(spec), "sweep", None)
    if sweep is None:
        raise UserError(f"{path} has no sweep(): it yields override dicts, such as {{'arg': 'encoding=rope'}}")
    out = []
    for point in sweep():
        overrides = dict(point)
        arg = ",".join(filter(None, (own, overrides.pop("arg", None))))
        full = f"{path}:{arg}" if arg else str(path)
        config.apply_overrides(config.load(full), overrides)  # fails here, before anything runs
        name = config.run_name(full) + "".join(f"-{k}={v}" for k, v in overrides.items())
        flags = [f"--config.{k}={v}" for k, v in overrides.items()]
        workdir = Path("runs") / name.replace("/", "_")
        out.append((workdir, ["-m", "jojax.train", f"--config={full}", *flags, f"--workdir={workdir}"]))
    return out


def state(workdir):
    try:
        return (writer.read_result(workdir) or {"state": "to do"})["state"]
    except UserError as error:
        return str(error)  # the run itself says the same, and fails


STOPPED = (143, -2, 130)  # by a signal that was for the sweep too


def run(todo, jobs):
    """-> workdirs of the points that failed. SystemExit where the sweep itself was asked to stop."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = queue.SimpleQueue()
    for job in range(jobs):
        shares.put(cores[job::jobs])

    def one(number, workdir, command):
        told = f"[{number}/{len(todo)}] {workdir}"
        now = state(workdir)
        print(f"{told}: {now}", flush=True)
        if now == "finished":
            return 0
        if jobs == 1:
            return subprocess.run([sys.executable, *command], check=False).returncode
        share, log = shares.get(), workdir.with_name(f"{workdir.name}.log")
        log.parent.mkdir(exist_ok=True)
        if share:
            os.sched_setaffinity(0, share)  # of this thread, and of what it starts
        with log.open("a") as out:
            code = subprocess.run([sys.executable, *command], check=False, stdout=out, stderr=out).returncode
        shares.put(share)
        print(f"{told}: {state(workdir)}" + (f", exit code {code}, see {log}" if code else ""), flush=True)
        return code

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, number, *point) for number, point in enumerate(todo, 1)]
        codes = []
        for future in waiting:
            codes.append(future.result())
            if codes[-1] in STOPPED:
                pool.shutdown(cancel_futures=True)
                sys.exit(codes[-1])
    return [workdir for (workdir, _), code in zip(todo, codes, strict=True) if code]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="configs/FILE.py[:arg]")
    parser.add_argument("--jobs", type=int, default=1, help="so many points at a time")
    parser.add_argument("--print", action="store_true", help="show the points and run nothing")
    args = parser.parse_args()
    todo = points(args.config)
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: give the number of points to run at a time, at least 1")
    if args.print:
        for number, (workdir, command) in enumerate(todo, 1):
            print(f"[{number}/{len(todo)}] {workdir}: {state(workdir)}")
            print("   ", shlex.join(["python", *command]))
        return
    failed = run(todo, args.jobs)
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
