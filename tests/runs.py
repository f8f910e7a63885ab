"""Tiny runs for the end-to-end tests: real text, real images, through the command line or in this process."""

import contextlib
import fcntl
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from jojax import checkpoint, loop, tree, writer
from jojax import config as configs
from jojax.data.documents import open_documents

ROOT = Path(__file__).resolve().parent.parent
LM, VIT = "configs/quickstart.py:smoke,encoding=rope", "configs/quickstart_vit.py:smoke"
SPEEDS = ("tokens_per_second", "images_per_second")
STEPS = 30


FOLDER = Path(os.environ["JOJAX_TESTS"])  # of all processes of this test run; conftest.py names and removes it
FOLDER.mkdir(exist_ok=True)


@contextlib.contextmanager
def alone(name):
    """One process at a time."""
    with (FOLDER / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def text():
    """A folder with excerpts of 24 and of 5 articles, the last of them too short for a window of 32."""
    documents = open_documents({"source": "wikipedia_excerpt"}, "train")
    for split, first, sizes in (("train", 0, range(2400, 0, -100)), ("valid", 40, (170, 390, 258, 129, 5))):
        rows = [json.dumps({"text": documents[first + i][:size]}) for i, size in enumerate(sizes)]
        with alone("text"):
            if not (FOLDER / f"{split}.jsonl").exists():
                (FOLDER / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return FOLDER


def lm(**more):
    """Overrides of LM: bytes, 32 channels, 32 tokens; `a__b` means a.b."""
    paths = {f"data.{split}_path": str(text() / f"{split}.jsonl") for split in ("train", "valid")}
    tiny = {"data.source": "text", "data.tokenizer": "bytes", "data.vocab": 257, "data.length": 32, "batch_size": 8}
    tiny |= {"model.width": 32, "model.heads": 2, "steps": STEPS, "eval.every_steps": 10, "eval.lengths": (32, 64)}
    tiny["eval.diagnostics"] = 0
    often = {"log.every_steps": 1, "checkpoint.every_steps": 10, "checkpoint.keep": 3}
    return paths | {"data.cache": str(FOLDER / "tokens")} | tiny | often | dotted(more)


def vit(**more):
    """Overrides of VIT: 32 channels, two blocks, 4×4 patches; evaluated on 1,000 images."""
    tiny = {"model.width": 32, "model.depth": 2, "model.heads": 2, "model.patch": 8, "batch_size": 16}
    tiny["eval.diagnostics"] = 0
    return tiny | {"data.image_size": 32, "log.every_steps": 1} | dotted(more)


def dotted(names):
    return {name.replace("__", "."): value for name, value in names.items()}


def config_of(spec, overrides):
    return configs.validate(configs.apply_overrides(configs.load(str(ROOT / spec)), overrides))


def train_here(spec, overrides, workdir):
    """In this process, on its eight devices. -> exit code"""
    return loop.train_and_evaluate(config_of(spec, overrides), spec, overrides, workdir)


# ------------------------------------------------------------------------- the command line
def environment(devices=8, **more):
    """Of processes with so many devices, which compile as the tests do."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    return os.environ | {"XLA_FLAGS": flags} | more


def arguments(spec, overrides, workdir):
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    return ["-m", "jojax.train", "--config", spec, "--workdir", str(workdir), *given]


def start(args, env=None, **options):
    """`python ARGS` in the repository, as a Popen with pipes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, *args], cwd=ROOT, env=env or environment(), **pipes | options)


def run(args, code=0, **options):
    """`python ARGS`, which must exit with `code`. -> stdout, stderr"""
    process = start(args, **options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def train(spec, overrides, workdir):
    """To the end, by the command line on one device. -> stdout, stderr"""
    return run(arguments(spec, overrides, workdir), env=environment(devices=1))


@functools.cache
def trained():
    """The workdir of a finished run of LM, with its checkpoints at 10, 20 and 30; copy it before changing it."""
    with alone("trained"):
        if not (FOLDER / "trained" / "result.json").exists():
            train(LM, lm(), FOLDER / "trained")
    return FOLDER / "trained"


# ------------------------------------------------------------------------- what a run leaves
def told(workdir):
    """metrics.jsonl without the speeds, which no two runs share."""
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in writer.read_metrics(workdir)]


def losses(workdir):
    return {line["step"]: line["train/loss"] for line in told(workdir) if "train/loss" in line}


def result(workdir):
    return json.loads((workdir / "result.json").read_text())


def states(spec, overrides, *workdirs):
    """{name: array}, the whole state of the newest checkpoint of each of these runs."""
    like = loop.Run(config_of(spec, overrides), spec, "").like
    for workdir in workdirs:
        with checkpoint.Checkpoints(workdir, read_only=True) as saved:
            yield tree.leaves(saved.restore_latest(like)[0])


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def snapshot(folder):
    """{path: (size, time of change)} of all files."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
