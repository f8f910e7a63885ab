"""Several axes: composition along each, steps on a lattice, its paths, and what going round a plaquette leaves behind.

A box is a content with an extent along every axis. Two boxes compose along axis k where their other extents agree,

    x ∘_k y = (a + R_k^{n_k} b, n_k + m_k on axis k),

each ∘_k associative, and the interchange law (x ∘_i y) ∘_j (z ∘_i w) = (x ∘_j z) ∘_i (y ∘_j w) holds for all
contents if and only if R_i R_j = R_j R_i (directional non-commutative monoids, arXiv 2505.15507).

On a lattice a path from s to t multiplies the steps it takes, earlier ones on the left. All monotone paths agree
("flat") if and only if going round each plaquette gives the identity,

    R^i_s R^j_{s+e_i} = R^j_s R^i_{s+e_j}.

For steps that are the same everywhere this is R_i R_j = R_j R_i (Journey Operators, Theorem 2.2). For steps that depend
on the site commuting is not enough: planar rotations commute, and are flat only where their angles are the
differences of a potential. A curved lattice has absolute operators by convention only (`absolute`).

Shapes: `steps` [A, n_1, …, n_A, …op]: steps[k] at site s leads from s to s + e_k (the last ones lead out of the lattice
and are not used). The operators are matrices [d, d], or what another `Group` holds: angles [d/2].
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jojax.algebra.elements import Element, apply, fold, prefix
from jojax.algebra.journey import MATRICES, Group

Site = tuple[int, ...]


class Box(NamedTuple):
    """Content [..., d] with its extent (n_1, …, n_A) in lattice steps."""

    content: Array
    extent: Site


def compose(x: Box, y: Box, axis: int, generators: Array) -> Box:
    """x ∘_axis y for generators [A, d, d], one an axis. ValueError where another extent differs."""
    grown = x.extent[axis] + y.extent[axis]
    if (extent := _put(x.extent, axis, grown)) != _put(y.extent, axis, grown):
        raise ValueError(f"boxes of {x.extent} and {y.extent} do not fit along axis {axis}.")
    power = jnp.linalg.matrix_power(generators[axis], x.extent[axis])
    return Box(x.content + apply(power, y.content), extent)


def fold_all(contents: Array, generators: Array, order: Sequence[int]) -> Array:
    """The content [d] of a lattice of unit boxes [n_1, …, n_A, d], composed along the axes in this order.

    Σ_s R_{o_A}^{s} … R_{o_1}^{s} v_s: by the interchange law no order differs where the generators commute."""
    left = list(range(len(generators)))
    for axis in order:
        at = left.index(axis)
        left.remove(axis)
        steps = jnp.broadcast_to(generators[axis], (*contents.shape, contents.shape[-1]))
        contents = fold(Element(contents, steps), axis=at).content
    return contents


def constant(generators: Array, shape: Site) -> Array:
    """Steps that are the same everywhere: generators [A, …op] on a lattice of this shape."""
    a, *op = generators.shape
    return jnp.broadcast_to(generators.reshape(a, *(1,) * len(shape), *op), (a, *shape, *op))


def monotone(start: Site, end: Site) -> Iterator[tuple[int, ...]]:
    """All monotone paths from start to end, each as the axes of its steps."""
    if start == end:
        yield ()
    for axis, (a, b) in enumerate(zip(start, end, strict=True)):
        if a < b:
            for rest in monotone(_put(start, axis, a + 1), end):
                yield axis, *rest


def along(steps: Array, path: Iterable[int], start: Site, group: Group = MATRICES) -> Array:
    """The product of the steps taken, first on the left, of a path of at least one step: an operator […op]."""
    factors, site = [], start
    for axis in path:
        factors.append(steps[(axis, *site)])
        site = _put(site, axis, site[axis] + 1)
    return reduce(group.mul, factors)


def absolute(steps: Array, identity: ArrayLike, order: Sequence[int] | None = None, group: Group = MATRICES) -> Array:
    """A_s [n_1, …, n_A, …op]: the product from the origin to s by a path that goes along the axes in `order`
    (default: the last axis first) to the end before it takes the next. One scan an axis."""
    order = tuple(reversed(range(len(steps)))) if order is None else tuple(order)
    total = jnp.asarray(identity, steps.dtype)
    for i, axis in enumerate(order):
        edge = steps[axis]
        for later in order[i + 1 :]:
            edge = lax.slice_in_dim(edge, 0, 1, axis=later)  # not yet gone along
        total = group.mul(total, prefix(edge, group.mul, identity, axis=axis)[0])
    return total


def both_ways(steps: Array, i: int, j: int, group: Group = MATRICES) -> tuple[Array, Array]:
    """Across every plaquette of the axes i ≠ j, i first and j first: [.., n_i − 1, .., n_j − 1, .., …op] each."""

    def corner(k: int, shifted: int | None = None) -> Array:
        edge = steps[k]
        for axis in (i, j):
            first = int(axis == shifted)
            edge = lax.slice_in_dim(edge, first, first + steps.shape[1 + axis] - 1, axis=axis)
        return edge

    return group.mul(corner(i), corner(j, i)), group.mul(corner(j), corner(i, j))


def holonomy(steps: Array, i: int = 0, j: int = 1, group: Group = MATRICES) -> Array:
    """Once round every plaquette, out along i and j, back along i: R^i R^j (R^j R^i)⁻¹; the identity where flat.
    For angles their curl θ^i_s + θ^j_{s+e_i} − θ^j_s − θ^i_{s+e_j}, not wrapped."""
    there, other = both_ways(steps, i, j, group)
    return group.mul(there, group.inverse(other))


def curvature(steps: Array, group: Group = MATRICES) -> Array:
    """The largest entry by which the two ways across any plaquette differ: zero if and only if the lattice is flat."""
    pairs = [(i, j) for i in range(len(steps)) for j in range(i)]
    found = [jnp.abs(jnp.subtract(*both_ways(steps, i, j, group))).max(initial=0) for i, j in pairs]
    return jnp.stack(found).max() if found else jnp.zeros((), steps.dtype)


def flat(steps: Array, tolerance: float, group: Group = MATRICES) -> Array:
    """Do all monotone paths agree? (bool)"""
    return curvature(steps, group) <= tolerance


def _put(site: Site, axis: int, value: int) -> Site:
    return (*site[:axis], value, *site[axis + 1 :])
