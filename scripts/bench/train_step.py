"""What a training step makes of the machine: model FLOP/s over those of a plain matrix product, from one run.

    python scripts/bench/train_step.py [MODEL …] [--encodings rope,fox,…] [--forms as_is,unrolled,…] [--steps 5]
        [--scale 1] [--set KEY=VALUE] [--resident] [--product 2048] [--together 1] [--json FILE]

Models: vit_tiny (cifar100_vit_tiny, DeiT-Ti), vit_s (imagenet_vits_jo), lm_c128 (length_extrapolation) and lm_c512
(wikipedia_lm) by default; lm_c768 (length_extrapolation) and lm_layer, its one layer, where they are named. Each from
the embedded images or articles through its whole input pipeline. Forms: as_is is scanned, float32, with the state
donated; unrolled, bf16 and undonated change that alone. Encodings: presets; without them each model's own.

- utilisation: the model's FLOPs (jojax/flops.py: matrix products, without the encoding's) a second, over those of a
  product of two --product × --product matrices in the same dtype, measured in this run; of peak: over the maker's
  figure (jojax/chips.py), in bfloat16 on a chip that is there
- waiting: share of the time in which a step waits for its data, which threads prepare beside it; with --resident all
  steps have one batch, which lies on the device, and run without waiting for each other
- --scale multiplies the batches: they are small, for CPUs. --set changes any key of the config
- --together compiles so many at a time, before they are timed one after the other: `compiling` is then no measure
- --json adds the rows to FILE, those of the same model, encoding, form and data anew. A row that fails is told, and
  the exit code 1
"""

import argparse
import contextlib
import io
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from jojax import chips, cli, clock, config, flops, loop, result, shard, task, writer  # noqa: E402
from scripts.bench.timing import costs  # noqa: E402
from scripts.prepare.work import write_whole  # noqa: E402

TEXT = {"data.source": "wikipedia_excerpt", "data.path": "", "data.vocab": 8192, "dtype": "float32"}
C768 = TEXT | {"batch_size": 4, "data.vocab": 32_000, "eval.lengths": ()}
IMAGES = {
    "data.source": "fashion_mnist",
    "data.path": "",
    "data.name": "",
    "data.valid_split": "test",
    "data.classes": 10,
}
MODELS = {  # spec, overrides
    "vit_tiny": ("cifar100_vit_tiny.py:size=deit_tiny", IMAGES | {"batch_size": 32}),
    "vit_s": ("imagenet_vits_jo.py:", IMAGES | {"batch_size": 4, "dtype": "float32"}),
    "lm_c128": ("length_extrapolation.py:size=c128", TEXT | {"batch_size": 4, "eval.lengths": ()}),
    "lm_c512": ("wikipedia_lm.py:", TEXT | {"batch_size": 8}),
    "lm_c768": ("length_extrapolation.py:size=owt16", C768),
    "lm_layer": ("length_extrapolation.py:size=one_layer", C768),
}
FORMS = {"as_is": {}, "unrolled": {"model.scan": False}, "bf16": {"dtype": "bfloat16"}, "undonated": {}}
COLUMNS = (
    "model | encoding | form | batch | step | a second | utilisation | of peak | waiting | compiling | temporaries"
)


def product(dtype, n):
    """FLOP/s of a matrix product, of random numbers: chips are faster with constant ones."""
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    return 2 * n**3 / costs({"": (lambda a: a @ a, (a,))}, 5)[""].seconds


def prepare(name, form, encoding, given):
    """(run with its data opened, compiled step, seconds of compiling)"""
    spec, changes = MODELS[name]
    spec += f",encoding={encoding}" if encoding else ""
    changes = changes | FORMS[form] | cli.options(given.set)
    settings = config.apply_overrides(config.load(f"{ROOT}/configs/{spec}"), changes)
    settings.batch_size *= given.scale
    run = loop.Run(config.validate(settings), name, "")
    run.open_data()
    step = jax.jit(lambda *given: run.step_fn(*given)) if form == "undonated" else run.step_fn
    start = time.perf_counter()
    return run, step.lower(run.like, run.abstract_batch()).compile(), time.perf_counter() - start


def timed(run, compiled, steps, resident):
    """(seconds a step, share of waiting), training as jojax.loop does it."""
    run.clock, state = clock.Clock(), run.fresh_state()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.closing(run.batches(0)) as data:
        batch = shard.to_global(next(data), run.mesh)
        for n in range(steps + 2):  # the first two fill caches and the threads' queue
            if n == 2:
                jax.block_until_ready(state)
                run.clock.begin(n)
            if not resident:
                with run.clock.waiting():
                    batch = shard.to_global(next(data), run.mesh)
            state = compiled(state, batch)
            if not resident:
                jax.block_until_ready(state)
        jax.block_until_ready(state)
        rate, waiting = run.clock.lap(steps + 2)
    return 1 / rate, waiting


def row_of(key, ready, best, given):
    run, compiled, compiling = ready
    seconds, waiting = timed(run, compiled, given.steps, given.resident)
    memory, used = compiled.memory_analysis(), flops.training(run.config) * run.config.batch_size / seconds
    assert memory is not None, "this backend does not tell what a step costs"
    peak = chips.peak(jax.devices()[0].device_kind) if run.config.dtype == "bfloat16" else None
    return key | {
        "encoding": task.label(run.config),
        "batch": run.config.batch_size,
        "seconds": seconds,
        "units_per_second": run.job.units_per_step / seconds,
        "unit": run.job.unit,
        "utilisation": used / best[run.config.dtype],
        "of_peak": peak and used / peak,
        "waiting": waiting,
        "compile_seconds": compiling,
        "temporaries": memory.temp_size_in_bytes,
        "config": writer.plain(run.config),
    }


def line(row):
    """Of the table."""
    if "failed" in row:
        return f"| {row['model']} | {row['encoding']} | {row['form']} | failed: {row['failed']} |"
    return (
        f"| {row['model']} | {row['encoding']} | {row['form']} | {row['batch']} | {1000 * row['seconds']:,.2f} ms | "
        f"{row['units_per_second']:,.0f} {row['unit']} | {row['utilisation']:.1%} | "
        f"{format(row['of_peak'], '.1%') if row['of_peak'] else '–'} | {row['waiting']:.1%} | "
        f"{row['compile_seconds']:.1f} s | {row['temporaries'] / 2**20:,.0f} MiB |"
    )


def cases(given):
    """The rows in groups whose steps are compiled together: (what names a row, arguments of `prepare`)."""
    data = "resident" if given.resident else "streamed"
    todo = [
        (dict(model=name, encoding=encoding or "its own", form=form, data=data), (name, form, encoding, given))
        for name in given.models
        for encoding in given.encodings.split(",")
        for form in given.forms.split(",")
    ]
    return [todo[n : n + given.together] for n in range(0, len(todo), given.together)]


def attempt(function, *arguments):
    """Its result, or the error: one row's must not end the others."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def save(path, head, rows):
    """Beside the rows that are there and not among these."""
    names = lambda row: tuple(row[key] for key in ("model", "encoding", "form", "data"))  # noqa: E731
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {names(row) for row in rows}
    kept = [row for row in kept if names(row) not in new]
    write_whole(path, json.dumps(writer.plain(head | {"rows": kept + rows}), indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])  # [] as without any
    parser.add_argument("--encodings", default="")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--json", type=Path)
    for name, default in dict(steps=5, scale=1, product=2048, together=1).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    given.models = given.models or ["vit_tiny", "vit_s", "lm_c128", "lm_c512"]
    best = {dtype: product(dtype, given.product) for dtype in ("float32", "bfloat16")}
    head = {"device": result.devices(), "versions": result.versions(), "product": best | {"size": given.product}}
    print(f"{head['device']['kind']}, products of {given.product} × {given.product}: ", end="")
    print(", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in best.items()))
    print(f"| {COLUMNS} |\n|{(COLUMNS.count('|') + 1) * ' --- |'}", flush=True)
    rows = []
    for group in cases(given):
        with ThreadPoolExecutor(given.together) as pool:
            ready = list(pool.map(lambda case: attempt(prepare, *case[1]), group))
        for key, one in zip((key for key, _ in group), ready, strict=True):
            row = one if isinstance(one, Exception) else attempt(row_of, key, one, best, given)
            if isinstance(row, Exception):
                why = (str(row).strip().splitlines() or [""])[0]
                row = key | {"failed": f"{type(row).__name__}: {why}"}
            rows.append(row)
            print(line(row), flush=True)
            if given.json:
                save(given.json, head, rows)
        ready.clear()
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
