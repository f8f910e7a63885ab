"""Run every point of a config's `sweep()`, one after the other.

    python scripts/sweep.py --config configs/quickstart.py [--print]

A point is a dict of overrides; its key `arg` is the part behind the colon. Each point runs as
`python -m jojax.train` in runs/<config>-<what changes>; finished points are skipped, interrupted ones go on, a failed
one is told at the end and does not stop the rest (exit code 1).
"""

import argparse
import shlex
import subprocess
import sys
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="configs/FILE.py[:arg]")
    parser.add_argument("--print", action="store_true", help="show the points and run nothing")
    args = parser.parse_args()
    failed = []
    todo = points(args.config)
    for number, (workdir, command) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {workdir}: {state(workdir)}", flush=True)
        if args.print:
            print("   ", shlex.join(["python", *command]))
        elif state(workdir) != "finished":
            done = subprocess.run([sys.executable, *command], check=False)
            if done.returncode in (143, -2, 130):
                sys.exit(done.returncode)  # the sweep itself was asked to stop
            if done.returncode:
                failed.append(workdir)
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
