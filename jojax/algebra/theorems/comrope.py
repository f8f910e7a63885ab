"""ComRoPE: when R(u) = exp(Σ_i u_i A_i) is relative, and what it then is (arXiv 2506.03737, with 2406.10322 and
2502.02562). A: skew generators of two axes [2, N, N]; coordinates u real, off any lattice."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm, expm_frechet

from jojax.algebra import exponential, operators
from jojax.algebra import journey as jo
from jojax.algebra.journey import ORTHOGONAL
from jojax.algebra.theorems.statement import gap, orthogonal, run, skew, theorem

PAPER = "ComRoPE: commuting generators"
L, N = 5, 4


def shared(rng):
    """LD: one generator for both axes, θ_i B."""
    return rng.normal(size=(2, 1, 1)) * skew(rng, N, N)


def partitioned(rng):
    """AP: blocks of width N/2, axis i in block i alone."""
    a = np.zeros((2, N, N))
    for i, half in enumerate((slice(N // 2), slice(N // 2, N))):
        a[i, half, half] = skew(rng, N // 2, N // 2)
    return a


def rotations(generators, u):
    """R(u) for generators [2, N, N], u [..., 2]."""
    return run(operators.exp_skew, np.tensordot(u, generators, 1))


def relative(generators, x, y):
    """|R(x)ᵀR(y) − R(y − x)| over all pairs, the right side by SciPy."""
    pairs = rotations(generators, x).swapaxes(-1, -2) @ rotations(generators, y)
    return gap(pairs, [expm(np.tensordot(b - a, generators, 1)) for a, b in zip(x, y, strict=True)])


def score(q, k, frames):
    return jo.scores(q, k, frames, ORTHOGONAL)


def score_shift(generators, rng, still=0):
    """How scores change when all coordinates but the first `still` move by one offset: [L, L]."""
    u, (q, k) = rng.uniform(size=(L, 2)), rng.normal(size=(2, L, N))
    moved = u + np.array([0.37, -1.9]) * (np.arange(L) >= still)[:, None]
    return np.subtract(*(run(score, q, k, rotations(generators, at)) for at in (u, moved)))


@theorem("Theorem 1, if", "A₁A₂ = A₂A₁: R(x)ᵀR(y) = R(y − x) for real x, y (AP and LD)", "independent A_i (LieRE)")
def commuting(rng):
    x, y = rng.uniform(size=(2, L, 2))
    return max(relative(a, x, y) for a in (shared(rng), partitioned(rng))), relative(skew(rng, 2, N, N), x, y)


@theorem("Theorem 1, only if", "the defect is −½[X, Y]t² + O(t³), X = Σx_iA_i", "¼ for ½, as printed", 1e-5)
def leading_term(rng):
    a, (x, y), t = skew(rng, 2, N, N), rng.uniform(size=(2, 2)), 1e-3

    def defect(t):
        r = rotations(a, t * np.array([x, y, y - x]))
        return r[0].T @ r[1] - r[2]

    second = (defect(t) + defect(-t)) / 2 / t**2  # odd orders cancel
    big_x, big_y = np.tensordot(np.array([x, y]), a, 1)
    bracket = big_x @ big_y - big_y @ big_x
    return gap(second, -bracket / 2), gap(second, -bracket / 4)


@theorem("a line", "on one line, s ↦ R(sv), the law holds for any generators", "two directions")
def on_a_line(rng):
    a, (s, t), v = skew(rng, 2, N, N), rng.uniform(size=(2, L, 1)), rng.normal(size=(2, 2))
    return relative(a, s * v[0], t * v[0]), relative(a, s * v[0], t * v[1])


@theorem("blocks of two", "b = 2 always commutes: planes turned by Σ u_i θ_i (RoPE-Mixed, LieRE₂)", "blocks of three")
def blocks_of_two(rng):
    u, theta, x = rng.uniform(size=(L, 2)), rng.normal(size=(2, N // 2)), rng.normal(size=(L, N))
    blocks = theta[..., None, None] * np.array([[0, -1], [1, 0]])
    r = rotations(blocks.reshape(2, -1, 2, 2), u)
    mixed = run(operators.rotate, x, u @ theta, pairing="interleaved")
    found = np.einsum("lmij,lmj->lmi", r, x.reshape(L, -1, 2)).reshape(L, N)
    return gap(found, mixed), relative(skew(rng, 2, 3, 3), *rng.uniform(size=(2, L, 2)))


def eigenplanes(b):
    """S, w with B = S blockdiag(w_f J) Sᵀ, planes side by side: from eigenvectors of iB."""
    w, v = np.linalg.eigh(1j * b)
    w, v = w[w > 0], v[:, w > 0]
    return np.stack([v.real, v.imag], -1).reshape(len(b), -1) * 2**0.5, w


@theorem("structure", "exp(sB) = S rot(s w) Sᵀ with S orthogonal, w the moduli of B's spectrum", "S left out")
def structure(rng):
    b, phase = skew(rng, N, N), rng.normal(size=L) * 9
    s, w = eigenplanes(b)
    found = run(exponential.exp_phases, b, phase)
    turns = run(operators.plane_matrix, phase[:, None] * w, pairing="interleaved")
    planes = max(gap(s @ turns @ s.T, found), gap(s.T @ s, np.eye(N)))
    return max(planes, gap(found, [expm(p * b) for p in phase])), gap(turns, found)


@theorem("fold", "LD is plain RoPE on projections turned once, Sᵀq and Sᵀk", "a gain on each channel in between")
def fold(rng):
    theta, b, u = rng.normal(size=2), skew(rng, N, N), rng.uniform(size=(L, 2))
    (q, k), gain = rng.normal(size=(2, L, N)), rng.uniform(0.5, 2, N)
    s, w = eigenplanes(b)
    r = rotations(theta[:, None, None] * b, u)

    def plain(q, k):
        q, k = (run(operators.rotate, x, np.outer(u @ theta, w), pairing="interleaved") for x in (q, k))
        return q @ k.T / N**0.5

    return gap(run(score, q, k, r), plain(q @ s, k @ s)), gap(
        run(score, gain * q, gain * k, r), plain(gain * (q @ s), gain * (k @ s))
    )


@theorem("offset", "one offset for all coordinates changes no score", "LieRE")
def offset(rng):
    return np.abs(score_shift(shared(rng), rng)).max(), np.abs(score_shift(skew(rng, 2, N, N), rng)).max()


@theorem(
    "class token", "with a token that has no place, patch–patch scores stay under an offset", "the token's own scores"
)
def class_token(rng):
    change = np.abs(score_shift(partitioned(rng), rng, still=1))
    return change[1:, 1:].max(), change[0, 1:].max()


@theorem("Cayley", "exp(sB)exp(tB) = exp((s + t)B)", "Cayley's map, orthogonal too: 2 atan(sw/2) is not additive")
def cayley(rng):
    b, (s, t) = skew(rng, N, N), rng.uniform(1, 2, 2)

    def substitute(s):
        return np.linalg.solve(np.eye(N) - s * b / 2, np.eye(N) + s * b / 2)

    r = run(exponential.exp_phases, b, np.array([s, t]))
    tall = np.array([substitute(s), substitute(t)])
    upright = float(run(operators.orthogonality_error, tall).max())
    return max(gap(r[0] @ r[1], expm((s + t) * b)), upright), gap(tall[0] @ tall[1], substitute(s + t))


@theorem("closed b = 4", "exp A = Π± (cos μ± + sin μ±/μ± A±), A± = (A ± *A)/2", "A+ alone")
def isoclinic(rng):
    a = skew(rng, 4, 4)
    dual = np.zeros((4, 4))
    for (i, j), (k, l), sign in (((0, 1), (2, 3), 1), ((0, 2), (1, 3), -1), ((0, 3), (1, 2), 1)):
        dual[k, l], dual[i, j] = sign * a[i, j], sign * a[k, l]
    dual -= dual.T
    parts = []
    for half in ((a + dual) / 2, (a - dual) / 2):
        mu = np.linalg.norm(half) / 2
        parts.append(np.cos(mu) * np.eye(4) + np.sin(mu) / mu * half)
    found = run(operators.exp_skew, a)
    return gap(found, parts[0] @ parts[1]), gap(found, parts[0])


@theorem("gradient", "∂ exp(sB)x by sinc of eigenvalue gaps is the Fréchet derivative, at B = 0 too", "s y xᵀ, no gaps")
def gradient(rng):
    along, (x, y), s = skew(rng, N, N), rng.normal(size=(2, N)), 1.7

    def slope(b):
        return run(jax.grad(loss), b, s, x, y)

    def loss(b, s, x, y):
        return jnp.dot(y, exponential.exp_phases(b, s) @ x)

    b = skew(rng, N, N)
    want = [s * y @ expm_frechet(s * at, along, compute_expm=False) @ x for at in (b, 0 * b)]
    found = [(slope(at) * along).sum() for at in (b, 0 * b)]
    return gap(found, want), abs(s * y @ along @ x - want[0])


@theorem("zero start", "LD with P = 0 and θ = 0 has no gradient, and stays there", "P = 0, θ ≠ 0: it starts to move")
def zero_start(rng):
    u, (x, y) = rng.uniform(size=(L, 2)), rng.normal(size=(2, L, N))

    def loss(p, theta):
        turned = exponential.exp_phases(operators.skew(p), u @ theta) @ x[..., None]
        return jnp.sum(y * turned[..., 0])

    def slope(theta):
        return max(np.abs(g).max() for g in run(jax.grad(loss, (0, 1)), np.zeros((N, N)), theta))

    return slope(np.zeros(2)), slope(rng.normal(size=2))


@theorem("overlap", "rotations of disjoint planes commute in any basis, B(⊕)Bᵀ", "planes that share a direction")
def disjoint(rng):
    basis = orthogonal(rng, N, N)
    pairs = [basis[:, [i, j]] for i, j in ((0, 1), (2, 3), (1, 2))]
    planes = np.array([a[:, :1] * a[:, 1] - a[:, 1:] * a[:, 0] for a in pairs])
    r = run(operators.exp_skew, planes)
    return gap(r[0] @ r[1], expm(planes[0] + planes[1])), gap(r[0] @ r[2], expm(planes[0] + planes[2]))
