"""Everything that a run carries from step to step, and its sharded start."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from jojax import shard


class TrainState(struct.PyTreeNode):
    """step: int32, finished steps. params, opt_state: trees. ema: average of params, or None when off.

    sums: float32 scalars added up since the last log step, so that a log line is the same whether or not the
        run was killed in between: loss, count, grad_norm, steps, lr (the last one used) and the loss
        function's own.
    bad_step: int32, -1 or the number (counted from 1, like the log) of the first step whose loss or gradient
        norm was not finite; from then on nothing but `sums` of that step has changed, so the state is the one
        that entered it.
    """

    step: Array
    params: Any
    opt_state: Any
    ema: Any
    sums: dict[str, Array]
    bad_step: Array


def start(init_fn, tx, *, ema: bool = False, aux: Sequence[str] = ()) -> Callable[[Array], TrainState]:
    """A function of a key to a fresh state.

    init_fn(key) -> params; `aux`: names of the sums that the loss function returns beside loss and count.
    """

    def begin(key):
        params = init_fn(key)
        names = ("loss", "count", "grad_norm", "steps", "lr", *aux)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=tx.init(params),
            ema=jax.tree.map(jnp.copy, params) if ema else None,
            sums={name: jnp.zeros((), jnp.float32) for name in names},
            bad_step=jnp.full((), -1, jnp.int32),
        )

    return begin


def abstract_state(start: Callable[[Array], TrainState], mesh: Mesh) -> TrainState:
    """The state's ShapeDtypeStructs with their shardings on `mesh`: to restore into, to compile for, to
    count."""
    shapes = jax.eval_shape(start, jax.random.key(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shard.shardings(shapes, mesh),
    )


def init_state(start: Callable[[Array], TrainState], mesh: Mesh, seed: int) -> TrainState:
    """A fresh state, each array created where it will lie; the same bits on every mesh."""
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(start, mesh))
    return jax.jit(start, out_shardings=where)(jax.random.key(seed))
