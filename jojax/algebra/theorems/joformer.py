"""JoFormer on one axis: elements, journeys, the value path, and the hierarchy that it makes (arXiv 2505.15507,
2506.08652, 2607.26775). Sizes: L sites, vectors of width D."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jojax.algebra import elements, operators
from jojax.algebra import journey as jo
from jojax.algebra.elements import Element
from jojax.algebra.journey import ANGLES, ORTHOGONAL
from jojax.algebra.theorems.statement import causal, gap, orthogonal, rotation, run, theorem

PAPER = "JoFormer: elements, journeys, the value path"
L, D = 6, 4
SEEN: Any = np.tri(L, dtype=bool)
pair: Any = Element  # of NumPy arrays


def element(rng, *lead):
    return pair(rng.normal(size=(*lead, D)), orthogonal(rng, *lead, D, D))


def far(x, y):
    return max(map(gap, x, y))


def products(steps):
    """A_1 … A_{n+1}: the products of ever more steps, by a loop."""
    out = [np.eye(steps.shape[-1])]
    for r in steps:
        out.append(out[-1] @ r)
    return np.array(out)


def journeys(a):
    """P_{j→k} = A_k⁻¹ A_j at (k, j), by inverting matrices."""
    return np.linalg.inv(a)[:, None] @ a[None]


def frames(steps):
    return jo.absolute(steps, elements.product, jnp.eye(D), axis=0)


def sums(angles, start=0.0):
    """Exclusive and inclusive prefix sums, and the last."""
    return elements.prefix(angles, jnp.add, 0.0, axis=0, initial=jnp.broadcast_to(start, angles.shape[1:]))


def causal_joformer(q, k, v, angles):
    return jo.joformer(q, k, v, angles, ANGLES, SEEN)


def steps_and_vectors(rng):
    """Angles [L, D/2] and q, k, v [L, D]."""
    return rng.uniform(-np.pi, np.pi, (L, D // 2)), *rng.normal(size=(3, L, D))


@theorem("A1 associativity", "(x∘y)∘z = x∘(y∘z), and a tree of products is the left fold", "(v + Rw, SR)")
def associativity(rng):
    v, r = x = element(rng, 3)
    left = pair(v[0] + r[0] @ v[1] + r[0] @ r[1] @ v[2], r[0] @ r[1] @ r[2])
    one, two, three = (pair(*t) for t in zip(*x, strict=True))
    tree = run(lambda x: jax.tree.map(lambda t: t[-1], lax.associative_scan(elements.compose, x)), x)
    left_first = run(lambda a, b, c: elements.compose(elements.compose(a, b), c), one, two, three)

    def swapped(x, y):
        return pair(x.content + x.operator @ y.content, y.operator @ x.operator)

    broken = far(swapped(swapped(one, two), three), swapped(one, swapped(two, three)))
    right = run(lambda a, b, c: elements.compose(a, elements.compose(b, c)), one, two, three)
    return max(far(tree, left), far(left_first, left), far(right, left)), broken


@theorem("A2 inverse", "(−R⁻¹v, R⁻¹) is a two-sided inverse, (0, I) the identity", "(−v, R⁻¹)")
def inverse(rng):
    x, one = element(rng), pair(np.zeros(D), np.eye(D))
    found = run(elements.inverse, x)
    both = run(elements.compose, x, found), run(elements.compose, found, x)
    neutral = run(lambda x: elements.compose(elements.identity(D, x.content.dtype), x), x)
    wrong = run(elements.compose, x, pair(-x.content, x.operator.T))
    return max(far(both[0], one), far(both[1], one), far(neutral, x)), far(wrong, one)


@theorem("A3 commuting", "elements commute where R, S do and v, w keep one point p fixed", "R = S, any v and w")
def commuting(rng):
    r, s = (rotation(a) for a in rng.normal(size=(2, D // 2)))
    p, v, w = rng.normal(size=(3, D))
    x, y = pair(p - r @ p, r), pair(p - s @ p, s)
    a, b = pair(v, r), pair(w, r)
    return tuple(far(run(elements.compose, *t), run(elements.compose, *t[::-1])) for t in ((x, y), (a, b)))


@theorem("A4 fold", "x_1 ∘ … ∘ x_n = (Σ A_t v_t, A_{n+1}), A_t = R_1 … R_{t−1}", "inclusive prefixes R_1 … R_t")
def fold(rng):
    x = element(rng, L)
    a = products(x.operator)
    exclusive, inclusive = (np.einsum("tij,tj->i", part, x.content) for part in (a[:-1], a[1:]))
    found = run(elements.fold, x)
    return far(found, (exclusive, a[-1])), gap(found.content, inclusive)


@theorem("J1 cocycle", "P_{j→k} P_{i→j} = P_{i→k}, P_{j→j} = I", "a decay e^{−(k−j)²} of the pair")
def cocycle(rng):
    def broken(p):
        triples = np.einsum("kjxy,jiyz->kjixz", p, p) - p[:, None]
        return max(np.abs(triples).max(), gap(np.einsum("jjxy->jxy", p), np.eye(D)))

    p = run(lambda a: jo.pairwise(a, ORTHOGONAL, axis=0), run(frames, orthogonal(rng, L, D, D)))
    between = np.subtract.outer(np.arange(L), np.arange(L))
    return broken(p), broken(p * np.exp(-(between**2.0))[..., None, None])


@theorem("J2 journey", "P_{j→k} = (R_j R_{j+1} … R_{k−1})⁻¹ and P_{k→j} its inverse", "the other sign, R_j … R_{k−1}")
def journey(rng):
    steps = orthogonal(rng, L, D, D) + 0.1 * rng.normal(size=(L, D, D))
    there = products(steps[1:5])[-1]
    p, back = (run(jo.journey, run(frames, steps), j=j, k=k, axis=0) for j, k in ((1, 5), (5, 1)))
    return max(gap(p, np.linalg.inv(there)), gap(back, there)), gap(p, there)


@theorem("RoPE", "a constant step R gives the scores qᵀ R^{j−k} k / √d", "R^{k−j}")
def rope(rng):
    omega, (q, k) = rng.uniform(0.1, 1, D // 2), rng.normal(size=(2, L, D))
    exclusive = run(sums, np.broadcast_to(omega, (L, D // 2)))[0]
    between = np.arange(L) - np.arange(L)[:, None]
    want, other = (
        np.einsum("id,ijde,je->ij", q, rotation(t * between[..., None] * omega), k) / D**0.5 for t in (1, -1)
    )
    found = run(jo.scores, q, k, exclusive, group=ANGLES)
    return gap(found, want), gap(found, other)


@theorem("V1 factored", "A_k⁻¹ Σ α A_j v_j = Σ α P_{j→k} v_j: L operators for L²", "no way home, Σ α A_j v_j")
def factored(rng):
    step, _, _, v = steps_and_vectors(rng)
    a, alpha = run(sums, step)[0], causal(rng.normal(size=(L, L)))
    want = np.einsum("kj,kjde,je->kd", alpha, journeys(rotation(a)), v)
    found = run(jo.values, alpha, a, v, group=ANGLES), run(jo.values_pairwise, alpha, a, v, group=ANGLES)
    return max(gap(f, want) for f in found), gap(alpha @ run(operators.rotate, v, a), want)


@theorem("V2 self term", "a site alone keeps its value, at any angle", "no way home")
def self_term(rng):
    step, _, _, v = (t[:1] for t in steps_and_vectors(rng))
    return gap(run(jo.values, np.ones((1, 1)), step, v, group=ANGLES), v), gap(run(operators.rotate, v, step), v)


@theorem("V3 norm bound", "‖c_k‖ ≤ max ‖v_j‖, attained by a vector that all sites share", "weights log(1 + e^s)")
def norm_bound(rng):
    a, s = steps_and_vectors(rng)[0], rng.normal(size=(L, L))
    shared = np.einsum("jed,e->jd", rotation(a), rng.normal(size=D))  # A_j⁻¹ u: u as every site sees it
    size = np.linalg.norm(shared[0])
    bounded, raw = (
        np.linalg.norm(run(jo.values, w, a, shared, group=ANGLES), axis=-1)
        for w in (run(jo.weights, s), np.log1p(np.exp(s)))
    )
    return gap(bounded, size), gap(raw, size)


@theorem("V4 gauge", "one more turn for all sites changes no output", "V turned, output not turned back")
def gauge(rng):
    step, q, k, v = steps_and_vectors(rng)
    a, turned = step, step + rng.normal(size=D // 2)
    one, two = (run(causal_joformer, q, k, v, f) for f in (a, turned))
    return gap(one, two), gap(*(np.tri(L) @ run(operators.rotate, v, f) for f in (a, turned)))


@theorem("V5 fixed", "constant steps sum to tω, and in- or exclusive sums make no difference", "other steps: they do")
def fixed(rng):
    step, q, k, v = steps_and_vectors(rng)
    omega = rng.uniform(0.1, 1, D // 2)

    def outputs(step):
        return [run(causal_joformer, q, k, v, f) for f in run(sums, step)[:2]]

    def by_hand(theta):
        p = journeys(rotation(theta))
        alpha = causal(np.einsum("kd,kjde,je->kj", q, p, k) / D**0.5)
        return np.einsum("kj,kjde,je->kd", alpha, p, v)

    same = outputs(np.broadcast_to(omega, (L, D // 2)))
    want = by_hand(np.arange(L)[:, None] * omega)
    return max(gap(found, want) for found in same), gap(*outputs(step))


@theorem("V7 suffix", "suffix sums of −a are prefix sums of a in another gauge", "suffix sums of +a")
def suffix(rng):
    step = steps_and_vectors(rng)[0]
    ahead = run(jo.pairwise, run(sums, step)[0], group=ANGLES, axis=0)
    behind = np.flip(np.flip(step, 0).cumsum(0), 0)
    return tuple(gap(ahead, t * (behind[:, None] - behind)) for t in (1, -1))


@theorem("C1 causality", "what stands at t is bit for bit blind to what comes", "suffix sums leak rounding", 0.0)
def causality(rng):
    (step, q, k, v), t = steps_and_vectors(rng), 4
    other = np.where(np.arange(L)[:, None] < t, step, rng.normal(size=step.shape))

    def before(frame):
        return [run(causal_joformer, q, k, v, frame(s))[:t] for s in (step, other)]

    behind = before(lambda s: -np.flip(np.flip(s, 0).cumsum(0), 0))
    return gap(*before(lambda s: run(sums, s)[0])), gap(*behind)


@theorem("C2 streaming", "with the last sum handed on, chunks equal the whole", "each chunk from zero")
def streaming(rng):
    step = steps_and_vectors(rng)[0]
    whole = np.concatenate([0 * step[:1], step.cumsum(0)])[:-1]
    first, _, last = run(sums, step[:4])
    going_on, anew = (run(sums, step[4:], start)[0] for start in (last, 0 * last))
    return tuple(gap(np.concatenate([first, rest]), whole) for rest in (going_on, anew))


@theorem("S1 Theorem F.1", "h_k = A_k h_{k−1} + b_k is Σ_j (A_k … A_{j+1}) b_j, singular A too", "ascending products")
def unrolled(rng):
    a, b = rng.normal(size=(L, D, D)), rng.normal(size=(L, D))
    a[:, :, 0] = 0
    down = sum(products(a[j + 1 :][::-1])[-1] @ b[j] for j in range(L))
    up = sum(products(a[j + 1 :])[-1] @ b[j] for j in range(L))
    found = run(jo.linear_recurrence, a, b)[-1]
    return gap(found, down), gap(found, up)


@theorem("S2 attention", "(softmax, P = I) is plain attention", "P ≠ I on the value path")
def plain_attention(rng):
    step, q, k, v = steps_and_vectors(rng)
    want = causal(q @ k.T / D**0.5) @ v
    still, moving = (run(causal_joformer, q, k, v, f) for f in (0 * step, step))
    return max(gap(run(jo.attention, q, k, v, SEEN), want), gap(still, want)), gap(moving, want)


@theorem("S2 recurrence", "(α = 1, P) is the linear recurrence h = A h + v, where P's step is A_{t+1}⁻¹", "step A_t⁻¹")
def recurrence(rng):
    a, v = orthogonal(rng, L, D, D), rng.normal(size=(L, D))
    h = [v[0]]
    for t in range(1, L):
        h.append(a[t] @ h[-1] + v[t])
    back = a.swapaxes(-1, -2)
    ahead, here = (
        run(jo.values, 1.0 * SEEN, run(frames, step), v, group=ORTHOGONAL) for step in (np.roll(back, -1, 0), back)
    )
    return max(gap(ahead, h), gap(run(jo.linear_recurrence, a, v), h)), gap(here, h)


@theorem("S2 gates", "diagonal A: the same h by one scan of pairs (a, b), a chunk from the last h", "a chunk from zero")
def gates(rng):
    a, v = rng.uniform(size=(1, L, D)), rng.normal(size=(1, L, D))
    h = [v[0, 0]]
    for t in range(1, L):
        h.append(a[0, t] * h[-1] + v[0, t])
    dense = run(jo.linear_recurrence, a[..., None] * np.eye(D), v)[0]
    first, last = run(jo.gated_recurrence, a[:, :4], v[:, :4])
    going_on, anew = (run(jo.gated_recurrence, a[:, 4:], v[:, 4:], None, state)[0] for state in (last, 0 * last))
    whole, broken = (np.concatenate([first, rest], 1)[0] for rest in (going_on, anew))
    return max(gap(dense, h), gap(whole, h)), gap(broken, h)


@theorem("S2 JoFormer", "(softmax, A_k⁻¹A_j), scores and values on one journey", "values that stay, as in RoPE")
def joformer(rng):
    a, (q, k, v) = orthogonal(rng, L, D, D) + 0.1 * rng.normal(size=(L, D, D)), rng.normal(size=(3, L, D))
    p = journeys(products(a)[:-1])
    alpha = causal(np.einsum("kd,kjde,je->kj", q, p, k) / D**0.5)
    found = run(lambda f: jo.joformer(q, k, v, f, visible=SEEN), run(frames, a))
    return gap(found, np.einsum("kj,kjde,je->kd", alpha, p, v)), gap(alpha @ v, found)
