"""What a training step makes of the machine: model FLOP/s over those of a plain matrix product, from one run.

    python scripts/bench/train_step.py [MODEL …] [--forms as_is,unrolled,…] [--steps 5] [--scale 1]

Models: vit_tiny (cifar100_vit_tiny, DeiT-Ti), vit_s (imagenet_vits_jo), lm_c128 (length_extrapolation), lm_c512
(wikipedia_lm), each from the embedded images or articles through its whole input pipeline. Forms: as_is is scanned,
float32, with the state donated; unrolled, bf16 and undonated change that alone.

- utilisation: the model's FLOPs (jojax/flops.py: matrix products, without the encoding's) a second, over those of a
  2,048 × 2,048 product in the same dtype, measured in this run
- waiting: share of the time in which a step waits for its data, which threads prepare beside it
- --scale multiplies the batches: they are small, for CPUs
"""

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from bench.timing import costs  # noqa: E402
from jojax import clock, config, flops, loop, shard  # noqa: E402

TEXT = {"data.source": "wikipedia_excerpt", "data.path": "", "data.vocab": 8192, "dtype": "float32"}
IMAGES = {
    "data.source": "fashion_mnist",
    "data.path": "",
    "data.name": "",
    "data.valid_split": "test",
    "data.classes": 10,
}
MODELS = {  # spec, overrides
    "vit_tiny": ("cifar100_vit_tiny.py:size=deit_tiny", IMAGES | {"batch_size": 32}),
    "vit_s": ("imagenet_vits_jo.py", IMAGES | {"batch_size": 4, "dtype": "float32"}),
    "lm_c128": ("length_extrapolation.py:size=c128", TEXT | {"batch_size": 4, "eval.lengths": ()}),
    "lm_c512": ("wikipedia_lm.py", TEXT | {"batch_size": 8}),
}
FORMS = {"as_is": {}, "unrolled": {"model.scan": False}, "bf16": {"dtype": "bfloat16"}, "undonated": {}}


def product(dtype, n=2048):
    """FLOP/s of a matrix product."""
    a = jnp.ones((n, n), dtype)
    return 2 * n**3 / costs({"": (lambda a: a @ a, (a,))}, 5)[""].seconds


def measure(name, form, steps, scale):
    """(seconds a step, of compiling, bytes of temporaries, share of waiting, run), training as jojax.loop does it."""
    spec, changes = MODELS[name]
    settings = config.apply_overrides(config.load(f"{ROOT}/configs/{spec}"), changes | FORMS[form])
    settings.batch_size *= scale
    run = loop.Run(settings, name, "")
    run.open_data()
    run.clock = clock.Clock()
    state = run.fresh_state()
    step = jax.jit(lambda *given: run.step_fn(*given)) if form == "undonated" else run.step_fn
    start = time.perf_counter()
    compiled = step.lower(state, run.abstract_batch()).compile()
    compiling, memory = time.perf_counter() - start, compiled.memory_analysis()
    assert memory is not None, "this backend does not tell what a step costs"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.closing(run.batches(0)) as data:
        for n in range(steps + 2):  # the first two fill caches and the threads' queue
            if n == 2:
                run.clock.begin(n)
            with run.clock.waiting():
                batch = shard.to_global(next(data), run.mesh)
            state = jax.block_until_ready(compiled(state, batch))
        rate, waiting = run.clock.lap(steps + 2)
    return 1 / rate, compiling, memory.temp_size_in_bytes, waiting, run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=list(MODELS))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1)
    given = parser.parse_args()
    best = {dtype: product(dtype) for dtype in ("float32", "bfloat16")}
    print("matrix product: " + ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in best.items()))
    print("| model | form | step | a second | utilisation | waiting | compiling | temporaries |\n|" + 8 * " --- |")
    for name in given.models:
        for form in given.forms.split(","):
            seconds, compiling, memory, waiting, run = measure(name, form, given.steps, given.scale)
            used = flops.training(run.config) * run.config.batch_size / seconds / best[run.config.dtype]
            print(
                f"| {name} | {form} | {seconds:.3f} s | {run.job.units_per_step / seconds:,.0f} {run.job.unit} | "
                f"{used:.1%} | {waiting:.1%} | {compiling:.1f} s | {memory / 2**20:,.0f} MiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
