"""Fused and O(L) attention against the plain formula on the device that is here, values and gradients.

    python scripts/bench/kernels.py [--json FILE] [--tiny]

Cases, inputs and comparison are those of tests/test_kernels.py, where cuDNN is only imitated. The truth is the plain
formula in float64 on the CPU, of inputs rounded as the implementation gets them.

- bfloat16 (cudnn, chunked, xla), over the largest entry: values 2⁻⁷, gradients 2⁻⁵. Weights and outputs are rounded to
  8 bits, an error of 2⁻⁹ of each, and a weight's adds up over a row; gradients have that of the outputs times that of
  the logits' gradients, both rounded, in sums over all sites in which much cancels
- float32 (chunked, xla; factors not rounded, which chips do unless told): four times the tests' own bounds, for
  exponentials that are off by two units in the last place and sums in another order
- float64: a bias along the path (GRAPE-AP's), chunked against plain, as tests/test_attention.py has it

A window longer by one site must be told apart. --tiny: few cases, cuDNN imitated, for a machine without a GPU.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JOJAX_TESTS", tempfile.gettempdir())  # the tests' modules ask for it

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jojax import result  # noqa: E402
from jojax.models import attention, kernels  # noqa: E402
from scripts.prepare.work import write_whole  # noqa: E402

tests = importlib.import_module("test_kernels")
PLAIN = ("causal", "causal, window", "later queries, all, window")
CUDNN = (
    "causal",
    "all",
    "causal, window",
    "causal, documents, window",
    "all, documents",
    "all, window",
    "all, odd",
    "causal, odd",
)
FUNCTIONS = {"cudnn": kernels.cudnn, "chunked": attention.chunked, "xla": attention.xla}
RUNS = [
    *(("cudnn", "bfloat16", case) for case in CUDNN),
    *((name, dtype, case) for name in ("chunked", "xla") for dtype in ("bfloat16", "float32") for case in PLAIN),
]
TINY = [(name, dtype, "causal, window") for name, dtype in (("cudnn", "bfloat16"), ("chunked", "float32"))]
BOUNDS = {"bfloat16": (2**-7, 2**-5), "float32": (4 * tests.VALUES, 4 * tests.GRADIENTS)}
WORKERS = 8


def truth(case, dtype, longer=0):
    with jax.default_device(jax.devices("cpu")[0]):
        return tests.results(attention.xla, case, "float64", longer, given=dtype)


def farthest(got, want, dtype):
    """Of the values, of all gradients."""
    off = [
        np.abs(a - b).max() / (np.abs(b).max() if dtype == "bfloat16" else 1) for a, b in zip(got, want, strict=True)
    ]
    return float(off[0]), float(max(off[1:]))


def compare(functions, name, dtype, case):
    with jax.default_matmul_precision("highest"):
        got = tests.results(functions[name], case, dtype, given=dtype)
    off, bounds = farthest(got, truth(case, dtype), dtype), BOUNDS[dtype]
    row = dict(zip(("values", "gradients", "values_bound", "gradients_bound"), (*off, *bounds), strict=True))
    good = all(error < bound for error, bound in zip(off, bounds, strict=True))
    if "window" in case:
        row["window_one_longer"] = farthest(got, truth(case, dtype, 1), dtype)[0]
        good &= row["window_one_longer"] > 4 * bounds[0]
    return row | {"good": bool(good)}


def path(window):
    """Of a bias along the path, in float64, by the test itself: it fails or returns."""
    check = importlib.import_module("test_attention").test_chunked_equals_xla_in_values_and_gradients
    with jax.enable_x64(True):
        check(np.random.default_rng(0), True, window, (3,), True)
    return {"good": True}


def attempt(todo, functions):
    """A row; one that fails does not end the others."""
    name, dtype, case = todo
    try:
        row = path(4) if name == "path" else compare(functions, name, dtype, case)
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        row = {"good": False, "failed": f"{type(error).__name__}: {why}"}
    return {"implementation": name, "dtype": dtype, "case": case} | row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    functions, todo = FUNCTIONS, [*RUNS, ("path", "float64", "chunked, causal, window")]
    if given.tiny:
        functions, todo = FUNCTIONS | {"cudnn": functools.partial(kernels.cudnn, implementation="xla")}, TINY
    head, rows = {"device": result.devices(), "versions": result.versions()}, []
    print(f"{head['device']['kind']}\n| implementation | dtype | case | values | gradients | |\n|{6 * ' --- |'}")
    with ThreadPoolExecutor(WORKERS) as pool:  # they compile for longer than they run
        for row in pool.map(lambda one: attempt(one, functions), todo):
            numbers = " | ".join(format(row[key], ".1e") if key in row else "–" for key in ("values", "gradients"))
            told = "ok" if row["good"] else row.get("failed", "TOO FAR")
            print(f"| {row['implementation']} | {row['dtype']} | {row['case']} | {numbers} | {told} |", flush=True)
            rows.append(row)
            if given.json:
                write_whole(given.json, json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return int(not all(row["good"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
