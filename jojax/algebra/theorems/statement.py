"""What a row of the table is: a statement that is run, beside a case that must break it.

A check draws its inputs from the generator that it is given and answers (residual, counter-example's residual). It
lets jojax's own functions meet a computation that uses none of them: NumPy loops, SciPy's matrix exponential.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

MARGIN = 1e3  # a counter-example must miss the tolerance by this factor


class Row(NamedTuple):
    """A statement with what came out: `holds` where the residual is within the tolerance and `counter` far beyond."""

    paper: str
    name: str
    statement: str
    residual: float
    tolerance: float
    broken_by: str
    counter: float
    holds: bool


class Theorem(NamedTuple):
    name: str
    statement: str
    broken_by: str
    tolerance: float
    check: Callable[[np.random.Generator], tuple[Any, Any]]

    def row(self, paper: str) -> Row:
        residual, counter = map(float, self.check(np.random.default_rng(0)))
        holds = residual <= self.tolerance < counter and counter >= MARGIN * self.tolerance
        return Row(paper, self.name, self.statement, residual, self.tolerance, self.broken_by, counter, holds)


def theorem(name: str, statement: str, broken_by: str, tolerance: float = 1e-12) -> Callable[[Callable], Theorem]:
    """Makes a check a theorem."""
    return lambda check: Theorem(name, statement, broken_by, tolerance, check)


def rows(module: ModuleType) -> list[Row]:
    """The rows of a module's theorems, in the order in which they stand there."""
    return [found.row(module.PAPER) for found in vars(module).values() if isinstance(found, Theorem)]


@functools.cache
def compiled(f: Callable, **static: Any) -> Callable:
    quick = {"xla_backend_optimization_level": 0}  # compiling is what takes the time here
    return jax.jit(functools.partial(f, **static), compiler_options=quick)


def run(f: Callable, *args: Any, **static: Any) -> Any:
    """f(*args), compiled, as NumPy arrays; `forget` what was compiled where something that f calls has changed."""
    return jax.tree.map(np.asarray, compiled(f, **static)(*args))


forget = compiled.cache_clear


def gap(a: Any, b: Any) -> float:
    """The largest difference between entries; NaN where there is one."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def orthogonal(rng: np.random.Generator, *shape: int) -> Any:
    return np.linalg.qr(rng.normal(size=shape))[0]


def skew(rng: np.random.Generator, *shape: int) -> Any:
    free = rng.normal(size=shape)
    return free - free.swapaxes(-1, -2)


def rotation(angles: np.ndarray) -> np.ndarray:
    """R(θ) [..., D, D] with the planes (p, p + D/2), entry by entry."""
    n = angles.shape[-1]
    r, p = np.zeros((*angles.shape[:-1], 2 * n, 2 * n)), np.arange(n)
    r[..., p, p] = r[..., p + n, p + n] = np.cos(angles)
    r[..., p + n, p], r[..., p, p + n] = np.sin(angles), -np.sin(angles)
    return r


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal(scores: np.ndarray) -> np.ndarray:
    """softmax over the sites up to the query's own."""
    return softmax(np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf))
