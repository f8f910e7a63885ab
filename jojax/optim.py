"""Optimisers: AdamW or LAMB with a schedule, global clipping and three parameter groups (body, no_decay, encoding).

The learning rate follows the trainer's `step`, not a counter of its own: `step` has one meaning in schedule,
log and checkpoint, and a new stage is the same schedule with another `start`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jojax.errors import UserError
from jojax.tree import named_map

OPTIMISERS = ("adamw", "lamb")
SCHEDULES = ("cosine", "constant", "linear")


@dataclasses.dataclass(frozen=True)
class Options:
    """`config.optim`; keys that the config leaves out take these defaults."""

    lr: float
    name: str = "adamw"
    schedule: str = "cosine"
    warmup_steps: int = 0
    end_lr_fraction: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # global gradient norm; 0 = no clipping
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    encoding_lr: float = 1.0  # multiplies the learning rate of encoding parameters
    encoding_decay: bool = False  # weight decay on encoding parameters too
    decay_norm_bias: bool = False  # weight decay on the no_decay group too; with encoding_decay: on everything
    accumulate: int = 1  # micro-batches a step
    ema: float = 0.0  # decay of the parameter average; 0 = off


def options(cfg: Mapping[str, Any]) -> Options:
    """`config.optim` as Options. UserError for an unknown key, optimiser or schedule, with the valid ones, and for
    a rate to end at that no schedule goes to."""
    valid = [field.name for field in dataclasses.fields(Options)]
    for key in cfg:
        if key not in valid:
            raise UserError(f"optim.{key} is not an optimiser option; the options are {', '.join(valid)}.")
    if "lr" not in cfg:
        raise UserError("optim.lr is missing: give the peak learning rate.")
    opts = Options(**{key: cfg[key] for key in cfg})
    for key, value, names in (("name", opts.name, OPTIMISERS), ("schedule", opts.schedule, SCHEDULES)):
        if value not in names:
            raise UserError(f"optim.{key}={value!r} is unknown; choose one of {', '.join(names)}.")
    if opts.schedule == "constant" and opts.end_lr_fraction:
        raise UserError(
            f"optim.end_lr_fraction={opts.end_lr_fraction} does nothing beside optim.schedule='constant': set it to 0, "
            "or choose cosine or linear."
        )
    return opts


def labels(params: Any) -> Any:
    """Group of each parameter, as a tree of strings.

    encoding: a path component is named `encoding`; its own learning rate, no decay (decay would pull
        frequencies and angles to zero, which is not a simpler function but another position code).
    no_decay: biases and gains, recognised by the leaf names `bias` and `scale` or by having at most one axis
        longer than 1, not counting the axis that stacks layers under `blocks`; so layer-scale vectors and
        class tokens too.
    body: the rest, token embeddings included (with a tied head the table is the output layer's matrix;
        JoFormer and GRAPE both decay it). Position tables are encodings and lie under `encoding`.
    """

    def label(name, leaf):
        parts = name.split("/")
        if "encoding" in parts:
            return "encoding"
        shape = leaf.shape[1:] if "blocks" in parts else leaf.shape
        vector = sum(size > 1 for size in shape) <= 1 and parts[-1] not in ("kernel", "embedding")
        return "no_decay" if vector or parts[-1] in ("bias", "scale") else "body"

    return named_map(label, params)


def schedule(cfg: Mapping[str, Any], steps: int, start: int = 0) -> Callable[[Any], Any]:
    """Learning rate as a function of the number of finished steps (an int or an int array).

    From 0 linearly to `lr` over `warmup_steps`, then to lr·end_lr_fraction at `start + steps` (cosine,
    linear) or flat (constant). `start` is the step at which a stage of `steps` steps begins.
    """
    opts = options(cfg)
    warmup, end = opts.warmup_steps, opts.lr * opts.end_lr_fraction
    if warmup >= steps:
        raise UserError(f"optim.warmup_steps={warmup} must be smaller than the {steps} steps it is a part of.")
    tail = {
        "cosine": lambda: optax.cosine_decay_schedule(opts.lr, steps - warmup, opts.end_lr_fraction),
        "linear": lambda: optax.linear_schedule(opts.lr, end, steps - warmup),
        "constant": lambda: optax.constant_schedule(opts.lr),
    }[opts.schedule]()
    if warmup:
        tail = optax.join_schedules([optax.linear_schedule(0.0, opts.lr, warmup), tail], [warmup])
    return lambda step: tail(step - start)


class LearningRate(NamedTuple):
    """State of the last transformation: the rate it used, so that the log shows what really happened."""

    learning_rate: jax.Array


def _by_learning_rate(rate: Callable[[Any], Any]) -> optax.GradientTransformationExtraArgs:
    def init(params):
        return LearningRate(jnp.zeros((), jnp.float32))

    def update(updates, state, params=None, **extra):
        lr = jnp.asarray(rate(extra["step"]), jnp.float32)
        return jax.tree.map(lambda u: (-lr * u).astype(u.dtype), updates), LearningRate(lr)

    return optax.GradientTransformationExtraArgs(init, update)


def _by_trust_ratio(adapted: Any) -> optax.GradientTransformation:
    """LAMB (arXiv 1904.00962): updates times ‖p‖/‖u‖ (1 where either is 0), of the `adapted` parameters, as FusedLAMB
    and timm do; blocks that are stacked under `blocks` have a norm each."""

    def ratio(path, u, p, adapt):
        axes = tuple(range("blocks" in path.split("/"), u.ndim))
        wide = (t.astype(jnp.promote_types(t.dtype, jnp.float32)) for t in (p, u))
        norms = [jnp.sqrt(jnp.square(t).sum(axes, keepdims=True)) for t in wide]
        trust = jnp.where((norms[0] > 0) & (norms[1] > 0), norms[0] / jnp.where(norms[1] > 0, norms[1], 1), 1)
        return (u * trust).astype(u.dtype) if adapt else u

    return optax.stateless(lambda updates, params: named_map(ratio, updates, params, adapted))


def make(cfg: Mapping[str, Any], steps: int, params: Any, start: int = 0) -> optax.GradientTransformationExtraArgs:
    """The optimiser; call `tx.update(grads, opt_state, params, step=finished_steps)`.

    Clipping sees the gradient of all parameters together, before groups part, so `clip` bounds what the log
    calls grad_norm. Then Adam, decoupled decay of the groups that decay (Loshchilov & Hutter 2019), LAMB's
    trust ratio of these, the encodings' own multiplier, the learning rate. `params` may be arrays or
    ShapeDtypeStructs.
    """
    opts = options(cfg)
    groups = labels(params)
    decaying = {"body"} | ({"no_decay"} if opts.decay_norm_bias else set())
    decaying |= {"encoding"} if opts.encoding_decay else set()
    decayed = jax.tree.map(lambda group: group in decaying, groups)
    encoding = jax.tree.map(lambda group: group == "encoding", groups)
    return optax.chain(
        optax.clip_by_global_norm(opts.clip) if opts.clip else optax.identity(),
        optax.scale_by_adam(opts.b1, opts.b2, opts.eps),
        optax.add_decayed_weights(opts.weight_decay, decayed),
        *([_by_trust_ratio(decayed)] if opts.name == "lamb" else []),
        optax.masked(optax.scale(opts.encoding_lr), encoding),
        _by_learning_rate(schedule(cfg, steps, start)),
    )
