"""Compile, time and weigh functions side by side: what every benchmark here shares."""

import time
from typing import NamedTuple

import jax


class Cost(NamedTuple):
    seconds: float  # the fastest call
    bytes: int  # temporaries of the compiled function
    flops: float  # as the compiler counts them


def costs(functions, repeats):
    """{name: (function, arguments)} -> {name: Cost}. All are compiled first and then called in turn, so that what
    the machine does meanwhile meets all alike."""
    compiled = {name: jax.jit(f).lower(*given).compile() for name, (f, given) in functions.items()}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, (_, given) in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*given))
            best[name] = min(best[name], time.perf_counter() - start)
    out = {}
    for name, f in compiled.items():
        memory, counted = f.memory_analysis(), f.cost_analysis()
        assert memory is not None and counted is not None, "this backend does not tell what a function costs"
        out[name] = Cost(best[name], memory.temp_size_in_bytes, counted["flops"])
    return out
