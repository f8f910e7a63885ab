"""Staged training, one run: `config.stages`, a tuple of {steps, encoding, lr, encoding_lr, reset_optimizer}.

A stage without encoding, lr or encoding_lr has the config's; reset_optimizer (default False) begins it with fresh
moments. Each runs the schedule anew, its warm-up too. The last one has config.encoding, by which tables, evaluation and
export know the run. encoding_lr = 0 keeps the encoding's parameters as they are.

At a boundary every parameter, average and moment of the same name and shape goes on, what is new starts as the seed has
it, and the logits must stay what they were (`check_alike`). A checkpoint at a boundary is still the earlier stage's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jojax.errors import UserError
from jojax.tree import leaves, named_map

KEYS = ("steps", "encoding", "lr", "encoding_lr", "reset_optimizer")
TOLERANCE = 1e-4  # of the largest logit, in float32


@dataclasses.dataclass(frozen=True)
class Stage:
    number: int  # from 1
    start: int
    end: int
    reset: bool
    config: Any

    @property
    def steps(self):
        return self.end - self.start


def split(config) -> list[Stage]:
    """The stages of a config, one where it has none. UserError names the key that does not fit."""
    given, start = [dict(stage) for stage in config.get("stages", ())], 0
    for n, stage in enumerate(given):
        where = f"config.stages[{n}]"
        for key in stage:
            if key not in KEYS:
                raise UserError(f"{where}.{key} does not exist: a stage has {', '.join(KEYS)}")
        steps, rates = stage.get("steps"), [stage.get(key, 0.0) for key in ("lr", "encoding_lr")]
        if not isinstance(steps, int) or steps < 1:
            raise UserError(f"{where}.steps = {steps!r}: give the number of steps of this stage, at least 1")
        if not all(isinstance(rate, (int, float)) and rate >= 0 for rate in rates):
            raise UserError(f"{where}.lr and {where}.encoding_lr must be numbers of at least 0")
        if not isinstance(stage.get("reset_optimizer", False), bool):
            raise UserError(f"{where}.reset_optimizer = {stage['reset_optimizer']!r} must be True or False")
        named = stage.get("encoding")
        if named is not None and not (isinstance(named, Mapping | ConfigDict) and "name" in named):
            raise UserError(f"{where}.encoding = {named!r}: give a dict as config.encoding is, {{'name': …, …}}")
    total = sum(stage["steps"] for stage in given)
    if given and total != config.steps:
        raise UserError(f"config.stages have {total} steps in all, config.steps is {config.steps}: set it to their sum")
    if given and without_preset(given[-1].get("encoding", config.encoding)) != without_preset(config.encoding):
        raise UserError("the last of config.stages must have config.encoding: leave its encoding out, or set that")
    if not given:
        return [Stage(1, 0, config.steps, False, config)]
    out = []
    for stage in given:
        own = ConfigDict(config.to_dict())
        own.encoding = ConfigDict(dict(stage.get("encoding") or config.encoding))
        own.optim.update({key: float(stage[key]) for key in ("lr", "encoding_lr") if key in stage})
        end = start + stage["steps"]
        out.append(Stage(len(out) + 1, start, end, bool(stage.get("reset_optimizer", False)), own))
        start = end
    return out


def without_preset(encoding):
    return {key: value for key, value in dict(encoding).items() if key != "preset"}


def at(stages, step) -> Stage:
    """The one that did step number `step`, counted from 1; of 0 the first, beyond the end the last."""
    return next((stage for stage in stages if step <= stage.end), stages[-1])


def record(stages) -> list[dict[str, Any]]:
    """For result.json: what each stage trained, how, from which step to which."""
    return [
        {
            "steps": [s.start, s.end],
            "encoding": s.config.encoding.to_dict(),
            "lr": s.config.optim.lr,
            "encoding_lr": s.config.optim.encoding_lr,
            "reset_optimizer": s.reset,
            "trained": "all" if s.config.optim.encoding_lr else "all but the encoding",
        }
        for s in stages
    ]


def carried(old, new):
    """The tree `new`, with the leaves of `old` where names and shapes agree."""
    had = leaves(old)
    return named_map(lambda name, leaf: had[name] if name in had and had[name].shape == leaf.shape else leaf, new)


def enter(now, fresh, stage: Stage):
    """The TrainState `fresh` of a stage's model, going on from `now`."""
    return fresh.replace(
        step=now.step,
        params=carried(now.params, fresh.params),
        opt_state=fresh.opt_state if stage.reset else carried(now.opt_state, fresh.opt_state),
        ema=carried(now.ema, fresh.ema),
        sums=now.sums,
        bad_step=now.bad_step,
    )


def check_alike(before, after, stage: Stage) -> float:
    """The largest difference of two models' logits over the largest logit; UserError where it is above TOLERANCE.

    before, after: (function of parameters to logits, parameters)."""
    (f, p), (g, q) = before, after
    with jax.default_matmul_precision("highest"):  # accelerators would round the factors of products
        a, b = jax.jit(lambda p, q: (f(p), g(q)))(p, q)
    far = float(jnp.abs(a - b).max() / jnp.abs(a).max())
    if not far <= TOLERANCE:
        raise UserError(
            f"config.stages[{stage.number - 1}].encoding changes the model: its logits are {far:.1e} of the largest "
            f"away from those of the stage before ({TOLERANCE:.0e} is allowed); begin with an encoding that starts as "
            "that one ends (jo_projected after jo_fixed), or in another --workdir with config.init_from"
        )
    return far
