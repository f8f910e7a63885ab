"""What it takes to evaluate one long window: peak memory and time of `python -m jojax.evaluate`.

    python scripts/bench/long_evaluation.py [ENCODING …] [--length 65536] [--set model.depth=2 …]

The model is configs/length_extrapolation.py:size=c128 with a vocabulary of 2,048, after one step on one row: what it
has learned changes neither figure. Its text are the embedded articles, joined into one document a split (about 180,000
tokens to evaluate on). Each command is a process of its own, its peak what the kernel says of it when it ends; its
time is that of the whole command, compiling included. Blocks run one after the other in the same memory: with
--set model.depth=2 the peak is the same but for parameters, the time a third.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from jojax.data.documents import open_documents  # noqa: E402

ENCODINGS = ("rope", "alibi", "jo_projected", "fox", "grape_ap")
SPEC = "configs/length_extrapolation.py:size=c128,encoding="
SMALL: dict[str, Any] = {"data.source": "text", "data.path": "", "data.vocab": 2048, "steps": 1, "batch_size": 1}
SMALL |= {"eval.lengths": (), "eval.diagnostics": 0}


def command(module, *arguments):
    """Run it. -> its peak resident memory in bytes, seconds, seconds of CPU"""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=out, stderr=out)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            out.seek(0)
            sys.exit(f"{module} ended with {child.returncode}:\n{out.read()[-2000:]}")
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), seconds, used.ru_utime + used.ru_stime


def measure(encoding, length, settings, folder):
    """-> what `command` tells of evaluating one window of `length`, and its loss."""
    workdir = folder / encoding
    given = SMALL | {"eval.document_tokens": length} | settings
    options = [f"--config.{key}={value}" for key, value in given.items()]
    command("jojax.train", "--config", SPEC + encoding, "--workdir", workdir, *options)
    cost = command("jojax.evaluate", "--workdir", workdir, "--lengths", str(length))
    scores = json.loads((workdir / "result.json").read_text())["extrapolation"]["lengths"][str(length)]
    assert scores["scored"] == length, scores["scored"]
    return *cost, scores["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encodings", nargs="*", default=list(ENCODINGS))
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the config")
    args = parser.parse_args()
    if wrong := [item for item in args.set if "=" not in item]:
        parser.error(f"--set {wrong[0]}: give KEY=VALUE")
    settings = dict(item.split("=", 1) for item in args.set)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "valid"):
            articles = open_documents({"source": "wikipedia_excerpt"}, split)
            path = folder / f"{split}.txt"
            path.write_text("\n\n".join(articles[i] for i in range(len(articles))))
            settings.setdefault(f"data.{split}_path", path)
        print(
            f"one window of {args.length:,} tokens\n| encoding | peak GiB | seconds | of CPU | loss |\n|" + 5 * " --- |"
        )
        for encoding in args.encodings:
            peak, seconds, of_cpu, loss = measure(encoding, args.length, settings, folder)
            print(f"| {encoding} | {peak / 2**30:.2f} | {seconds:.0f} | {of_cpu:.0f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
