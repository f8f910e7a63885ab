"""Time in a run: seconds of training alone, cadence, ETA, and the signal that says the machine is wanted
back."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any


def every(step: int, n: int, last: int) -> bool:
    """Is something due that happens every `n` steps and at the `last` one? n = 0: at the last one only."""
    return step == last or (n > 0 and step > 0 and step % n == 0)


def format_seconds(seconds: float) -> str:
    """'45s', '3m05s', '2h07m', '1d04h'."""
    seconds = round(seconds)
    for big, small, unit, part in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "m"), (60, 1, "m", "s")):
        if seconds >= big:
            return f"{seconds // big}{unit}{seconds % big // small:02d}{part}"
    return f"{seconds}s"


class Clock:
    """Seconds spent training: stands still inside `paused()` (compiling, evaluation, saving), and `state`
    goes into the checkpoint, so total time and examples per second are right after any number of
    preemptions."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._since: float | None = now()  # None while paused
        self._seconds = self._waited = 0.0  # up to _since
        self._lap = (0, 0.0, 0.0)  # step, seconds, waited at the last lap

    @property
    def seconds(self) -> float:
        """Training time since the start of the run, all its processes' lives together."""
        return self._seconds + (self._now() - self._since if self._since is not None else 0.0)

    @contextlib.contextmanager
    def paused(self):
        """Time in here is not training time. Nests."""
        outer = self._since is None
        self._seconds, self._since = self.seconds, None
        try:
            yield
        finally:
            if not outer:
                self._since = self._now()

    @contextlib.contextmanager
    def waiting(self):
        """Time in here is training time lost to waiting for data."""
        start = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - start

    def lap(self, step: int) -> tuple[float, float]:
        """(steps per second, share of the time spent waiting for data) since the last lap or `begin`."""
        seconds, (step0, seconds0, waited0) = self.seconds, self._lap
        self._lap = (step, seconds, self._waited)
        spent = max(seconds - seconds0, 1e-9)
        return (step - step0) / spent, min((self._waited - waited0) / spent, 1.0)

    def begin(self, step: int) -> None:
        """The first lap starts here, after `step` steps."""
        self._lap = (step, self.seconds, self._waited)

    def state(self) -> dict[str, float]:
        """For the checkpoint's meta (JSON)."""
        return {"seconds": self.seconds, "waited": self._waited}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint's `state()`."""
        self._seconds, self._waited = float(state["seconds"]), float(state["waited"])
        self._since = self._now() if self._since is not None else None


class Preemption:
    """`with Preemption() as stop:` turns the first SIGTERM or Ctrl-C into `stop.requested` (the signal's
    name), so that the loop can save and leave; a later one ends the process at once. Those of the first SECONDS
    are the same request: SLURM sends two where it takes a job back. Signals are Python's to catch in the main
    thread only: elsewhere this does nothing."""

    SIGNALS, SECONDS = (signal.SIGTERM, signal.SIGINT), 2.0

    def __init__(self):
        self.requested: str | None = None
        self._before: dict[int, Any] = {}

    def _handle(self, number, _):
        if self.requested:
            if time.monotonic() > self._since + self.SECONDS:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.requested, self._since = signal.Signals(number).name, time.monotonic()
        # not print(): the signal may have come in the middle of one
        os.write(2, f"\n{self.requested}: saving and stopping after this step; once more stops at once\n".encode())

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {sig: signal.signal(sig, self._handle) for sig in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for sig, handler in self._before.items():
            signal.signal(sig, handler)
