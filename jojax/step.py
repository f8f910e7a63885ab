"""One training step as one jitted function: gradients, accumulation, update, average, sums, NaN guard."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jojax import optim, shard
from jojax.state import TrainState

RNGS = ("dropout", "encoding", "mix")
Batch = Any
LossFn = Callable[[Any, Batch, dict[str, Array], bool], tuple[Array, Array, Mapping[str, Array]]]


def step_rngs(seed: int, step: Array) -> dict[str, Array]:
    """Keys of one step, a function of (seed, step) alone, so a resumed run draws what it would have drawn."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(RNGS)}


def micro_batches(batch: Batch, accumulate: int) -> Batch:
    """[B, …] -> [accumulate, B/accumulate, …]; micro-batch i holds rows i, i + accumulate, …

    Split this way round, every device cuts its own rows and nothing travels.
    """
    return jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def _gradient(loss_fn: LossFn, params, batch, rngs, accumulate: int):
    """Σ over the batch of (gradient, {loss, count, aux…}), float32 or wider, not yet divided by the count."""

    def objective(params, batch, rngs):
        nll_sum, count, aux = loss_fn(params, batch, rngs, True)
        dtype = jnp.promote_types(nll_sum.dtype, jnp.float32)
        sums = {"loss": nll_sum, "count": count, **aux}
        return nll_sum, {key: jnp.asarray(value, dtype) for key, value in sums.items()}

    one = jax.grad(objective, has_aux=True)
    if accumulate == 1:
        return one(params, batch, rngs)

    def add(total, item):
        i, micro = item
        part = one(params, micro, {name: jax.random.fold_in(key, i) for name, key in rngs.items()})
        return jax.tree.map(jnp.add, total, part), None

    micros = micro_batches(batch, accumulate)
    shapes = jax.eval_shape(one, params, jax.tree.map(lambda x: x[0], micros), rngs)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(add, zeros, (jnp.arange(accumulate), micros))[0]


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    cfg: Any,
    shardings: Any = None,
    mix: Callable[[Batch, Array], Batch] | None = None,
) -> jax.stages.Wrapped:
    """`state = train_step(state, batch)`, jitted; the old state is donated.

    loss_fn(params, batch, rngs, train) -> (Σ nll, count, {name: Σ}): sums over the batch, never means. The
        gradient is that of Σ nll / Σ count over all micro-batches and devices together.
    tx: from `optim.make`, or any optax transformation.
    cfg: reads seed, optim.accumulate, optim.ema, log.every_steps. `state.sums` starts anew at the first step
        after a multiple of log.every_steps; read it with `metrics.averages` at those steps and at the last.
    shardings: TrainState of NamedShardings that the new state shall keep; needed where anything is split. The step
        is traced in their mesh.
    mix: (batch, key) -> batch, before it is cut into micro-batches.
    """
    opts = optim.options(cfg.optim)
    seed, log_every = cfg.seed, cfg.log.every_steps
    tx = optax.with_extra_args_support(tx)
    mesh = None if shardings is None else shardings.step.mesh

    def train_step(state: TrainState, batch: Batch) -> TrainState:
        rngs = step_rngs(seed, state.step)
        if mix is not None:
            batch = mix(batch, rngs["mix"])
        grads, sums = _gradient(loss_fn, state.params, batch, rngs, opts.accumulate)
        count = jnp.where(sums["count"] > 0, sums["count"], 1)  # no targets: a gradient of 0, not of NaN
        grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
        if mesh is not None and mesh.size > 1:  # else what lies whole may be updated in parts, then gathered thrice
            grads = lax.with_sharding_constraint(grads, shardings.params)
        norm = optax.tree.norm(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, step=state.step)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda e, p: opts.ema * e + (1 - opts.ema) * p, ema, params)
        rate = optax.tree.get(opt_state, "learning_rate", jnp.nan)
        sums = {**sums, "grad_norm": norm, "steps": jnp.ones(())}
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema)
        return _guard(state, new, _add(state, sums, rate, log_every), norm)

    return jax.jit(shard.within(mesh, train_step), donate_argnums=0, out_shardings=shardings)


def _add(state: TrainState, sums: dict[str, Array], rate: Array, log_every: int) -> dict[str, Array]:
    if {*sums, "lr"} != set(state.sums):
        names = sorted(set(sums) - {"loss", "count", "grad_norm", "steps"})
        raise ValueError(f"the loss function returns the sums {names}: create the state with aux={names}")
    anew = state.step % log_every == 0
    total = {key: jnp.where(anew, 0, state.sums[key]) + value for key, value in sums.items()}
    return {key: value.astype(jnp.float32) for key, value in (total | {"lr": rate * jnp.ones(())}).items()}


def _guard(old: TrainState, new: TrainState, sums: dict[str, Array], norm: Array) -> TrainState:
    """`new` while all is finite; at the first bad step `old` with its number and its sums; then `old`."""
    good_before = old.bad_step < 0
    # the sums carry this step's loss; a non-finite one cannot have come from an earlier step, which was good
    good = good_before & jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
    return kept.replace(
        sums=jax.tree.map(lambda n, o: jnp.where(good_before, n, o), sums, old.sums),
        bad_step=jnp.where(good_before & ~good, old.step + 1, old.bad_step),
    )
