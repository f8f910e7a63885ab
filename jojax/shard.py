"""Device meshes and the one table that says how arrays lie on them.

Axes: `data` and `fsdp` both split the batch; `fsdp` also splits large parameters; `tensor` and `sequence` are
reserved (size 1). Everything runs under plain `jax.jit` with `NamedSharding`s on `AxisType.Auto` meshes.
"""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jojax.errors import UserError
from jojax.tree import named_map

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH_AXES = ("data", "fsdp")
SMALLEST_SPLIT = 2**14  # elements; below this a gather costs more than the memory it saves

# (pattern in the '/'-joined path, leading axes that are never split); the first match holds. The paths of
# optimiser moments and of the EMA end in the parameter's path, so they follow the same row. Axis 0 of what is
# stacked under `blocks` is scanned over: splitting it would gather every layer.
RULES: tuple[tuple[str, int], ...] = ((r"(^|/)blocks/", 1), (r"", 0))


def make_mesh(mesh_cfg: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with the axes data, fsdp, tensor, sequence over `devices` (default: all of the job's).

    `mesh_cfg`: sizes by axis name; one of them may be -1 = the devices that the others leave.
    Raises UserError naming `mesh.*` when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    unknown = sorted(set(mesh_cfg) - set(AXES))
    if unknown:
        raise UserError(f"mesh.{unknown[0]} is not a mesh axis; the axes are {', '.join(AXES)}.")
    sizes = {axis: int(mesh_cfg.get(axis, 1)) for axis in AXES}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise UserError(f"mesh.{axis}={size} must be a positive size, or -1 for the remaining devices.")
    for axis in ("tensor", "sequence"):
        if sizes[axis] != 1:
            raise UserError(f"mesh.{axis}={sizes[axis]} is not supported: set mesh.{axis}=1, use data and fsdp.")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"only one of the mesh sizes may be -1, but mesh.{' and mesh.'.join(free)} are.")
    given = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = len(devices) // given
    if math.prod(sizes.values()) != len(devices) or not all(sizes.values()):
        asked = " · ".join(f"mesh.{axis}={mesh_cfg.get(axis, 1)}" for axis in AXES)
        raise UserError(f"{asked} does not fit {len(devices)} devices: the sizes must multiply to {len(devices)}.")
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def parameter_spec(path: str, shape: tuple[int, ...], fsdp: int) -> P:
    """Where `fsdp` splits one array: its largest axis that `fsdp` divides, or nothing. `path` is
    '/'-joined."""
    if fsdp == 1 or math.prod(shape) < SMALLEST_SPLIT:
        return P()
    skip = next(lead for pattern, lead in RULES if re.search(pattern, path))
    axes = [axis for axis in range(skip, len(shape)) if shape[axis] % fsdp == 0]
    if not axes:
        return P()
    axis = max(axes, key=lambda i: shape[i])
    return P(*(None,) * axis, "fsdp")


def shardings(tree: Any, mesh: Mesh) -> Any:
    """NamedSharding of each leaf of `tree` (arrays or ShapeDtypeStructs; parameters, a whole TrainState,
    …)."""
    fsdp = mesh.shape["fsdp"]
    return named_map(lambda name, leaf: NamedSharding(mesh, parameter_spec(name, leaf.shape, fsdp)), tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0 split over data and fsdp, the other axes whole."""
    return NamedSharding(mesh, P(BATCH_AXES))


def check_batch(batch_size: int, mesh: Mesh, accumulate: int = 1) -> None:
    """UserError unless every device gets the same number of rows in each of the `accumulate`
    micro-batches."""
    data, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    unit = data * fsdp * accumulate
    if batch_size % unit or batch_size < 1:
        near = max(unit, round(batch_size / unit) * unit)
        raise UserError(
            f"batch_size={batch_size} must be divisible by mesh.data · mesh.fsdp · optim.accumulate = "
            f"{data} · {fsdp} · {accumulate} = {unit}; try batch_size={near}."
        )


def even(batch_size: int, mesh: Mesh) -> int:
    """The next multiple of the devices that split a batch; padding rows weigh nothing."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // parts) * parts


def local_rows(batch_size: int, mesh: Mesh) -> np.ndarray:
    """Row numbers of the global batch that this process must supply, ascending int64, as `to_global` expects
    them.

    On most machines they are one slice; where the mesh follows the wiring of a pod they need not be.
    """
    pieces = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in pieces]))


def to_global(batch: Any, mesh: Mesh) -> Any:
    """This process's rows [local, …] of each leaf → the global arrays [batch_size, …], split by
    `batch_sharding`."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch)


def any_process(flag: bool) -> bool:
    """True on every process when `flag` is true on at least one (a collective: call it at the same step
    everywhere)."""
    if jax.process_count() == 1:
        return bool(flag)
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


class Asked:
    """`asked(flag)` at every step of all processes: was `flag` true on at least one of them, LATE steps ago?

    The answer is the same everywhere, and late, so that no process waits for its devices to ask. A process that is
    alone is told at once."""

    LATE = 2

    def __init__(self, mesh: Mesh):
        self._votes: collections.deque[jax.Array] = collections.deque()
        self._shape, self._split = (mesh.size,), NamedSharding(mesh, P(AXES))
        self._most = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, flag: bool) -> bool:
        if jax.process_count() == 1:
            return flag
        mine = jax.make_array_from_callback(self._shape, self._split, lambda _: np.full(1, flag, np.int32))
        self._votes.append(self._most(mine))
        return len(self._votes) > self.LATE and bool(self._votes.popleft())
