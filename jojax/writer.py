"""What a run leaves in its workdir: TensorBoard events (clu), metrics.jsonl, result.json; and the terminal's
lines."""

import contextlib
import fcntl
import json
import math
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jojax.clock import format_seconds
from jojax.errors import UserError

Scalar = Any  # float, int, NumPy or JAX scalar


class _SummaryWriter:
    """clu's SummaryWriter over tensorboardX, without TensorFlow: what is asked of it here."""

    def __init__(self, logdir: str, purge_step: int | None = None):
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(str(logdir), purge_step=purge_step)

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]):
        for key, value in scalars.items():
            self._writer.add_scalar(key, float(value), step)

    def flush(self):
        self._writer.flush()

    def close(self):
        self._writer.close()


def metric_writers():
    """clu.metric_writers without TensorFlow: its only use of it, summary_writer, is given to it
    beforehand."""
    name = "clu.metric_writers.summary_writer"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__dict__["SummaryWriter"] = _SummaryWriter
        sys.modules[name] = module
    from clu import metric_writers as clu_writers

    return clu_writers


class Writer:
    """Writes the numbers of a run; on processes other than the first it does nothing.

    start: the step that a run goes on from; later lines of metrics.jsonl are dropped, later TensorBoard
    events hidden, so each step is there once. 0 = from the beginning: the old file is emptied. Write the
    lines of a step before its checkpoint, or a kill between the two loses them. UserError where the folder
    cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike, start: int = 0, primary: bool = True):
        self._primary = primary
        if not primary:
            return
        workdir = Path(workdir)
        self._path = workdir / "metrics.jsonl"
        with writable(self._path):
            workdir.mkdir(parents=True, exist_ok=True)
            _drop_after(self._path, start)
            self._file = self._path.open("a")
            clu = metric_writers()
            events = _SummaryWriter(str(workdir), purge_step=start + 1 if start else None)
            self._events = clu.AsyncWriter(events)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def scalars(self, step: int, values: Mapping[str, Scalar]) -> None:
        """One line {"step": step, name: number, …} (not finite = null) and the same to TensorBoard."""
        if not self._primary:
            return
        line = json.dumps({"step": int(step)} | plain(values), allow_nan=False)
        with writable(self._path):
            self._file.write(line + "\n")
            self._file.flush()  # into the kernel: survives a kill of the process
            self._events.write_scalars(int(step), dict(values))

    def print(self, line: str) -> None:
        if self._primary:
            print(line, flush=True)

    def close(self) -> None:
        if self._primary:
            with writable(self._path):
                self._file.close()
                self._events.close()


def progress_line(
    step: int,
    steps: int,
    values: Mapping[str, Scalar],
    rate: float,
    unit: str,
    waiting: float,
    left: float,
) -> str:
    """'step 300/1500  loss 5.123  accuracy 0.21  12,345 tokens/s  data 3%  ETA 2m10s'.

    rate: `unit`s ('tokens', 'images') a second; waiting: share of the time spent waiting for data (told from
    1%); left: seconds to the end.
    """
    numbers = [f"{name} {float(value):.4g}" for name, value in values.items()]
    data = [f"data {waiting:.0%}"] if waiting >= 0.01 else []
    parts = [f"step {step:>{len(str(steps))}}/{steps}", *numbers, f"{rate:,.0f} {unit}/s", *data]
    return "  ".join([*parts, f"ETA {format_seconds(left)}"])


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; [] where there is none. A line torn by a kill is left out."""
    return [values for _, values in _whole_lines(Path(workdir) / "metrics.jsonl")]


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, its values). UserError names a line that is none of ours."""
    if not path.exists():
        return []
    # only the last line can be torn, and then it has no newline
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or "step" not in values:
            raise UserError(f"{path}, line {number} is no line of metrics: mend or remove it")
        found.append((line, values))
    return found


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line, values in _whole_lines(path) if step and values["step"] <= step]
    if path.exists():
        _replace(path, "".join(kept))


@contextlib.contextmanager
def only_one(workdir: str | os.PathLike):
    """Holds `workdir` for one run; a second one gets a UserError. The lock ends with the process, however it ends."""
    path = Path(workdir) / ".lock"
    with _locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path):
    """The open file, for this process alone. What was locked may have lost its name meanwhile, to a run that ended."""
    while True:
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{path.parent} is in use by another run: wait for it, or choose another --workdir"
            ) from None
        except OSError:  # a file system without locks
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def write_result(workdir: str | os.PathLike, result: Mapping[str, Any]) -> Path:
    """Write DIR/result.json in one piece: a reader sees the old file or the new one. UserError where it
    cannot."""
    path = Path(workdir) / "result.json"
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    return path


def read_result(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """DIR/result.json, or None where there is none. UserError where it is not JSON."""
    path = Path(workdir) / "result.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it, the next run writes it anew.") from None
    if not isinstance(found, dict) or "config" not in found or "state" not in found:
        raise UserError(f"{path} is no record of a run (config and state are missing); remove it.")
    return found


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


class writable:
    """OSErrors as one sentence."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, OSError):
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; make room or choose another workdir."
            ) from error


def plain(value: Any) -> Any:
    """JSON's types only: mappings to dicts, tuples and arrays to lists, scalars to Python's, non-finite to
    None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return plain(value.tolist())
    return plain(value.to_dict()) if hasattr(value, "to_dict") else str(value)  # ConfigDict
