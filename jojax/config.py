"""Configs: load 'configs/F.py:arg', override by dotted name, validate. Free of jax, so scripts start at once.

Overrides, on the command line (`--config.a.b=value`) as in a sweep ({'a.b': value}): a value must have the
type that the config gives the key (an int is taken for a float). Tuples: `--config.eval.lengths="(512,
1024)"`, or `=512` for one element. None: `--config.name=None` for a key whose config says
`config_dict.placeholder(str)` (or another type). `encoding` is open: it takes keys that the config does not
list, `--config.encoding.base=500`, and may be replaced whole, `--config.encoding="{'name': 'rope'}"`; the
encoding's module refuses what it does not know. Every other key must exist.
"""

import difflib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jojax.errors import UserError


def split_spec(spec: str) -> tuple[Path, str | None]:
    """'configs/F.py:arg' -> (path, arg or None)."""
    path, colon, arg = spec.partition(":")
    return Path(path), (arg if colon else None)


def run_name(spec: str) -> str:
    """'configs/F.py:arg' -> 'F-arg', the default name of the run's folder under runs/."""
    path, arg = split_spec(spec)
    return path.stem + (f"-{arg.replace('/', '_')}" if arg else "")


def module(spec: str):
    """The Python module of 'configs/F.py:arg'.

    The folder above the config file's goes first on sys.path, so `from configs import common` works from
    anywhere. UserError: no such file, not Python.
    """
    path, _ = split_spec(spec)
    if path.suffix != ".py":
        raise UserError(f"--config={spec}: give a Python file, configs/FILE.py or configs/FILE.py:arg.")
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f"{path.parent}/ has {', '.join(beside)}" if beside else f"there is no config in {path.parent}/"
        raise UserError(f"config file {path} does not exist; {there}.")
    root = str(path.resolve().parent.parent)
    if sys.path[0] != root:
        sys.path.insert(0, root)  # in front even where it is further back: another folder may have `configs` too
    found = importlib.util.spec_from_file_location(f"jojax_config_{path.stem}", path)
    assert found and found.loader, path
    loaded = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(loaded)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}.") from error
    return loaded


def load(spec: str) -> ConfigDict:
    """The locked config that `get_config` of 'configs/F.py:arg' returns.

    UserError: as `module`; no get_config, an argument it refuses (its ValueError's text).
    """
    path, arg = split_spec(spec)
    found = module(spec)
    if not hasattr(found, "get_config"):
        raise UserError(f"{path} has no function get_config(arg).")
    arguments = () if arg is None else (arg,)
    try:
        inspect.signature(found.get_config).bind(*arguments)
    except TypeError:
        wants = "needs one (FILE.py:arg)" if arg is None else f"takes none, but {arg!r} follows the colon"
        raise UserError(f"{path}: get_config's argument: it {wants}.") from None
    try:
        config = found.get_config(*arguments)
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from error
    return lock(config)


def lock(config: ConfigDict) -> ConfigDict:
    """Lock every group but `encoding`; returns the config."""
    config.lock()
    if "encoding" in config:
        config.encoding.unlock()
    return config


def locate(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    """The group that holds dotted `key`, and the key's last part.

    UserError when the config has no such key (new ones in `encoding` are let through), with the nearest name
    or all.
    """
    *groups, last = key.split(".")
    node: Any = config
    for depth, part in enumerate((*groups, last)):
        above = ".".join(["config", *groups[:depth]])
        if not isinstance(node, ConfigDict):
            raise UserError(f"config.{key} does not exist: {above} is a value, not a group of keys.")
        if part not in node and groups != ["encoding"]:
            near = difflib.get_close_matches(part, list(node.keys()), 1, cutoff=0.7)
            hint = f"did you mean {above}.{near[0]}?" if near else f"{above} has {', '.join(sorted(node.keys()))}."
            raise UserError(f"config.{key} does not exist; {hint}")
        holder, node = node, node.get(part)
    return holder, last


def apply_overrides(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """Set dotted keys in place and return the config. UserError for an unknown key or a value of another
    type."""
    for key, value in overrides.items():
        holder, last = locate(config, key)
        group = isinstance(holder.get(last), ConfigDict)
        if group and key != "encoding":
            raise UserError(f"config.{key} is a group of keys: override them one by one (config.{key}.NAME).")
        try:
            holder[last] = ConfigDict(dict(value)) if group else value
        except (TypeError, ValueError):
            raise UserError(f"config.{key}={value!r}: needs {wanted(holder, last)}.") from None
    return lock(config)


def wanted(holder: ConfigDict, key: str) -> str:
    """What a key takes, in words: its type (a placeholder's, where it is None) and its present value."""
    kind, value = holder.get_type(key), holder.get(key)
    if issubclass(kind, ConfigDict):
        return f"a dict, like {value.to_dict()!r}"
    name = "an int" if kind is int else f"a {kind.__name__}"
    return name if value is None else f"{name}, like {value!r}"


# -------------------------------------------------------------------------------- validation
def _at_least(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: low <= v < math.inf), f"at least {low}"


def _fraction(v: float) -> bool:
    return 0 <= v < 1


def _counts(v: Any) -> bool:
    return all(isinstance(n, int) and n >= 1 for n in v)


def _pairs(v: Any) -> bool:
    """An int, or (height, width)."""
    sides = v if isinstance(v, tuple) else (v, v)
    return len(sides) == 2 and _counts(sides)


NUMBER = (int, float)
_PAIR = ((int, tuple), _pairs, "an int of at least 1, or a pair of them (height, width)")
_COUNT, _FROM_0 = (int, *_at_least(1)), (int, *_at_least(0))
_SHARE = (NUMBER, _fraction, "0 … 1, without 1")
_SIZE = ((lambda v: v >= 1 or v == -1), "a size, or -1 = the rest")
# key: (type, test, what it should be)
RULES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "seed": (int, lambda v: 0 <= v < 2**32, "0 … 2³²-1"),
    "steps": _COUNT,
    "batch_size": _COUNT,
    "optim.lr": (NUMBER, *_at_least(0)),
    "optim.warmup_steps": _FROM_0,
    "optim.end_lr_fraction": (NUMBER, lambda v: 0 <= v <= 1, "0 … 1"),
    "optim.weight_decay": (NUMBER, *_at_least(0)),
    "optim.clip": (NUMBER, *_at_least(0)),
    "optim.b1": _SHARE,
    "optim.b2": _SHARE,
    "optim.eps": (NUMBER, lambda v: v > 0, "more than 0"),
    "optim.encoding_lr": (NUMBER, *_at_least(0)),
    "optim.accumulate": _COUNT,
    "optim.ema": (NUMBER, _fraction, "0 (off) … 1, without 1"),
    "model.width": _COUNT,
    "model.depth": _COUNT,
    "model.heads": _COUNT,
    "model.kv_heads": _FROM_0,
    "model.head_dim": _FROM_0,
    "model.window": _FROM_0,
    "model.mlp_ratio": (NUMBER, lambda v: 0 < v < math.inf, "more than 0"),
    "model.init_std": (NUMBER, *_at_least(0)),
    "model.eps": (NUMBER, lambda v: 0 < v < math.inf, "more than 0"),
    "model.dropout": _SHARE,
    "model.drop_path": _SHARE,
    "model.layer_scale": (NUMBER, *_at_least(0)),
    "model.loss_chunk": _COUNT,
    "model.patch": _PAIR,
    "model.patch_frames": _FROM_0,
    "data.frames": _FROM_0,
    "data.frame_stride": _FROM_0,
    "data.image_size": _PAIR,
    "data.classes": _COUNT,
    "data.label_smoothing": _SHARE,
    "data.crop_ratio": (NUMBER, lambda v: 0 < v <= 1, "more than 0, up to 1"),
    **{f"data.augment.{key}": (NUMBER, *_at_least(0)) for key in ("jitter", "mixup", "cutmix")},
    **{f"data.augment.{key}": (NUMBER, lambda v: 0 <= v <= 1, "0 … 1") for key in ("erase", "switch")},
    "data.augment.cutout": _FROM_0,
    "data.augment.repeat": _COUNT,
    "data.length": _COUNT,
    "data.vocab": _COUNT,
    "eval.batch_size": _COUNT,
    "eval.tokens_per_batch": _COUNT,
    "eval.document_tokens": _FROM_0,
    "eval.lengths": (tuple, _counts, "a tuple of ints, each at least 1"),
    "eval.offsets": (tuple, lambda v: all(isinstance(o, int | float) for o in v), "a tuple of numbers"),
    "eval.resolutions": (tuple, lambda v: all(map(_pairs, v)), "a tuple of sizes, each an int or a pair of them"),
    "eval.every_steps": _FROM_0,
    "eval.diagnostics": _FROM_0,
    "checkpoint.every_steps": _FROM_0,
    "checkpoint.keep": _COUNT,
    "log.every_steps": _COUNT,
    **{f"mesh.{axis}": (int, *_SIZE) for axis in ("data", "fsdp", "tensor", "sequence")},
}
REQUIRED = (
    "seed",
    "steps",
    "batch_size",
    "optim.lr",
    "log.every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
)


def validate(config: ConfigDict) -> ConfigDict:
    """Check the keys that every run has; returns the config. UserError names key, value and remedy.

    Names (optimiser, schedule, attention, encoding, data source) are checked by the module that knows them.
    """
    for key in REQUIRED:
        locate(config, key)
    for key, (kind, good, rule) in RULES.items():
        value = _get(config, key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not good(value):
            raise UserError(f"config.{key}={value!r} must be {rule}.")
    return config


def _get(config: ConfigDict, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, ConfigDict) else None
    return node.get() if isinstance(node, FieldReference) else node
