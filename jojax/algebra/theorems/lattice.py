"""JoFormer on several axes, and which scores its hypotheses leave (Theorems 2.2, 2.4, 2.5, 2.8).

Lattices of SHAPE sites, matrices of width 3 or planes of SO(2)."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from jojax.algebra import grid, operators
from jojax.algebra import journey as jo
from jojax.algebra.grid import Box
from jojax.algebra.journey import ANGLES, ORTHOGONAL
from jojax.algebra.theorems.statement import gap, orthogonal, rotation, run, skew, theorem

PAPER = "JoFormer: several axes, and the classification of scores"
SHAPE, N = (3, 4), 2
SITES = list(np.ndindex(*SHAPE))
TABLE = np.array(SITES)


def commuting(rng):
    """Two rotations of R³ about one axis."""
    s = skew(rng, 3, 3)
    return np.array([expm(a * s) for a in rng.uniform(0.2, 1, 2)])


def steps_of(sites):
    """g_s⁻¹ g_{s+e_k}: steps [2, *SHAPE, 3, 3] from frames g on a lattice one longer on each side."""
    start = sites[:-1, :-1].swapaxes(-1, -2)
    return np.array([start @ sites[1:, :-1], start @ sites[:-1, 1:]])


def path_products(steps):
    """The product of every monotone path across the lattice."""
    paths = grid.monotone((0, 0), (SHAPE[0] - 1, SHAPE[1] - 1))
    return np.array([np.asarray(grid.along(steps, path, (0, 0))) for path in paths])


def rows_first(steps):
    return grid.absolute(steps, jnp.eye(3), (0, 1))


def columns_first(steps):
    return grid.absolute(steps, jnp.eye(3), (1, 0))


def shifted(a):
    """The largest |P_{s+δ→t+δ} − P_{s→t}| over all sites and shifts δ, for frames a [*SHAPE, d, d]."""
    p = run(jo.pairwise, a.reshape(-1, *a.shape[-2:]), group=ORTHOGONAL, axis=0)
    by_gap = {}
    for (i, t), (j, s) in itertools.product(enumerate(TABLE), repeat=2):
        by_gap.setdefault(tuple(t - s), []).append(p[i, j])
    return max(np.ptp(same, axis=0).max() for same in by_gap.values())


@theorem("A5 interchange", "(x∘₁y)∘₂(z∘₁w) = (x∘₂z)∘₁(y∘₂w) if R₁R₂ = R₂R₁", "two rotations at random")
def interchange(rng):
    x, y, z, w = (Box(rng.normal(size=3), (n, m)) for n, m in ((1, 1), (2, 1), (1, 2), (2, 2)))

    def both(generators):
        def put(a, b, axis):
            return grid.compose(a, b, axis, generators)

        return put(put(x, y, 0), put(z, w, 0), 1), put(put(x, z, 1), put(y, w, 1), 0)

    r, s = generators = commuting(rng)
    one, two = both(generators)
    want = x.content + r @ y.content + s @ z.content + r @ s @ w.content
    broken = gap(*(box.content for box in both(orthogonal(rng, 2, 3, 3))))
    return max(gap(one.content, want), gap(two.content, want), gap(one.extent, (3, 3))), broken


@theorem(
    "A5 folding", "a lattice of contents is Σ R₁^r R₂^c v_rc, whatever axis comes first", "two rotations at random"
)
def folding(rng):
    v = rng.normal(size=(*SHAPE, 3))

    def difference(generators):
        power = np.linalg.matrix_power
        want = sum(power(generators[0], r) @ power(generators[1], c) @ v[r, c] for r, c in SITES)
        return max(gap(run(grid.fold_all, v, generators, order=order), want) for order in ((0, 1), (1, 0)))

    return difference(commuting(rng)), difference(orthogonal(rng, 2, 3, 3))


@theorem("F1 Theorem 2.2", "constant steps: all monotone paths agree if R₁R₂ = R₂R₁", "quarter turns about x and z")
def path_independence(rng):
    def spread(generators):
        ends = path_products(np.asarray(grid.constant(generators, SHAPE)))
        r, c = (np.linalg.matrix_power(g, n - 1) for g, n in zip(generators, SHAPE, strict=True))
        return gap(ends, r @ c)

    x, z = np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]]), np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]])
    return spread(commuting(rng)), spread(np.array([x, z], float))


@theorem("F1 plaquettes", "… and if and only if no plaquette has a holonomy: RₓR_z(R_zRₓ)⁻¹ = I", "those quarter turns")
def holonomy(rng):
    def turn(generators):
        loops = run(grid.holonomy, grid.constant(generators, SHAPE))
        return gap(loops, np.eye(3)), float(run(grid.curvature, grid.constant(generators, SHAPE)))

    x, z = np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]]), np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]])
    return max(turn(commuting(rng))), min(turn(np.array([x, z], float)))


@theorem(
    "F2 limit of 2.2", "site-dependent turns are flat as differences of a potential", "turns at random (they commute)"
)
def curl(rng):
    potential = rng.normal(size=(SHAPE[0] + 1, SHAPE[1] + 1, N))
    steps = np.array([np.diff(potential, axis=0)[:, :-1], np.diff(potential, axis=1)[:-1]])
    ends = path_products(rotation(steps))
    want = rotation(potential[SHAPE[0] - 1, SHAPE[1] - 1] - potential[0, 0])
    still = float(run(grid.curvature, steps, group=ANGLES))
    return max(still, gap(ends, want)), float(run(grid.curvature, rng.normal(size=steps.shape), group=ANGLES))


@theorem(
    "F2 Stokes",
    "two paths of planar turns differ by the curls of the plaquettes between them",
    "one plaquette left out",
)
def stokes(rng):
    steps = rng.normal(size=(2, *SHAPE, N))
    last = tuple(n - 1 for n in SHAPE)
    down, across = ((*(0,) * last[0], *(1,) * last[1]), (*(1,) * last[1], *(0,) * last[0]))
    one, two = (grid.along(steps, path, (0, 0), ANGLES) for path in (down, across))
    curls = run(grid.holonomy, steps, group=ANGLES)
    return gap(one - two, curls.sum((0, 1))), gap(one - two, curls[1:].sum((0, 1)))


@theorem(
    "F2 pure gauge", "steps g_s⁻¹g_{s+e} of any frames g are flat, and A_s = g_0⁻¹g_s by any path", "steps at random"
)
def pure_gauge(rng):
    g = orthogonal(rng, SHAPE[0] + 1, SHAPE[1] + 1, 3, 3)
    found = [run(f, steps_of(g)) for f in (rows_first, columns_first)]
    steps = orthogonal(rng, 2, *SHAPE, 3, 3)
    turned = [run(f, steps) for f in (rows_first, columns_first)]
    return max(gap(a, g[0, 0].T @ g[:-1, :-1]) for a in found), gap(*turned)


@theorem(
    "J3 Theorem 2.8",
    "flat and constant: P_{s+δ→t+δ} = P_{s→t} on the lattice",
    "a generator that changes with the site",
)
def displacement(rng):
    angles = rng.normal(size=(2, N))
    steps = np.broadcast_to(rotation(angles)[:, None, None], (2, *SHAPE, 2 * N, 2 * N))
    changing = rotation(angles[:, None, None] * (1 + np.arange(SHAPE[1]))[None, None, :, None])
    changing = np.broadcast_to(changing, steps.shape)
    return tuple(shifted(run(lambda s: grid.absolute(s, jnp.eye(2 * N)), s)) for s in (steps, changing))


@theorem("F3 LieRE", "exp(yS₁ + xS₂) always makes a cocycle; shift-invariant and flat if S₁S₂ = S₂S₁", "S₁S₂ ≠ S₂S₁")
def liere(rng):
    def frames(generators):
        return run(operators.exp_skew, np.tensordot(TABLE, generators, 1)).reshape(*SHAPE, 3, 3)

    def off(generators):
        steps: Any = np.array([expm(s) for s in generators])
        a = frames(generators)
        return max(shifted(a), gap(a, run(rows_first, grid.constant(steps, SHAPE))))

    s, other = skew(rng, 3, 3), skew(rng, 2, 3, 3)
    p = run(jo.pairwise, frames(other).reshape(-1, 3, 3), group=ORTHOGONAL, axis=0)
    return max(off(np.array([0.3 * s, -0.8 * s])), incoherence(p)), off(other)


# -------------------------------------------------------------------------------- classification
def nullity(group):
    """The dimension of {M: TM = MT for all T of the group [n, d, d]}."""
    d = group.shape[-1]
    eye = np.eye(d)
    equations = np.concatenate([np.kron(t, eye) - np.kron(eye, t.T) for t in group])
    return d * d - np.linalg.matrix_rank(equations, tol=1e-9)


def torus(rng, d, count=8, tied=False):
    """Random elements of SO(2)^{d/2}, by jojax's own planes; tied: one angle for all."""
    angles = rng.uniform(-np.pi, np.pi, (count, d // 2))
    return run(operators.plane_matrix, angles[:, :1] + 0 * angles if tied else angles)


def widths(found, want):
    """The largest difference of dimensions over d = 2, 4, 6, 8."""
    return max(abs(found(d) - want(d)) for d in (2, 4, 6, 8))


@theorem(
    "T1 commutant", "what commutes with all of SO(2)^{d/2} has dimension d: a + bJ in each plane", "one angle: d²/2"
)
def toral_commutant(rng):
    return widths(lambda d: nullity(torus(rng, d)), int), widths(lambda d: nullity(torus(rng, d, tied=True)), int)


@theorem("T1 symmetries", "planes permuted too: dimension 2; mirrored in each plane too: d/2", "the torus alone: d")
def more_symmetry(rng):
    def permuted(d):
        planes = np.eye(d // 2)[[np.roll(range(d // 2), 1), np.arange(d // 2)[::-1]]]
        return nullity(np.concatenate([torus(rng, d), np.kron(np.eye(2), planes)]))

    def mirrored(d):
        return nullity(np.concatenate([torus(rng, d), np.diag([1.0] * (d // 2) + [-1.0] * (d // 2))[None]]))

    found = widths(permuted, lambda d: 2), widths(mirrored, lambda d: d // 2)
    return max(found), widths(lambda d: nullity(torus(rng, d)), lambda d: 2)


def planar_journeys(theta):
    """P_{j→k} [L, L, D, D] of angles [L, D/2]."""
    return run(_planar_journeys, theta)


def _planar_journeys(theta):
    return operators.plane_matrix(jo.pairwise(theta, ANGLES, axis=0))


def variance(group, p):
    """How far p [L, L, d, d] is from commuting with the group [n, d, d]."""
    return gap(np.einsum("gxy,ijyz->gijxz", group, p), np.einsum("ijxy,gyz->gijxz", p, group))


def incoherence(p):
    """How far p is from a cocycle."""
    return np.abs(np.einsum("kjxy,jiyz->kjixz", p, p) - p[:, None]).max()


def stretch(p):
    """How far p is from orthogonal."""
    return gap(p @ p.swapaxes(-1, -2), np.eye(p.shape[-1]))


@theorem("T2 Theorem 2.4", "the four hypotheses leave M_ij = R(θ_j − θ_i)", "no cocycle law: a phase for each pair")
def toral_scores(rng):
    sites, d = 5, 2 * N
    free = rng.normal(size=(sites, sites, d, d))
    quarter = np.array(list(itertools.product(range(4), repeat=N))) * np.pi / 2
    t = run(operators.plane_matrix, quarter)
    mean = np.einsum("gxy,ijyz,gwz->ijxw", t, free, t) / len(t)  # (ii): the commutant
    a, b = (mean[..., range(N), k] for k in (range(N), range(N, d)))
    phase = np.arctan2(-b, a)  # (iv): a unit complex number a plane
    theta = phase[0] - phase[0, :1]  # (iii): all from the first site's row
    tree = rotation(theta)
    want = tree.swapaxes(-1, -2)[:, None] @ tree[None]
    p = planar_journeys(theta)
    return max(gap(p, want), variance(t, p)), gap(p, rotation(phase))


@theorem("T2 norms", "e^{−λ(k−j)}R(θ_j − θ_k) (xPos) keeps the other three", "the fourth: norms")
def without_norms(rng):
    theta, rate = rng.normal(size=(5, N)), rng.uniform(0.1, 0.5, N)
    scale = np.exp(np.tile(np.arange(5)[:, None] * rate, 2))
    p = run(jo.pairwise, rotation(theta) * scale[:, None], axis=0)
    return max(incoherence(p), variance(torus(rng, 2 * N), p)), gap(np.linalg.norm(p, axis=(-2, -1)), (2 * N) ** 0.5)


@theorem("T3 the fifth", "θ_j = j²ω passes all four; RoPE's θ_j = jω is shift-invariant too", "j²ω under shifts")
def fifth_hypothesis(rng):
    omega, site, t = rng.uniform(0.1, 1, N), np.arange(6)[:, None], torus(rng, 2 * N)
    line, square = planar_journeys(site * omega), planar_journeys(site**2 * omega)
    four = [f for p in (line, square) for f in (incoherence(p), variance(t, p), stretch(p))]
    return max(*four, gap(line[1:, 1:], line[:-1, :-1])), gap(square[1:, 1:], square[:-1, :-1])


@theorem("T4 Theorem 2.5", "what commutes with O(d), or SO(d) for d ≥ 3, is a scalar", "SO(2), d = 2: dimension 2")
def collapse(rng):
    def proper(d):
        r = orthogonal(rng, 8, d, d)
        r[:, 0] *= np.linalg.det(r)[:, None]
        return nullity(r)

    special = max(abs(proper(d) - 1) for d in (3, 4, 6))
    return max(widths(lambda d: nullity(orthogonal(rng, 8, d, d)), lambda d: 1), special), abs(proper(2) - 1)


@theorem("T4 signs", "M_ij = s_i s_j I, s = ±1, passes the hypotheses of 2.5 as well", "yet it is not M_ij = I")
def signs(rng):
    s = np.array([1, -1, -1, 1, -1])[:, None, None] * np.eye(3)
    p, r = run(jo.pairwise, s, group=ORTHOGONAL, axis=0), orthogonal(rng, 8, 3, 3)
    return max(incoherence(p), variance(r, p), stretch(p)), gap(p, np.eye(3))
