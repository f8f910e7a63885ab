"""Device meshes and the one table that says how arrays lie on them.

Axes:
- data, fsdp: both split the rows of a batch; fsdp also splits large parameters with their moments and average
- tensor: splits attention's heads, the MLP's units and the vocabulary, parameters and activations
- sequence: splits the sites of a row (text): activations, not parameters. Keys and values are gathered in each block,
  of sums along the path only the parts' totals

Everything runs under plain `jax.jit` with `NamedSharding`s on `AxisType.Auto` meshes; models find the mesh by being
traced in it (`within`).
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jojax.errors import UserError
from jojax.tree import named_map

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH_AXES = ("data", "fsdp")
SMALLEST_SPLIT = 2**14  # elements; below this a gather costs more than the memory it saves

# (pattern in the '/'-joined path, leading axes that are never split, axis over `tensor` counted from the last, what
# sizes it); the first match holds. The paths of optimiser moments and of the EMA end in the parameter's path, so they
# follow the same row. Axis 0 of what is stacked under `blocks` is scanned over: splitting it would gather every layer.
# An axis over `tensor` must be divisible, or stays whole where nothing in the config sizes it alone. `fsdp` takes the
# largest other axis that it divides.
_HEADS, _UNITS = "model.heads", "the MLP's width (model.mlp_ratio · model.width)"
RULES: tuple[tuple[str, int, int | None, str], ...] = (
    (r"(^|/)blocks/encoding/", 1, None, ""),
    (r"(^|/)encoding/", 0, None, ""),
    (r"(^|/)blocks/(query|recurrence/(value|gate|decay))/", 1, -2, _HEADS),
    (r"(^|/)blocks/(key|value)/", 1, -2, "model.kv_heads"),
    (r"(^|/)blocks/(recurrence/)?out/kernel$", 1, -3, _HEADS),
    (r"(^|/)blocks/mlp_(in|gate)/", 1, -1, _UNITS),
    (r"(^|/)blocks/mlp_out/kernel$", 1, -2, _UNITS),
    (r"(^|/)blocks/", 1, None, ""),
    (r"(^|/)embed/embedding$", 0, -2, ""),
    (r"(^|/)head/(kernel|bias)$", 0, -1, ""),
    (r"", 0, None, ""),
)


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
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"only one of the mesh sizes may be -1, but mesh.{' and mesh.'.join(free)} are.")
    given = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = len(devices) // given
    if math.prod(sizes.values()) != len(devices) or not all(sizes.values()):
        asked = " · ".join(f"mesh.{axis}={mesh_cfg.get(axis, 1)}" for axis in AXES)
        raise UserError(f"{asked} does not fit {len(devices)} devices: the sizes must multiply to {len(devices)}.")
    # an axis may have a part of a torus's side: 4×4×4 chips as 32 · 2
    laid = mesh_utils.create_device_mesh([sizes[axis] for axis in AXES], devices, allow_split_physical_axes=True)
    return Mesh(laid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_spec(path: str, shape: tuple[int, ...], fsdp: int, tensor: int = 1) -> P:
    """Where `tensor` and `fsdp` split one array, by RULES. `path` is '/'-joined. UserError: `tensor` does not divide
    what it must."""
    axes: list[str | None] = [None] * len(shape)
    lead, axis, sized_by = next(row[1:] for row in RULES if re.search(row[0], path))
    if tensor > 1 and axis is not None:
        if shape[axis] % tensor == 0:
            axes[axis] = "tensor"
        elif sized_by:
            raise UserError(
                f"mesh.tensor={tensor} must divide {sized_by} = {shape[axis]}: change mesh.tensor, or {sized_by}."
            )
    free = [i for i in range(lead, len(shape)) if axes[i] is None and shape[i] % fsdp == 0]
    if fsdp > 1 and free and math.prod(shape) >= SMALLEST_SPLIT:
        axes[max(free, key=lambda i: shape[i])] = "fsdp"
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """NamedSharding of each leaf of `tree` (arrays or ShapeDtypeStructs; parameters, a whole TrainState,
    …)."""
    sizes = mesh.shape["fsdp"], mesh.shape["tensor"]
    return named_map(lambda name, leaf: NamedSharding(mesh, parameter_spec(name, leaf.shape, *sizes)), tree)


def within(mesh: Mesh | None, function: Callable) -> Callable:
    """`function`, to be jitted, such that models which it traces find the mesh; as it is where there is nothing to
    split."""
    if mesh is None or mesh.size == 1:
        return function

    @functools.wraps(function)
    def traced(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def batch_sharding(mesh: Mesh, ndim: int = 1) -> NamedSharding:
    """Axis 0 split over data and fsdp, axis 1 over sequence, the other axes whole."""
    return NamedSharding(mesh, P(*(BATCH_AXES, "sequence")[:ndim]))


def check_sites(config: Any, mesh: Mesh) -> None:
    """UserError unless `sequence` splits the rows that `config` trains and evaluates."""
    n = mesh.shape["sequence"]
    if n > 1 and config.model.kind != "lm":
        raise UserError(
            f"mesh.sequence={n} splits texts (model.kind='lm'): the class token makes an image's sites odd in number. "
            "Set mesh.sequence=1, use data, fsdp and tensor."
        )
    check_lengths("data.length", (config.data.length,) if n > 1 else (), mesh)
    check_lengths("eval.lengths", config.eval.get("lengths", ()), mesh)


def check_lengths(key: str, lengths: Sequence[int], mesh: Mesh) -> None:
    """UserError unless `sequence` divides all lengths of rows that `key` asks for."""
    n = mesh.shape["sequence"]
    for length in lengths:
        if length % n:
            near = max(n, round(length / n) * n)
            raise UserError(f"mesh.sequence={n} must divide {key}: {length} is no multiple of it, {near} is.")


def device_bytes(tree: Any) -> int:
    """Of arrays or ShapeDtypeStructs with shardings, what lies on one device."""
    return sum(math.prod(t.sharding.shard_shape(t.shape)) * t.dtype.itemsize for t in jax.tree.leaves(tree))


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


@functools.cache  # every batch asks
def share(mesh: Mesh) -> tuple[int, int]:
    """(which, of how many) shares of a batch this process reads. Processes between which tensor or sequence lies need
    the same rows."""
    parts = even(1, mesh)
    rows = local_rows(parts, mesh)
    count = parts // len(rows)
    if count == jax.process_count():
        return jax.process_index(), count
    if np.any(rows != rows[0] // len(rows) * len(rows) + np.arange(len(rows))):
        raise UserError("mesh.tensor or mesh.sequence splits the processes' rows unevenly: make them smaller.")
    return int(rows[0]) // len(rows), count


def to_global(batch: Any, mesh: Mesh) -> Any:
    """This process's rows [local, …] of each leaf → the global arrays [batch_size, …], split by
    `batch_sharding`."""
    count = share(mesh)[1]

    def place(rows):
        rows = np.asarray(rows)
        shape = (len(rows) * count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(batch_sharding(mesh, rows.ndim), rows, shape)

    return jax.tree.map(place, batch)


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
