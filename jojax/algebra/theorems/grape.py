"""GRAPE's rotations: one plane, many planes, phases (arXiv 2512.07805, sections 2, 3, 5, appendices B, D, G, I).

L(a, b) = abᵀ − baᵀ; α = ‖a‖², β = ‖b‖², γ = aᵀb, s = √(αβ − γ²). E1 … E8: errata of the paper."""

import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from jojax.algebra import elements, exponential, grid, operators
from jojax.algebra import journey as jo
from jojax.algebra.journey import ANGLES, ORTHOGONAL
from jojax.algebra.theorems.statement import gap, orthogonal, rotation, run, skew, theorem

PAPER = "GRAPE: multiplicative"
L, D = 6, 4
STEPS = np.array([0.0, 1, -3, 17, 4095])


def plane(a, b):
    """L(a, b) by jojax's own skew."""
    return run(operators.skew, np.outer(a, b))


def area(a, b):
    """s"""
    return np.sqrt(a @ a * (b @ b) - (a @ b) ** 2)


@theorem("Rodrigues", "exp(nωL) = 1 + (sin z/s)L + ((1 − cos z)/s²)L², z = nωs", "E1: f₁L + f₂L² without nω", 1e-9)
def rodrigues(rng):
    (a, b), omega = rng.normal(size=(2, D)), 0.3
    big, s = np.outer(a, b) - np.outer(b, a), area(a, b)
    z = (STEPS * omega * s)[:, None, None]
    want = np.eye(D) + np.sin(z) / s * big + (1 - np.cos(z)) / s**2 * big @ big
    literal = np.eye(D) + np.sinc(z / np.pi) * big + np.sinc(z / 2 / np.pi) ** 2 / 2 * big @ big
    found = run(exponential.exp_phases, plane(a, b), STEPS * omega)
    small = run(operators.exp_skew, omega * plane(a, b))
    return max(gap(found, want), gap(small, want[1])), gap(found, literal)


@theorem("spectrum", "L² = −s²P_U, L³ = −s²L, eigenvalues ±is, 0", "s² = αβ, without −γ²")
def spectrum(rng):
    a, b = rng.normal(size=(2, D))
    big, s = plane(a, b), area(a, b)
    u = np.linalg.qr(np.array([a, b]).T)[0]
    found = np.sort(np.linalg.eigvals(big).imag)
    laws = gap(big @ big, -(s**2) * u @ u.T), gap(big @ big @ big, -(s**2) * big)
    return max(*laws, gap(found, [-s, 0, 0, s])), gap(big @ big, -(a @ a) * (b @ b) * u @ u.T)


@theorem("sign E7", "exp(nθ L(e₁, e₂)) turns by −nθ: U J Uᵀ = −L(u₁, u₂)", "+nθ, as the paper's equation says")
def sign(rng):
    x, angle = rng.normal(size=2), 0.7
    found = run(operators.exp_skew, angle * plane(*np.eye(2))) @ x
    return tuple(gap(found, run(operators.rotate, x, np.array([t * angle]))) for t in (-1, 1))


@theorem(
    "group law", "overlapping planes: G(m)G(n) = G(m + n), GᵀG = 1, det G = 1", "the product of their exponentials"
)
def group_law(rng):
    planes = np.array([plane(*rng.normal(size=(2, D))) for _ in range(2)])
    g = run(exponential.exp_phases, planes.sum(0), np.array([0.4, -1.1, -0.7]))
    upright = float(run(operators.orthogonality_error, g).max())
    apart = run(exponential.exp_phases, planes, np.full((1, 2), 0.4))[0]
    laws = gap(g[0] @ g[1], g[2]), gap(np.linalg.det(g), 1), gap(g[0], expm(0.4 * planes.sum(0)))
    return max(upright, *laws), gap(apart[0] @ apart[1], g[0])


@theorem("unitary E2", "planes (a_i, 𝒥a_i) of a unitary frame commute", "a_i orthogonal only, a_i not ⊥ 𝒥a_k")
def unitary(rng):
    def half(x):
        return np.kron([[0, -1], [1, 0]], np.eye(D // 2)) @ x

    z = np.linalg.qr(rng.normal(size=(D // 2,) * 2) + 1j * rng.normal(size=(D // 2,) * 2))[0]
    good = np.concatenate([z.real, z.imag]).T
    e = np.eye(D)[[0, 2, 1, 3]]  # 𝒥e₁ is then the third
    bad = np.array([e[0], (e[1] + e[2]) / 2**0.5])

    def together(frame):
        planes = np.array([plane(a, half(a)) for a in frame])
        parts = run(exponential.exp_phases, planes, np.ones((1, len(planes))))[0]
        return gap(parts[0] @ parts[1], expm(planes.sum(0)))

    return together(good), together(bad)


@theorem("basis", "scores of B R(tθ)Bᵀ are RoPE's of Bᵀq, Bᵀk: the outer B cancels", "values: there it does not")
def basis(rng):
    theta, b, (q, k, v) = rng.normal(size=D // 2), orthogonal(rng, D, D), rng.normal(size=(3, L, D))
    angles = np.arange(L)[:, None] * theta
    g = b @ rotation(angles) @ b.T
    found, folded = run(jo.scores, q, k, g, group=ORTHOGONAL), run(jo.scores, q @ b, k @ b, angles, group=ANGLES)
    alpha = np.tri(L)
    moved = run(jo.values, alpha, g, v, group=ORTHOGONAL), run(jo.values, alpha, angles, v @ b, group=ANGLES)
    return max(gap(found, folded), gap(moved[0], moved[1] @ b.T)), gap(*moved)


@theorem("thin", "generators in a span E: G x = x + E(exp(nEᵀLE) − 1)Eᵀx, RoPE in the Schur basis", "E not orthonormal")
def thin(rng):
    free, core, n = rng.normal(size=(2 * D, D)), skew(rng, D, D), 1.3
    e = np.linalg.qr(free)[0]
    found = np.eye(2 * D) + e @ (run(exponential.exp_phases, core, np.array([n]))[0] - np.eye(D)) @ e.T
    loose = np.eye(2 * D) + free @ (expm(n * core) - np.eye(D)) @ free.T
    w, v = np.linalg.eigh(1j * core)
    schur = np.stack([v[:, w > 0].real, v[:, w > 0].imag], -1).reshape(D, D) * 2**0.5
    turn = run(operators.plane_matrix, n * w[w > 0], pairing="interleaved")
    rope = np.eye(2 * D) + e @ (schur @ turn @ schur.T - np.eye(D)) @ e.T
    want = expm(n * e @ core @ e.T)
    return max(gap(found, want), gap(rope, want)), gap(loose, expm(n * free @ core @ free.T))


@theorem("phase", "content phases: G_tᵀG_j = exp((Φ_j − Φ_t)L), Φ_t = Σ_{l<t} ω_l", "inclusive sums: the query's step")
def phase(rng):
    big, omega = skew(rng, D, D), rng.uniform(size=L)
    exclusive, inclusive, _ = run(lambda w: elements.prefix(w, jnp.add, 0.0, axis=0), omega)
    pairs = [
        run(jo.pairwise, run(exponential.exp_phases, big, p), group=ORTHOGONAL, axis=0) for p in (exclusive, inclusive)
    ]
    want = [[expm((omega[:j].sum() - omega[:t].sum()) * big) for j in range(L)] for t in range(L)]
    return gap(pairs[0], want), gap(pairs[1], want)


@theorem("2-D", "exp(uL₁)exp(vL₂) is relative if [L₁, L₂] = 0: a flat lattice", "planes that overlap")
def two_axes(rng):
    e = orthogonal(rng, D, D)

    def curvature(pairs):
        turns = run(operators.exp_skew, np.array([plane(e[i], e[j]) for i, j in pairs]))
        return float(run(grid.curvature, grid.constant(turns, (3, 3))))

    return curvature(((0, 1), (2, 3))), curvature(((0, 1), (1, 2)))


@theorem(
    "QK-norm order", "an RMS norm after the rotation is relative if gains are equal in a plane", "gains of their own"
)
def norm_order(rng):
    q, k, theta, gains = *rng.normal(size=(2, D)), rng.normal(size=D // 2), rng.uniform(0.5, 2, D)

    def score(gain, t, j):
        turned = [run(operators.rotate, x, at * theta) for x, at in ((q, t), (k, j))]
        a, b = (gain * x / np.sqrt((x**2).mean()) for x in turned)
        return a @ b

    tied = np.tile(gains[: D // 2], 2)
    return tuple(gap(score(gain, 5.0, 2.0), score(gain, 105.0, 102.0)) for gain in (tied, gains))
