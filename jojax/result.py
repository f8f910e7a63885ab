"""The record of a run, `result.json`: the part that says what ran, where, from which source."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jojax import __version__, optim
from jojax.errors import UserError
from jojax.writer import plain

SCHEMA = 1
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "clu",
    "numpy",
)

# what may change between the lives of a run: it does not touch the numbers
FREE = ("checkpoint", "log", "mesh", "eval", "attention", "model.scan", "model.remat", "data.cache")


def describe_run(config: Any, name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The first fields of result.json: schema, config_name, config (resolved), overrides, seed, commit,
    dirty, command, versions, devices.

    The loop adds steps, tokens or examples, wall_seconds, compile_seconds, parameters, metrics, protocol,
    scored.
    """
    commit, dirty = source_version()
    return {
        "schema": SCHEMA,
        "config_name": name,
        "config": plain(config),
        "overrides": plain(overrides or {}),
        "seed": int(config["seed"]),
        "commit": commit,
        "dirty": dirty,
        "command": command(),
        "versions": versions(),
        "devices": devices(),
    }


def command() -> str:
    """The command line, without the interpreter's folder."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def versions() -> dict[str, str]:
    """Python, jojax and the packages that shape a result; what is not installed is left out."""
    found = {"python": platform.python_version(), "jojax": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> dict[str, Any]:
    """platform, kind (the chip's name), count over all processes, processes."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def source_version(source: Path = Path(__file__).parent) -> tuple[str | None, bool | None]:
    """(commit, are there uncommitted changes in `source` or the configs beside it) of its checkout; (None,
    None) where git does not track it (an installed package, even inside somebody else's repository) or is not
    there."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source), *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None, None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--", str(source), str(source.parent / "configs"))
    return (commit, bool(changes)) if commit and changes is not None else (None, None)


def count_parameters(params: Any) -> dict[str, int]:
    """{body, encoding, total} numbers of parameters; `encoding` = under a path component of that name."""
    groups = jax.tree.leaves(optim.labels(params))
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)]
    encoding = sum(size for size, group in zip(sizes, groups, strict=True) if group == "encoding")
    return {"body": sum(sizes) - encoding, "encoding": encoding, "total": sum(sizes)}


def check_same_run(old, new, workdir, only=("",), remedy="choose another --workdir or remove it"):
    """UserError naming the keys that differ, where `workdir` holds a run of another config; `only`: of these groups.

    A key that one of them has not is of another version, and off there: it differs where it is on."""
    if old is None:
        return
    flat = [traverse_util.flatten_dict(tree, sep=".") for tree in (old, new)]
    keys = sorted(k for k in set(flat[0]) | set(flat[1]) if k.startswith(only) and not k.startswith(FREE))
    differ = [k for k in keys if flat[0].get(k) != flat[1].get(k) and any(tree.get(k) for tree in flat)]
    if differ:
        told = ", ".join(f"{k}: {flat[0].get(k)} → {flat[1].get(k)}" for k in differ[:6])
        raise UserError(f"{workdir} holds a run of another config ({told}): {remedy}")
