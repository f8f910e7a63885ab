"""Checkpoints in `workdir/checkpoints/<step>/{state, meta}` through orbax: complete or absent, checked first.

Every checkpoint lists the size and CRC of its files (seal.py) from before it becomes visible on, because
orbax restores some damaged arrays without a word. The folder must be a local or mounted path that all
processes share.
"""

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jojax import hosts
from jojax.errors import UserError, first_line
from jojax.seal import damage, seal, sealed
from jojax.tree import leaves, named_map

SCHEMA = 1
READING = 24 * 3600  # seconds, until the first process has read a checkpoint; where it dies, the wait ends


def _not_orbax(record: logging.LogRecord) -> bool:
    ours = record.name == "asyncio" and "orbax" in record.getMessage()
    return not ours and f"{os.sep}orbax{os.sep}" not in record.pathname


def quiet_orbax() -> None:
    """Let orbax's errors speak by their exceptions alone.

    Drops its log records (about 20 a save, and a traceback for each error that it raises anyway) and what
    asyncio and Python say of the other array writes of a save that failed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_orbax)
    before = sys.unraisablehook
    if getattr(before, "__name__", "") == "_not_closed_loop":
        return

    def _not_closed_loop(event):
        if str(event.exc_value) != "Event loop is closed":
            before(event)

    sys.unraisablehook = _not_closed_loop


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paths of a checkpoint and of a model that do not agree; empty = they fit."""

    missing: tuple[str, ...]  # the model has it, the checkpoint does not
    unexpected: tuple[str, ...]  # the checkpoint has it, the model does not
    shape: tuple[str, ...]  # 'path (old shape) -> (new shape)'

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shape)

    def __str__(self) -> str:
        parts = (("missing", self.missing), ("unexpected", self.unexpected), ("shape", self.shape))
        return "; ".join(f"{name}: {_some(paths)}" for name, paths in parts if paths)


def _some(paths: tuple[str, ...], most: int = 8) -> str:
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in leaves(tree).items()}


def difference(stored: Mapping[str, tuple], wanted: Mapping[str, tuple]) -> Difference:
    """Compare two {path: shape}."""
    both = [path for path in wanted if path in stored and wanted[path] != stored[path]]
    return Difference(
        missing=tuple(path for path in wanted if path not in stored),
        unexpected=tuple(path for path in stored if path not in wanted),
        shape=tuple(f"{path} {stored[path]} -> {wanted[path]}" for path in both),
    )


@contextlib.contextmanager
def _writing(folder: Path):
    """Full disk, missing permission and the like as one sentence; anything else passes through."""
    try:
        yield
    except (OSError, ValueError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore reports them as ValueError
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None:
            raise
        why = os.strerror(number)
        raise UserError(f"cannot write checkpoints to {folder}: {why}; make room or choose another workdir.") from error


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving it waits for the last save.

    keep: how many of the newest to keep. read_only: another run's folder, perhaps a live one; nothing in it
    is touched. Saving happens in the background; an error in it is raised by the
    next `save`, `wait` or `close`. UserError where the folder cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int = 2, read_only: bool = False):
        quiet_orbax()
        self.root = Path(workdir).resolve() / "checkpoints"
        self._read_only = read_only
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file: checkpoints go into a folder of that name; remove it.")
        if read_only and not self.root.is_dir():
            raise UserError(f"there are no checkpoints in {workdir}: give the workdir of a run.")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            save_interval_steps=0 if read_only else 1,
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        with _writing(self.root):
            self._manager = ocp.CheckpointManager(self.root, options=options, item_handlers=handlers)

    def _seal(self) -> None:
        """Orbax calls this when a checkpoint's files are complete and it has not yet its final name."""
        for folder in self.root.iterdir():
            if folder.is_dir() and not sealed(folder):
                seal(folder)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        # an error on the way out must not hide the one that ends the run
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self.close()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Save `state` (a pytree of arrays) and `meta` (JSON: config name, clock, model description, …).

        Returns at once, the state may be donated right after. False when `step` is already saved. Check
        `state.bad_step` first: a bad state is never worth a checkpoint.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({"schema": SCHEMA, **meta})
        )
        with _writing(self.root):
            return self._manager.save(step, args=items)

    def wait(self) -> None:
        """Block until the last save is complete."""
        with _writing(self.root):
            self._manager.wait_until_finished()

    def close(self) -> None:
        with _writing(self.root):
            self._manager.close()

    def restore_latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """(state, meta) of the newest checkpoint that can be read, or None where there is none.

        like: the state's ShapeDtypeStructs with shardings, or a function of the step to them; the mesh may
        differ from the one that saved. A damaged checkpoint is named in one line, set aside as
        `<step>.damaged`, and the one before it is taken. UserError when it holds another model (the
        differences listed) or when none can be read.
        """
        steps, aside = self.steps(), list(self.root.glob("*.damaged"))
        for step in reversed(steps):
            why = _verdict(self.root / str(step))
            if not why:
                wanted = like(step) if callable(like) else like
                self._check_model(step, wanted)
                try:
                    return self._restore(step, wanted)
                except Exception as error:
                    if sealed(self.root / str(step)):
                        raise  # the files are whole, so the reason lies elsewhere (memory, the machine)
                    why = first_line(error)
            self._set_aside(step, why)
        if steps or aside:
            raise UserError(f"none of the checkpoints in {self.root} can be read; remove the folder to start anew.")
        return None

    def _restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        items = ocp.args.Composite(state=ocp.args.StandardRestore(like), meta=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        if restored["meta"]["schema"] > SCHEMA:
            raise UserError(f"{self.root / str(step)} was written by a newer version of jojax; update jojax.")
        return restored["state"], restored["meta"]

    def _check_model(self, step: int, like: Any) -> None:
        try:
            stored = _shapes(self._manager.item_metadata(step)["state"].tree)
        except Exception:  # unreadable: `_restore` finds the same and says so
            return
        wanted = _shapes(like)
        found = difference(_only("params", stored), _only("params", wanted)) or difference(stored, wanted)
        if found:
            raise UserError(
                f"{self.root / str(step)} does not fit the model and optimiser of the config ({found}); "
                "choose another workdir, or set the config back to what the checkpoint was made with."
            )

    def _set_aside(self, step: int, why: str) -> None:
        bad, aside = self.root / str(step), "" if self._read_only else f"set aside as {step}.damaged, "
        hosts.say(f"checkpoint {bad} is damaged ({why}): {aside}trying the one before")
        if self._read_only:
            return
        if jax.process_index() == 0:
            bad.rename(bad.with_name(f"{step}.damaged"))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")
        self._manager.reload()


def _only(branch: str, shapes: Mapping[str, tuple]) -> dict[str, tuple]:
    return {path: shape for path, shape in shapes.items() if path.split("/")[0] == branch}


def _verdict(folder: Path) -> str:
    """What process 0 finds `damage` to be, everywhere: it alone reads all files, and all take the same checkpoint."""
    why = damage(folder) if jax.process_index() == 0 else ""
    if jax.process_count() == 1:
        return why
    hosts.barrier("verdict", READING)  # collectives give up sooner
    text = np.zeros(256, np.uint8)
    data = why.encode()[:256]
    text[: len(data)] = np.frombuffer(data, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0").decode(errors="replace")


def find(path: str | os.PathLike) -> Path:
    """The step folder that `path` means: itself, or the newest in a workdir or checkpoints folder."""
    path = Path(path).resolve()
    if (path / "state").is_dir():
        return path
    for folder in (path / "checkpoints", path):
        steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
        if steps:
            return folder / str(max(steps))
    raise UserError(f"no checkpoint at {path}: give a workdir, its checkpoints folder, or one step's folder.")


def restore_params(path: str | os.PathLike, params: Any, branch: str = "params") -> tuple[Any, Difference]:
    """`params` with every array replaced that the checkpoint at `path` holds under the same path and shape.

    branch: of the state, params or ema, where they are read from.
    params: arrays (or ShapeDtypeStructs with shardings), which give dtypes and shardings; what the checkpoint
    lacks is returned as it came. A part of a joint encoding may come from a checkpoint of that encoding alone.
    The Difference says what was not taken over. UserError when nothing fits.
    """
    quiet_orbax()
    folder = find(path)
    if why := _verdict(folder):
        raise UserError(f"checkpoint {folder} is damaged ({why}).")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = _shapes(reader.metadata(folder / "state").item_metadata.tree.get(branch, {}))
        if not stored:
            raise UserError(f"checkpoint {folder} holds no {branch}.")
        wanted = _shapes(params)
        source = {name: name if name in stored else re.sub(r"/of_(rotation|bias)(?=/)", "", name) for name in wanted}
        there = {name: stored.pop(source[name]) for name in wanted if source[name] in stored}
        found = difference(stored | there, wanted)
        fitting = {name for name in there if there[name] == wanted[name]}
        if not fitting:
            raise UserError(f"checkpoint {folder} shares no parameter with this model ({found}).")
        like = {source[n]: leaf for n, leaf in leaves(params).items() if n in fitting}
        read = _read(reader, folder / "state", like, branch)
        taken = {name: read[source[name]] for name in fitting}
    return named_map(lambda name, leaf: taken.get(name, leaf), params), found


def _read(reader: ocp.Checkpointer, folder: Path, like: Mapping[str, Any], branch: str) -> dict[str, Any]:
    """Arrays of a branch of the checkpoint by path, with the dtypes and shardings of `like`."""
    nested: dict[str, Any] = {}
    for name, leaf in like.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    item = {branch: nested}
    args = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    return leaves(reader.restore(folder, args=args)[branch])
