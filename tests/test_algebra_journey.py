"""Journeys and the value path: the laws in float64, each beside what must break it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jojax.algebra import elements, operators
from jojax.algebra import journey as jo
from jojax.algebra.journey import ANGLES, MATRICES, ORTHOGONAL

B, L, N = 2, 7, 3
D = 2 * N
CAUSAL = np.tril(np.ones((L, L), bool))
GROUPS = {"angles": ANGLES, "orthogonal": ORTHOGONAL, "general": MATRICES}


def jitted(f, *static):
    """f, compiled, with NumPy results: slicing those compiles nothing."""
    fast = jax.jit(f, static_argnames=static)
    return lambda *args, **kwargs: jax.tree.map(np.asarray, fast(*args, **kwargs))


prefix, absolute = (jitted(f, "mul") for f in (elements.prefix, jo.absolute))
journey, pairwise, values, values_pairwise, scores, joformer = (
    jitted(f, "group") for f in (jo.journey, jo.pairwise, jo.values, jo.values_pairwise, jo.scores, jo.joformer)
)
attention, linear_recurrence, weights = (jitted(f) for f in (jo.attention, jo.linear_recurrence, jo.weights))
rotate, plane_matrix, softplus = (jitted(f) for f in (operators.rotate, operators.plane_matrix, jax.nn.softplus))
act = jitted(lambda a, x, group: group.act(a, x), "group")


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def law(test):
    """A property over fifteen drawn seeds."""
    rules = settings(max_examples=15, deadline=None, derandomize=True)
    return rules(given(seed=st.integers(0, 2**32 - 1))(test))


def close(a, b, tol=1e-10):
    return np.allclose(a, b, rtol=0, atol=tol)


def steps(rng, kind):
    """R_t [B, L, …] in the group's own form."""
    if kind == "angles":
        return rng.uniform(-np.pi, np.pi, (B, L, N))
    q = np.linalg.qr(rng.normal(size=(B, L, D, D)))[0]
    return q if kind == "orthogonal" else q + 0.05 * rng.normal(size=q.shape)


def frames(step, kind):
    return absolute(step, GROUPS[kind].mul, 0.0 if kind == "angles" else np.eye(D))


def vectors(rng, *lead):
    return rng.normal(size=(*lead, B, L, D))


def softmax(rng):
    return weights(rng.normal(size=(B, L, L)), CAUSAL)


def suffix(step):
    """Σ_{u ≥ t}: the form that looks ahead."""
    return np.flip(np.flip(step, 1).cumsum(1), 1)


def cocycle(p):
    """Largest |P_{j→k} P_{i→j} − P_{i→k}| over all triples of P[B, to, from, d, d]."""
    return np.abs(np.einsum("bkjxy,bjiyz->bkjixz", p, p) - p[:, :, None]).max()


def shift(p):
    """Largest |P_{j+s→k+s} − P_{j→k}|."""
    return max(np.abs(p[:, s:, s:] - p[:, : L - s, : L - s]).max() for s in range(1, L))


@pytest.mark.parametrize("kind", GROUPS)
@law
def test_journeys_are_a_cocycle(kind, seed):
    rng = np.random.default_rng(seed)
    a = frames(steps(rng, kind), kind)
    p, (j, k) = pairwise(a, GROUPS[kind]), rng.integers(0, L, (2, 4))
    assert close(journey(a, j, k, GROUPS[kind]), p[:, k, j])
    assert close(journey(a, 2, 5, GROUPS[kind]), p[:, 5, 2])
    p = plane_matrix(p) if kind == "angles" else p
    assert cocycle(p) < 1e-10 and close(np.einsum("bjjxy->bjxy", p), np.eye(D))
    assert close(p[:, k, j], np.linalg.inv(p[:, j, k]))
    gap = np.arange(L)[:, None] - np.arange(L)
    assert cocycle(p * np.exp(-(gap**2.0))[..., None, None]) > 1e-2  # a decay that is no function of the site


@pytest.mark.parametrize("kind", ["orthogonal", "general"])
@law
def test_a_journey_undoes_the_steps_from_source_to_query(kind, seed):
    r = steps(np.random.default_rng(seed), kind)
    a = frames(r, kind)
    for j, k in (0, 1), (1, 5), (2, 6):
        there = r[:, j]
        for t in range(j + 1, k):
            there = there @ r[:, t]  # R_j R_{j+1} … R_{k−1}: the source's step, not the query's
        back = journey(a, j, k)
        assert close(back, np.linalg.inv(there)) and close(journey(a, k, j), there)
        assert not close(back, there, tol=1e-2)  # the other published sign is the inverse
        late = np.linalg.inv(r[:, j]) @ there @ r[:, k]  # the query's step, not the source's
        assert not close(back, np.linalg.inv(late), tol=1e-2)


@law
def test_equal_steps_make_journeys_of_displacement_alone(seed):
    rng = np.random.default_rng(seed)
    one, omega, site = steps(rng, "orthogonal")[:, :1], rng.uniform(0.1, 3, (B, 1, N)), np.arange(L)[:, None]
    same = pairwise(frames(np.broadcast_to(one, (B, L, D, D)), "orthogonal"), ORTHOGONAL)
    line, square, content = (
        plane_matrix(pairwise(a, ANGLES))
        for a in (site * omega, site**2 * omega, frames(steps(rng, "angles"), "angles"))
    )
    assert shift(same) < 1e-10 and shift(line) < 1e-10
    for p in square, content:  # invariance under shifts asks more than the cocycle law
        assert shift(p) > 1e-2 and cocycle(p) < 1e-10


@pytest.mark.parametrize("kind", GROUPS)
@law
def test_the_factored_value_path_equals_all_pairs(kind, seed):
    rng = np.random.default_rng(seed)
    a, alpha, v = frames(steps(rng, kind), kind), softmax(rng), vectors(rng)
    direct = values_pairwise(alpha, a, v, GROUPS[kind])
    assert close(values(alpha, a, v, GROUPS[kind]), direct)
    assert not close(alpha @ act(a, v, GROUPS[kind]), direct, tol=1e-2)  # never brought home


@pytest.mark.parametrize("kind", GROUPS)
@law
def test_factored_scores_equal_all_pairs(kind, seed):
    rng = np.random.default_rng(seed)
    a, (q, k) = frames(steps(rng, kind), kind), vectors(rng, 2)
    moved = act(pairwise(a, GROUPS[kind]), k[:, None], GROUPS[kind])
    want = np.einsum("bkd,bkjd->bkj", q, moved) / np.sqrt(D)
    assert close(scores(q, k, a, GROUPS[kind]), want)
    if kind == "general":  # where A is not orthogonal, queries need A⁻ᵀ
        assert not close(scores(q, k, a, ORTHOGONAL), want, tol=1e-2)


@law
def test_a_site_alone_keeps_its_value(seed):
    rng = np.random.default_rng(seed)
    offset, v = steps(rng, "angles")[:, :1], vectors(rng)[:, :1]
    assert close(values(np.ones((B, 1, 1)), offset, v, ANGLES), v)
    assert not close(rotate(v, offset), v, tol=1e-2)  # the frame's own angle shows if it is not taken back


@law
def test_outputs_are_no_longer_than_the_longest_value(seed):
    rng = np.random.default_rng(seed)
    a, v, length = frames(steps(rng, "angles"), "angles"), vectors(rng), partial(np.linalg.norm, axis=-1)
    assert close(length(rotate(v, journey(a, 1, 4, ANGLES)[:, None])), length(v))
    longest = length(v).max(-1, keepdims=True)
    assert (length(values(softmax(rng), a, v, ANGLES)) <= longest + 1e-10).all()
    aligned = rotate(np.broadcast_to(v[:, :1], v.shape), -a)  # one vector, as each site sees it
    raw = softplus(np.abs(rng.normal(size=(B, L, L))))  # weights that do not sum to one
    assert (length(values(raw, a, aligned, ANGLES)) > length(v[:, :1])).all()


@pytest.mark.parametrize("kind", GROUPS)
@law
def test_the_common_frame_is_a_gauge(kind, seed):
    rng = np.random.default_rng(seed)
    a, (q, k, v), group, turn = (
        frames(steps(rng, kind), kind),
        vectors(rng, 3),
        GROUPS[kind],
        steps(rng, kind),
    )
    moved = turn[:, :1] + a if kind == "angles" else turn[:, :1] @ a
    assert close(joformer(q, k, v, moved, group, CAUSAL), joformer(q, k, v, a, group, CAUSAL))
    alpha = softmax(rng)
    assert not close(alpha @ act(moved, v, group), alpha @ act(a, v, group), tol=1e-2)  # without the way home


@law
def test_constant_steps_are_rope_and_nothing_else_is(seed):
    rng = np.random.default_rng(seed)
    (q, k, v), omega, site = vectors(rng, 3), rng.uniform(0.1, 1, (B, 1, N)), np.arange(L)[:, None]

    def outputs(step):
        exclusive, inclusive, _ = prefix(step, jnp.add, 0.0)
        return [joformer(q, k, v, a, ANGLES, CAUSAL) for a in (exclusive, inclusive)]

    rope = joformer(q, k, v, site * omega, ANGLES, CAUSAL)
    assert all(close(found, rope) for found in outputs(np.broadcast_to(omega, (B, L, N))))
    relative = (q[:, 6:7] * rotate(k, (site - 6) * omega)).sum(-1) / np.sqrt(D)
    assert close(scores(q, k, site * omega, ANGLES)[:, 6], relative)
    exclusive, inclusive = outputs(steps(rng, "angles"))
    assert not close(exclusive, inclusive, tol=1e-2)


@law
def test_a_suffix_sum_is_the_prefix_of_the_other_sign_in_another_gauge(seed):
    step = steps(np.random.default_rng(seed), "angles")
    ahead = frames(step, "angles")
    assert close(suffix(-step) - ahead, -step.sum(1, keepdims=True))
    assert close(pairwise(suffix(-step), ANGLES), pairwise(ahead, ANGLES))
    assert not close(pairwise(suffix(step), ANGLES), pairwise(ahead, ANGLES), tol=1e-2)


@law
def test_causality_is_exact_with_prefixes_and_lost_with_suffixes(seed):
    rng = np.random.default_rng(seed)
    step, other, qkv, change = steps(rng, "angles"), steps(rng, "angles"), vectors(rng, 3), vectors(rng, 3)
    t = 4
    later = (np.arange(L) >= t)[:, None]

    def change_of(frame):
        one = joformer(*qkv, frame(step), ANGLES, CAUSAL)
        two = joformer(*np.where(later, change, qkv), frame(np.where(later, other, step)), ANGLES, CAUSAL)
        return np.abs(two - one).max(axis=(0, 2))

    exact = change_of(lambda step: frames(step, "angles"))
    assert (exact[:t] == 0).all() and (exact[t:] > 1e-2).all()
    leaking = change_of(lambda step: suffix(-step))
    assert 0 < leaking[:t].max() < 1e-10  # rounding, from the future


@law
def test_the_linear_recurrence_is_the_product_in_descending_order(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(B, L, D, D)) / 2, vectors(rng)
    a[:, :, 0] = 0  # singular: there is no journey back
    h, plain = np.zeros((B, D, 1)), []
    for k in range(L):
        h = a[:, k] @ h + b[:, k, :, None]
        plain.append(h[..., 0])
    found = linear_recurrence(a, b)
    assert close(found, np.stack(plain, 1))

    def unrolled(ascending):
        total, p = b[:, L - 1], np.eye(D)
        for j in range(L - 2, -1, -1):
            p = a[:, j + 1] @ p if ascending else p @ a[:, j + 1]
            total = total + (p @ b[:, j, :, None])[..., 0]
        return total

    assert close(found[:, -1], unrolled(ascending=False))
    assert not close(found[:, -1], unrolled(ascending=True), tol=1e-2)


@law
def test_attention_recurrence_and_joformer_are_one_family(seed):
    rng = np.random.default_rng(seed)
    q, k, v = vectors(rng, 3)
    logits = np.where(CAUSAL, q @ k.swapaxes(-1, -2) / np.sqrt(D), -np.inf)
    alpha = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    plain = attention(q, k, v, CAUSAL)
    assert close(plain, alpha @ v)
    assert close(plain, joformer(q, k, v, np.zeros((B, L, N)), ANGLES, CAUSAL))  # P = I
    assert not close(plain, joformer(q, k, v, steps(rng, "angles"), ANGLES, CAUSAL), tol=1e-2)

    a, one = steps(rng, "orthogonal"), 1.0 * CAUSAL  # α = 1
    back = a.swapaxes(-1, -2)
    ahead, here = (frames(step, "orthogonal") for step in (np.roll(back, -1, axis=1), back))
    assert close(linear_recurrence(a, v), values(one, ahead, v, ORTHOGONAL))  # R_t = A_{t+1}⁻¹: one step off
    assert not close(linear_recurrence(a, v), values(one, here, v, ORTHOGONAL), tol=1e-2)


def test_a_row_that_sees_nothing_is_zero_with_a_finite_gradient(rng):
    q, k, v = vectors(rng, 3)
    visible = CAUSAL & (np.arange(L) != 3)[:, None]
    assert (attention(q, k, v, visible)[:, 3] == 0).all()
    gradient = jitted(jax.grad(lambda q: jo.attention(q, k, v, visible).sum()))(q)
    assert np.isfinite(gradient).all() and (gradient[:, 3] == 0).all() and np.abs(gradient[:, 4]).max() > 1e-3
    assert weights(jnp.ones((L, L), jnp.bfloat16)).dtype == np.float32
