"""The points of a sweep: names, commands, whether they can run, and how far they are."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jojax import config, writer
from jojax.clock import format_seconds
from jojax.errors import UserError


class Point(NamedTuple):
    workdir: Path
    command: list[str]  # what Python is given
    overrides: dict
    spec: str  # FILE.py[:arg]


def of(spec: str) -> list[Point]:
    """Of a config's sweep(). UserError where it has none."""
    path, own = config.split_spec(spec)
    sweep = getattr(config.module(spec), "sweep", None)
    if sweep is None:
        raise UserError(f"{path} has no sweep(): it yields override dicts, such as {{'arg': 'encoding=rope'}}")
    out = []
    for point in sweep():
        overrides = dict(point)
        arg = ",".join(filter(None, (own, overrides.pop("arg", None))))
        full = f"{path}:{arg}" if arg else str(path)
        name = config.run_name(full) + "".join(f"-{k}={v}" for k, v in overrides.items())
        flags = [f"--config.{k}={v}" for k, v in overrides.items()]
        workdir = Path("runs") / name.replace("/", "_")
        command = ["-m", "jojax.train", f"--config={full}", *flags, f"--workdir={workdir}"]
        out.append(Point(workdir, command, overrides, full))
    return out


def finished(workdir: Path) -> bool:
    try:
        record = writer.read_result(workdir)
    except UserError:  # the run itself says so, and fails
        return False
    return record is not None and record["state"] == "finished"


def progress(workdir: Path) -> str:
    """'to do', 'finished  loss 4.71', 'running  step 300/1500  loss 5.123  ETA 2m10s (told 12s ago)'.

    A run that was interrupted is 'running', too: how long ago it told its last line says which it is."""
    try:
        record, lines = writer.read_result(workdir), writer.read_metrics(workdir)
    except UserError as error:
        return str(error)  # the run itself says the same, and fails
    if record is None:
        return "to do"
    if record["state"] == "finished":
        return "finished" + "".join(f"  {k} {v:.4g}" for k, v in record.get("metrics", {}).items() if k == "loss")
    c, lines = record["config"], [line for line in lines if "train/loss" in line]
    if not lines:
        return f"{record['state']}  no step told yet"
    last = lines[-1]
    ago = format_seconds(max(0, time.time() - (workdir / "metrics.jsonl").stat().st_mtime))
    unit, rate = next(((k, v) for k, v in last.items() if k.endswith("_per_second")), ("", 0))
    rate /= c["data"]["length"] if unit == "tokens_per_second" else 1
    left = (c["steps"] - last["step"]) * c["batch_size"]
    eta = f"  ETA {format_seconds(left / rate)}" if rate else ""
    return f"{record['state']}  step {last['step']}/{c['steps']}  loss {last['train/loss']:.4g}{eta} (told {ago} ago)"


def wrong(point: Point) -> str:
    """Why the point cannot run, or '': the whole training step is traced by shape, without data, on this machine's
    CPU and whatever the mesh."""
    import jax

    from jojax import dry_run

    jax.config.update("jax_platforms", "cpu")  # in this process: its runs need the accelerators
    try:
        made = config.apply_overrides(config.load(point.spec), point.overrides)
        made.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1, "sequence": 1})
        dry_run.traced(config.validate(made), point.spec)
    except UserError as error:
        return str(error)
    return ""


def check(points: list[Point]) -> None:
    """UserError with a line for each point that cannot run."""
    todo = [point for point in points if not finished(point.workdir)]
    print(f"{len(todo)} of {len(points)} points to do; each is built by shape first", file=sys.stderr, flush=True)
    found = [f"{point.workdir}: {why}" for point in todo if (why := wrong(point))]
    if found:
        lines = "\n  ".join(found)
        raise UserError(f"nothing was started, since {len(found)} of {len(points)} points cannot run:\n  {lines}")
