"""Journeys: how a vector at site j looks from site k, and what attention makes of it.

With a step operator R_t at each site, the absolute operator A_i = R_1 R_2 … R_{i−1} (A_1 = I) takes a vector
of site i into the frame of site 1, and the journey from j to k is

    P_{j→k} = A_k⁻¹ A_j      ( = (R_j … R_{k−1})⁻¹ for j < k: source factor included, query factor excluded).

Then P_{j→k} P_{i→j} = P_{i→k} (the cocycle law), P_{j→j} = I, P_{k→j} = P_{j→k}⁻¹, and a constant step R
gives P_{j→k} = R^{j−k}, which on scores is RoPE. The value path carries values along the same journeys,

    c_k = Σ_j α_kj P_{j→k} v_j = A_k⁻¹ Σ_j α_kj A_j v_j,

where L operators do the work of L². Attention, the linear recurrence (state space model) and JoFormer are
three choices of (α, P) in it. Source: JoFormer (arXiv 2506.08652), "Journey Operators" (arXiv 2607.26775).

Shapes: vectors [..., L, d], weights [..., L, L] (query, key), operators with time in front of their own axes:
angles [..., L, d/2], matrices [..., L, d, d].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jojax.algebra.elements import Element, Mul, apply, compose, prefix, product, widen
from jojax.algebra.operators import rotate


class Group(NamedTuple):
    """How operators are held: mul(a, b) = a b, inverse(a) = a⁻¹, act(a, x) = a x, dual(a, x) = a⁻ᵀ x."""

    mul: Mul
    inverse: Callable[[Array], Array]
    act: Callable[[Array, Array], Array]
    dual: Callable[[Array, Array], Array]


def transpose(a: Array) -> Array:
    """aᵀ over the last two axes."""
    return a.swapaxes(-1, -2)


def _turn(angles: Array, x: Array) -> Array:
    return rotate(x, angles)


MATRICES = Group(product, jnp.linalg.inv, apply, lambda a, x: apply(transpose(jnp.linalg.inv(a)), x))
ORTHOGONAL = Group(product, transpose, apply, apply)
ANGLES = Group(jnp.add, jnp.negative, _turn, _turn)


def absolute(steps: Array, mul: Mul, identity: ArrayLike, *, axis: int = 1) -> Array:
    """A_i = R_1 R_2 … R_{i−1} along `axis`, A_1 the identity; shaped as steps. See `elements.prefix`."""
    return prefix(steps, mul, identity, axis=axis)[0]


def journey(a: Array, j: ArrayLike, k: ArrayLike, group: Group = MATRICES, *, axis: int = 1) -> Array:
    """P_{j→k} = A_k⁻¹ A_j from absolute operators a; j, k: indices into `axis`, or arrays of them."""
    return group.mul(group.inverse(jnp.take(a, k, axis)), jnp.take(a, j, axis))


def pairwise(a: Array, group: Group = MATRICES, *, axis: int = 1) -> Array:
    """All journeys at once: [..., L, L, ...] with P_{j→k} at (k, j) in the place of `axis`."""
    return group.mul(group.inverse(jnp.expand_dims(a, axis + 1)), jnp.expand_dims(a, axis))


def values(alpha: Array, a: Array, v: Array, group: Group = MATRICES) -> Array:
    """The value path, factored: c_k = A_k⁻¹ Σ_j α_kj A_j v_j, for v [..., L, d], alpha [..., L, L]."""
    return group.act(group.inverse(a), product(alpha, group.act(a, v)))


def values_pairwise(alpha: Array, a: Array, v: Array, group: Group = MATRICES) -> Array:
    """The value path as defined, c_k = Σ_j α_kj P_{j→k} v_j, with all L² journeys: to check `values` by."""
    moved = group.act(pairwise(a, group, axis=v.ndim - 2), v[..., None, :, :])
    return jnp.einsum("...kj,...kjd->...kd", alpha, moved, precision=lax.Precision.HIGHEST)


def scores(q: Array, k: Array, a: Array, group: Group = MATRICES) -> Array:
    """q_kᵀ P_{j→k} k_j / √d for every pair [..., L, L], factored: (A_k⁻ᵀ q_k) · (A_j k_j)."""
    return product(group.dual(a, q), transpose(group.act(a, k))) / q.shape[-1] ** 0.5


def weights(scores: Array, visible: Array | None = None) -> Array:
    """softmax over the visible keys [..., L, L], in float32 or wider; a row that sees no key is zero."""
    scores = widen(scores)
    if visible is None:
        return jax.nn.softmax(scores)
    masked = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    return jnp.where(visible, jax.nn.softmax(masked), 0.0)


def joformer(q: Array, k: Array, v: Array, a: Array, group: Group = MATRICES, visible: Array | None = None) -> Array:
    """(α, P) = (softmax, A_k⁻¹ A_j): scores and values travel the same journeys."""
    return values(weights(scores(q, k, a, group), visible), a, v, group)


def attention(q: Array, k: Array, v: Array, visible: Array | None = None) -> Array:
    """(α, P) = (softmax, I): plain dot-product attention."""
    return product(weights(product(q, transpose(k)) / q.shape[-1] ** 0.5, visible), v)


def linear_recurrence(a: Array, b: Array) -> Array:
    """(α, P) = (1 on j ≤ k, A_k A_{k−1} … A_{j+1}): h_k = A_k h_{k−1} + b_k with h_0 = 0, for all k at once.

    a [..., L, d, d], b [..., L, d] → h [..., L, d]. The factors *descend*, the source's excluded, the query's
    included: one step off from JoFormer's. A need not be invertible: there is no way back. It is the product
    of the elements (b_k, A_k) with the later one on the left.
    """

    def then(earlier: Element, later: Element) -> Element:
        return compose(later, earlier)

    return lax.associative_scan(then, Element(widen(b), widen(a)), axis=b.ndim - 2).content


def gated_recurrence(
    a: Array, b: Array, restart: Array | None = None, initial: Array | None = None, shards: int = 1
) -> tuple[Array, Array]:
    """`linear_recurrence` of diagonal operators, h_t = a_t ⊙ h_{t−1} + b_t. -> h [B, L, …], the last one [B, …].

    a, b [B, L, …]; restart [B, L], initial [B, …] (h before the first site; None = 0), shards: as in
    `elements.prefix`, which does the work, in float32 or wider. The last h is the next chunk's initial one."""

    def then(earlier: Array, later: Array) -> Array:
        (a, b), (c, d) = (jnp.moveaxis(x, -1, 0) for x in (earlier, later))
        return jnp.stack([a * c, c * b + d], -1)

    start = None if initial is None else jnp.stack([jnp.ones_like(initial), initial], -1)
    step, one = jnp.stack([a, b], -1), jnp.array([1, 0])
    _, through, last = prefix(step, then, one, restart=restart, initial=start, shards=shards)
    return through[..., 1], last[..., 1]
