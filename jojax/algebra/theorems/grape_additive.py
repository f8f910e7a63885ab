"""GRAPE's biases: unipotent lifts, ALiBi, FoX, and the path sum of GRAPE-AP (arXiv 2512.07805, sections 4, 5,
appendices C, E, G; 2108.12409; 2503.02130).

A query [q; 1; 0] and a key [k; 0; 1] of width D + 2 meet through products of 1 − ψE, E = e_{D+2} e_{D+1}ᵀ: the score
is qᵀk + b. jojax multiplies and inverts the matrices; b is summed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jojax.algebra import elements, grid, operators
from jojax.algebra import journey as jo
from jojax.algebra.theorems.statement import gap, run, softmax, theorem

PAPER = "GRAPE: additive"
L, D = 6, 3
E = np.zeros((D + 2, D + 2))
E[D + 1, D] = 1
BACK = np.subtract.outer(np.arange(L), np.arange(L))  # t − j
SEEN: Any = BACK >= 0


def lifted(rng):
    """qᵀk [L, L] and the lifted queries and keys [L, D + 2]."""
    (q, k), one, zero = rng.normal(size=(2, L, D)), np.ones((L, 1)), np.zeros((L, 1))
    return q @ k.T, np.concatenate([q, one, zero], 1), np.concatenate([k, zero, one], 1)


def products(steps):
    """(exclusive, inclusive, last) products of matrices [L, d, d]."""
    return elements.prefix(steps, elements.product, jnp.eye(steps.shape[-1]), axis=0)


def path(step):
    return elements.prefix(step, jnp.add, 0.0, axis=0)


def bias(rng, frames):
    """What scores gain over qᵀk where keys travel by the frames A [L, D + 2, D + 2]."""
    plain, q, k = lifted(rng)
    return run(jo.scores, q, k, frames) * (D + 2) ** 0.5 - plain


def dual(g):
    """g⁻ᵀ: the frames of section 4, whose scores hold G(j − t)⁻ᵀ. Section 5 has Π⁻ᵀ of the path from j to t: gᵀ."""
    return np.linalg.inv(g).swapaxes(-1, -2)


def between(step):
    """Σ_{j<l≤t} step_l at (t, j), a loop; below zero on the other side."""
    return np.array([[step[j + 1 : t + 1].sum() - step[t + 1 : j + 1].sum() for j in range(L)] for t in range(L)])


def log_forget(rng):
    return -np.log1p(np.exp(-rng.normal(size=L)))


@theorem("unipotent", "A² = 0: exp(nωA) = 1 + nωA, inverse 1 − nωA, det 1, all eigenvalues 1", "A of rank one, A² ≠ 0")
def unipotent(rng):
    n, a = -3.7, rng.normal(size=(D + 2, 1)) * np.eye(D + 2)[D]
    straight = [run(operators.expm, n * x) for x in (E, a)]
    want = np.eye(D + 2) + n * E
    inverse = gap(run(jo.journey, np.array([want, np.eye(D + 2)]), j=1, k=0, axis=0), np.eye(D + 2) - n * E)
    spectrum = gap(np.linalg.eigvals(straight[0]), 1), gap(np.linalg.det(straight[0]), 1)
    return max(gap(straight[0], want), inverse, *spectrum), gap(straight[1], np.eye(D + 2) + n * a)


@theorem(
    "singular pair", "only two singular values are not 1: √(1 + s²/2 ± |s|√(1 + s²/4))", "an orthogonal one: all 1"
)
def singular_values(rng):
    s = rng.normal() * 2
    found = np.sort(np.linalg.svd(run(operators.expm, s * E), compute_uv=False))
    pair = np.sqrt(1 + s**2 / 2 + np.array([-1, 1]) * abs(s) * np.sqrt(1 + s**2 / 4))
    return gap(found, np.sort([*pair, *[1] * D])), gap(found, 1)


@theorem("ALiBi", "G(n) = 1 − nβE gives the bias (j − t)β, exactly", "the inverse transpose left out")
def alibi(rng):
    beta = 0.25
    g = run(products, np.broadcast_to(np.eye(D + 2) - beta * E, (L, D + 2, D + 2)))[0]
    plain, q, k = lifted(rng)
    same_side = run(jo.scores, q, k, g, group=jo.ORTHOGONAL) * (D + 2) ** 0.5 - plain
    return gap(bias(rng, dual(g)), -BACK * beta), gap(same_side, -BACK * beta)


@theorem("(D+1)-lift", "[x; 1]: the score is qᵀk + 1 + (t − j)ω uᵀk", "without the 1, and of the other sign (4.6)")
def smaller_lift(rng):
    (q, k), u, omega = rng.normal(size=(2, L, D)), rng.normal(size=D), 0.2
    step = np.eye(D + 1)
    step[:D, D] = omega * u
    g = run(products, np.broadcast_to(step, (L, D + 1, D + 1)))[0]
    q1, k1 = (np.concatenate([x, np.ones((L, 1))], 1) for x in (q, k))
    found = run(jo.scores, q1, k1, dual(g)) * (D + 1) ** 0.5
    return gap(found, q @ k.T + 1 + BACK * omega * (k @ u)), gap(found, q @ k.T - BACK * omega * (k @ u))


@theorem("dictionary", "A_rA_s = 0: several generators add their biases", "A₁A₂ ≠ 0: order and squares enter")
def dictionary(rng):
    width = D + 3
    first, second, chained = np.zeros((3, width, width))
    first[D + 1, D], second[D + 2, D], chained[D + 2, D + 1] = 1, 1, 1

    def off(other):
        steps = np.eye(width) + np.array([a * first + b * other for a, b in ab])
        return gap(run(products, steps)[2], np.eye(width) + ab[:, 0].sum() * first + ab[:, 1].sum() * other)

    ab = rng.normal(size=(L, 2))
    return off(second), off(chained)


@theorem("FoX", "H = 1 − (log f)E gives D_tj = Σ_{j<l≤t} log f_l, and e^D = Πf", "E3: exclusive sums, the path [j, t)")
def fox(rng):
    log_f = log_forget(rng)
    exclusive, inclusive, _ = run(products, np.eye(D + 2) - log_f[:, None, None] * E)
    found, early = (bias(rng, g.swapaxes(-1, -2)) for g in (inclusive, exclusive))
    kept = np.array([[np.exp(log_f[j + 1 : t + 1]).prod() for j in range(t + 1)] + [0] * (L - t - 1) for t in range(L)])
    return max(gap(found, between(log_f)), gap(np.exp(found) * SEEN, kept)), gap(early, between(log_f))


@theorem("FoX is ALiBi", "log f = −β where w = 0, c = −log(e^β − 1)", "c = −β")
def fox_as_alibi(rng):
    beta = 0.25
    gates = [np.full(L, c) for c in (-np.log(np.expm1(beta)), -beta)]
    found = [np.subtract.outer(u, u) for u in (run(path, run(jax.nn.log_sigmoid, c))[1] for c in gates)]
    return tuple(gap(f, -BACK * beta) for f in found)


@theorem("sign E4 E5", "bias +D needs H = 1 − ψE under the inverse transpose", "appendix C's 1 + ψE: −D")
def fox_sign(rng):
    log_f = log_forget(rng)
    inclusive = (run(products, np.eye(D + 2) - t * log_f[:, None, None] * E)[1] for t in (1, -1))
    return tuple(gap(bias(rng, g.swapaxes(-1, -2)), between(log_f)) for g in inclusive)


@theorem("joint E6", "−mωΛ at (D + 2, D + 1) gives the bias mωΛ, m = j − t", "as printed, at (D + 1, D + 2): bias 0")
def joint(rng):
    gate = rng.uniform(0.5, 1)
    g = run(products, np.broadcast_to(np.eye(D + 2) - gate * E, (L, D + 2, D + 2)))[0]
    return tuple(gap(bias(rng, dual(h)), -BACK * gate) for h in (g, g.swapaxes(-1, -2)))


@theorem("P3 path product", "Π(1 − ψ_l E) = 1 − bE, b = Σψ_l", "E² = E: the product of (1 − ψ_l)")
def path_product(rng):
    psi, idempotent = rng.normal(size=L), np.diag(np.eye(D + 2)[D])

    def off(e):
        return gap(run(products, np.eye(D + 2) - psi[:, None, None] * e)[2], np.eye(D + 2) - psi.sum() * e)

    return off(E), off(idempotent)


# -------------------------------------------------------------------------------- GRAPE-AP
def rms(p):
    return p / np.sqrt((p**2).mean(-1, keepdims=True))


def edge_scores(query, key, both=True, start=0.0):
    """z_tl = ⟨R_t p_t, R_l p_l⟩/d_p, one radian a site in every plane; both = False turns the key alone."""
    turns = (start + np.arange(L))[:, None] * np.ones(query.shape[-1] // 2)
    turned = run(operators.rotate, query, turns) if both else query
    return turned @ run(operators.rotate, key, turns).T / query.shape[-1]


def path_bias(psi):
    """b_tj = Σ_{j<l≤t} ψ_tl for ψ [L, L], by jojax's sums along each row."""
    total = run(path, psi.T)[1].T
    return np.diag(total)[:, None] - total


def log_sigmoid(z):
    return -np.log1p(np.exp(-z))


@theorem(
    "P1 path bias", "b_tt = 0, b ≤ 0, falling with distance: b_tj = Σ_{j<l≤t} ψ_tl, ψ < 0", "l = j included: b_tt < 0"
)
def path_bias_law(rng):
    psi = 0.25 * log_sigmoid(edge_scores(*rms(rng.normal(size=(2, L, 4)))))
    b = path_bias(psi)
    want = np.array([[psi[t, j + 1 : t + 1].sum() for j in range(t)] + [0] * (L - t) for t in range(L)])
    rising = max(-np.diff(b, axis=1)[SEEN[:, 1:]].min(), 0)
    return max(gap(b * SEEN, want), np.where(SEEN, b, 0).max(), rising), gap((b + psi) * SEEN, want)


@theorem("P2 bounds", "both sides normalised: −1.3133 α(t − j) ≤ b ≤ −0.3133 α(t − j)", "the raw query: unbounded")
def bounds(rng):
    def beyond(query, key):
        b = path_bias(0.25 * log_sigmoid(edge_scores(query, key)))
        low, high = (0.25 * BACK * log_sigmoid(t) for t in (-1.0, 1.0))
        return np.where(SEEN, np.maximum(b - high, low - b), 0).max()

    p = rng.normal(size=(L, 4))
    return beyond(rms(p), rms(p)), beyond(9 * p, rms(p))


@theorem("P4 shifts", "R on both sides of ⟨R_t p_t, R_l p_l⟩: b does not change under a shift", "R on the key alone")
def shifts(rng):
    p, q = rms(rng.normal(size=(2, L, 4)))

    def change(both):
        return gap(*(path_bias(log_sigmoid(edge_scores(p, q, both, start))) for start in (0.0, 37.0)))

    return change(True), change(False)


@theorem("P5 gradient", "dψ_tl = −Σ_{l≤j≤t} dS_tj, S the logits", "without j = l")
def path_gradient(rng):
    s, g, psi = *rng.normal(size=(2, L, L)), -rng.uniform(size=(L, L))

    def loss(s, psi):
        total = path(psi.T)[1].T
        return jnp.sum(g * jo.weights(s + jnp.diagonal(total)[:, None] - total, SEEN))

    ds, dpsi = run(jax.grad(loss, (0, 1)), s, psi)
    late, later = (
        np.array([[-ds[t, l + off : t + 1].sum() if l else 0 for l in range(L)] for t in range(L)]) for off in (0, 1)
    )
    return gap(dpsi[:, 1:], (late * SEEN)[:, 1:]), gap(dpsi[:, 1:], (later * SEEN)[:, 1:])


@theorem("AP is ALiBi", "p = 0, α = β/ln 2 gives (j − t)β; ψ_tl = log f_l gives FoX", "α = β")
def recoveries(rng):
    still, log_f = np.zeros((L, 4)), log_forget(rng)
    found, other = (a * path_bias(log_sigmoid(edge_scores(still, still))) for a in (0.25 / np.log(2), 0.25))
    return max(gap(found, -BACK * 0.25), gap(path_bias(np.tile(log_f, (L, 1))), between(log_f))), gap(
        other, -BACK * 0.25
    )


@theorem("AP quadratic", "ψ = −ln 2 + z/2 − z²/8: softmax needs sums of keys alone (O(1) streams)", "z²/8 left out")
def quadratic(rng):
    (p, key), n = rms(rng.normal(size=(2, L, 4))), 4
    z = edge_scores(p, key)
    dense = path_bias(-np.log(2) + z / 2 - z**2 / 8)
    turns = np.arange(L)[:, None] * np.ones(n // 2)
    query, keys = (run(operators.rotate, x, turns) for x in (p, key))
    first = run(path, keys)[1]
    second = run(path, keys[:, :, None] * keys[:, None])[1]
    linear = np.log(2) * np.arange(L) - query @ first.T / (2 * n)
    square = np.einsum("ti,jik,tk->tj", query, second, query) / (8 * n * n)

    def off(streamed):
        return gap(*(run(jo.weights, b, SEEN) for b in (dense, streamed)))

    return off(linear + square), off(linear)


@theorem("softmax shift", "what the query alone adds to the logits does nothing: b_tj and −U_j agree", "+U_j")
def shift_invariance(rng):
    s, u = rng.normal(size=(L, L)), log_forget(rng).cumsum()
    found = [run(jo.weights, s + t * u, SEEN) for t in (-1, 1)]
    want = softmax(np.where(SEEN, s + u[:, None] - u, -np.inf))
    return gap(found[0], want), gap(found[1], want)


@theorem("2-D E8", "m = α_xΔx + α_yΔy is additive: unipotent steps on a lattice are flat", "m = ‖Δ‖ as a path sum")
def two_axes(rng):
    shape, alpha = (3, 4), rng.uniform(0.2, 1, 2)
    lattice = grid.constant(np.eye(D + 2) + alpha[:, None, None] * E, shape)
    a = run(lambda s: grid.absolute(s, jnp.eye(D + 2)), lattice)
    site = np.moveaxis(np.indices(shape), 0, -1)
    radial = np.linalg.norm(site * alpha, axis=-1)
    return gap(a[..., D + 1, D], site @ alpha), gap(radial, site @ alpha)
