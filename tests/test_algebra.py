"""Elements and the prefix scan: the laws in float64, each beside what must break it."""

from functools import lru_cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jojax.algebra import elements
from jojax.algebra.elements import Element, apply, product, wrapped_add

B, L, H, N = 2, 7, 3, 5
MUL = {"angles": jnp.add, "turns": wrapped_add, "matrices": product}
ONE = {"angles": 0.0, "turns": 0.0, "matrices": np.eye(3)}
prefix = jax.jit(elements.prefix, static_argnames=("mul", "axis", "shards"))
in_parts = partial(elements.prefix, shards=3)
compose, inverse = jax.jit(elements.compose), jax.jit(elements.inverse)
fold = jax.jit(elements.fold, static_argnames="axis")


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def law(test):
    """A property over fifteen drawn seeds."""
    rules = settings(max_examples=15, deadline=None, derandomize=True)
    return rules(given(seed=st.integers(0, 2**32 - 1))(test))


def close(a, b, tol=1e-10):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=0, atol=tol) for x, y in pairs)


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def orthogonal(rng, *shape):
    return np.linalg.qr(rng.normal(size=shape))[0]


def element(rng, *lead):
    return Element(rng.normal(size=(*lead, N)), orthogonal(rng, *lead, N, N))


def at(elements, t):
    return Element(elements.content[t], elements.operator[t])


def steps(rng, kind, length=L):
    """R_t [B, length, H, …]: matrices, or numbers, some of them beyond half a turn."""
    if kind == "matrices":
        return orthogonal(rng, B, length, H, 3, 3)
    return rng.uniform(-0.7, 0.7, (B, length, H, N))


def seen(kind, x):
    """Turns are equal where they differ by whole turns."""
    return jax.tree.map(lambda x: np.exp(2j * np.pi * np.asarray(x)), x) if kind == "turns" else x


def by_loop(step, mul, identity, restart, initial):
    """The definition of the prefix product, site by site: exclusive, last."""
    one = jnp.broadcast_to(identity, initial.shape)
    total, before = initial, []
    for t in range(step.shape[1]):
        total = jnp.where(restart[:, t].reshape((-1,) + (1,) * (one.ndim - 1)), one, total)
        before.append(total)
        total = mul(total, step[:, t])
    return jnp.stack(before, 1), total


minus = jax.jit(lambda x, y: Element(x.content - apply(x.operator, y.content), x.operator @ y.operator))
swapped = jax.jit(lambda x, y: Element(x.content + apply(x.operator, y.content), y.operator @ x.operator))
tree = jax.jit(partial(lax.associative_scan, elements.compose))


@law
def test_composition_is_associative_and_a_tree_equals_a_left_fold(seed):
    rng = np.random.default_rng(seed)
    x, y, z = (element(rng) for _ in range(3))
    assert close(compose(compose(x, y), z), compose(x, compose(y, z)))
    for wrong in minus, swapped:
        assert not close(wrong(wrong(x, y), z), wrong(x, wrong(y, z)), tol=1e-2)
    many = element(rng, L)
    found = jax.tree.map(np.asarray, tree(many))
    left = elements.identity(N, np.float64)
    for t in range(L):
        left = compose(left, at(many, t))
        assert close(left, at(found, t))


@law
def test_identity_and_two_sided_inverse(seed):
    rng = np.random.default_rng(seed)
    x = element(rng)
    x = x._replace(operator=x.operator + 0.1 * rng.normal(size=(N, N)))  # GL(d), no longer orthogonal
    one = elements.identity(N, np.float64)
    assert close(compose(one, x), x) and close(compose(x, one), x)
    assert close(compose(x, inverse(x)), one) and close(compose(inverse(x), x), one)
    assert not close(compose(x, inverse(x)._replace(content=-x.content)), one, tol=1e-2)


@law
def test_composition_does_not_commute_even_under_one_operator(seed):
    rng = np.random.default_rng(seed)
    x, y = element(rng), element(rng)
    assert not close(compose(x, y), compose(y, x), tol=1e-2)
    y = y._replace(operator=x.operator)
    assert not close(compose(x, y).content, compose(y, x).content, tol=1e-2)
    still = [e._replace(operator=np.eye(N)) for e in (x, y)]
    for a, b in (still, (x, compose(x, x))):  # R = I, and powers of one element, do commute
        assert close(compose(a, b), compose(b, a))


@law
def test_fold_is_the_sum_in_the_frame_of_the_first_site(seed):
    rng = np.random.default_rng(seed)
    many = element(rng, L, H)
    whole = at(many, 0)
    for t in range(1, L):
        whole = compose(whole, at(many, t))
    assert close(fold(many), whole)
    assert close(fold(Element(*(np.swapaxes(leaf, 0, 1) for leaf in many)), axis=1), whole)
    inclusive = np.asarray(prefix(many.operator, product, np.eye(N), axis=0)[1])
    assert not close(np.einsum("thij,thj->hi", inclusive, many.content), whole.content, tol=1e-2)


@lru_cache
def graded(kind, scan):
    """(step, restart, initial, weight) → gradients for step and initial, and (exclusive, last)."""

    def loss(step, initial, restart, weight):
        found = scan(step, MUL[kind], ONE[kind], restart=restart, initial=initial)
        exclusive, last = found[0], found[-1]
        return (weight * exclusive).sum() + (weight[:, 0] * last).sum(), (exclusive, last)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("kind", MUL)
@law
def test_prefix_equals_the_loop_in_values_and_gradients(kind, seed):
    rng = np.random.default_rng(seed)
    step, initial, restart = steps(rng, kind), steps(rng, kind)[:, 0], rng.random((B, L)) < 0.3
    inputs = step, initial, restart, rng.normal(size=step.shape)
    gradient, found = graded(kind, elements.prefix)(*inputs)
    want_gradient, want = graded(kind, by_loop)(*inputs)
    assert close(seen(kind, found), seen(kind, want)) and close(gradient, want_gradient)
    unflagged = prefix(step, MUL[kind], ONE[kind], initial=initial)[0]
    assert close(seen(kind, unflagged), seen(kind, want[0])) != restart.any()


@law
def test_the_earlier_factor_stands_on_the_left(seed):
    step = steps(np.random.default_rng(seed), "matrices")
    exclusive, inclusive, last = (np.asarray(x) for x in prefix(step, product, np.eye(3)))
    assert (exclusive[:, 0] == np.eye(3)).all() and close(exclusive[:, 2], step[:, 0] @ step[:, 1])
    assert not close(exclusive[:, 2], step[:, 1] @ step[:, 0], tol=1e-2)
    assert close(inclusive, exclusive @ step) and close(last, inclusive[:, -1])


@pytest.mark.parametrize("kind", MUL)
@pytest.mark.parametrize("packed", [False, True])
@law
def test_any_chunking_equals_the_whole(kind, packed, seed):
    rng = np.random.default_rng(seed)
    mul, one, step, flags = MUL[kind], ONE[kind], steps(rng, kind), rng.random((B, L)) < 0.3
    whole = prefix(step, mul, one, restart=flags if packed else None)

    def chunked(hand_on):
        last = start = np.broadcast_to(one, step[:, 0].shape)
        parts = []
        for begin, end in pairwise([(0, 3, 7), (0, 1, 4, 7), (0, 4, 7)][seed % 3]):
            restart = flags[:, begin:end] if packed else None
            before = last if hand_on else start
            exclusive, inclusive, last = prefix(step[:, begin:end], mul, one, restart=restart, initial=before)
            parts.append((np.asarray(exclusive), np.asarray(inclusive)))
        return *(np.concatenate(part, 1) for part in zip(*parts, strict=True)), last

    assert close(seen(kind, chunked(True)), seen(kind, whole))
    assert packed or not close(seen(kind, chunked(False)), seen(kind, whole), tol=1e-2)


@pytest.mark.parametrize("kind", MUL)
@law
def test_parts_beside_each_other_equal_the_whole(kind, seed):
    """Of a path that lies on several devices; also of the site before."""
    rng = np.random.default_rng(seed)
    step, initial = steps(rng, kind, 12), steps(rng, kind)[:, 0]
    inputs = step, initial, rng.random((B, 12)) < 0.2, rng.normal(size=step.shape)
    gradient, found = graded(kind, in_parts)(*inputs)
    want_gradient, want = graded(kind, elements.prefix)(*inputs)
    assert close(seen(kind, found), seen(kind, want)) and close(gradient, want_gradient)
    unflagged = (prefix(step, MUL[kind], ONE[kind], shards=n) for n in (3, 1))
    assert close(*(seen(kind, x) for x in unflagged))
    assert same_bits(elements.shift(step, initial, shards=3), elements.shift(step, initial))
    assert same_bits(elements.shift(step, initial), np.concatenate([initial[:, None], step[:, :-1]], 1))


@pytest.mark.parametrize("kind", MUL)
def test_a_packed_document_is_bit_for_bit_itself(kind, rng):
    step, starts = steps(rng, kind, 8).astype(np.float32), np.zeros((B, 8), bool)
    starts[:, [0, 2, 4]] = True
    packed, joined = (prefix(step, MUL[kind], ONE[kind], restart=r) for r in (starts, starts & False))
    for begin, end in ((0, 2), (2, 4), (4, 8)):
        alone = prefix(step[:, begin:end], MUL[kind], ONE[kind])
        assert all(same_bits(packed[i][:, begin:end], alone[i]) for i in (0, 1))
        assert begin == 0 or not close(joined[0][:, begin:end], alone[0], tol=1e-2)


@lru_cache
def after_restart(kind):
    """step → gradient of a sum over the sites from 3 on, and the exclusive products there."""

    def loss(step, restart):
        exclusive, inclusive, last = elements.prefix(step, MUL[kind], ONE[kind], restart=restart)
        return (exclusive[:, 3:] ** 2).sum() + (inclusive[:, 3:] ** 3).sum() + last.sum(), exclusive[:, 3:]

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("kind", ["angles", "matrices"])
def test_nothing_passes_a_restart(kind, rng):
    step, restart = steps(rng, kind), np.zeros((B, L), bool)
    restart[:, 3] = True
    clean_gradient, clean = after_restart(kind)(step, restart)
    for poison in (np.nan, np.inf):
        ill, before = step.copy(), np.full_like(step[:, 0], poison)
        ill[:, 1] = poison
        gradient, found = after_restart(kind)(ill, restart)
        assert np.isfinite(found).all() and same_bits(found, clean)
        assert same_bits(gradient[:, 3:], clean_gradient[:, 3:])
        chunk = prefix(step[:, 3:], MUL[kind], ONE[kind], restart=restart[:, 3:], initial=before)
        assert close(chunk[0], clean)
        assert not np.isfinite(after_restart(kind)(ill, restart & False)[1]).any()  # without the flag it passes


def test_selecting_after_the_product_alone_lets_nan_into_gradients(rng):
    """Why the scan selects before it, too."""
    step, fresh = steps(rng, "matrices"), np.zeros((B, L, 1, 1, 1), bool)
    fresh[:, 3] = True
    step[:, 2] = np.nan

    def join(x, y):
        return x[0] | y[0], jnp.where(y[0], y[1], product(x[1], y[1]))

    scan = partial(lax.associative_scan, join, axis=1)
    gradient = jax.jit(jax.grad(lambda step: scan((jnp.asarray(fresh), step))[1][:, 3:].sum()))(step)
    assert np.isnan(gradient[:, 3:]).any()


@pytest.mark.parametrize("kind", ["angles", "matrices"])
@law
def test_the_past_is_bit_for_bit_blind_to_the_future(kind, seed):
    rng = np.random.default_rng(seed)
    step, restart, t = steps(rng, kind), rng.random((B, L)) < 0.2, 1 + seed % (L - 1)
    other, flipped = step.copy(), restart.copy()
    other[:, t:] = np.nan if seed % 2 else steps(rng, kind)[:, t:]
    flipped[:, t + 1 :] ^= True
    one = prefix(step, MUL[kind], ONE[kind], restart=restart)
    two = prefix(other, MUL[kind], ONE[kind], restart=flipped)
    assert same_bits(one[0][:, : t + 1], two[0][:, : t + 1])  # exclusive: blind to its own step too
    assert same_bits(one[1][:, :t], two[1][:, :t]) and not same_bits(one[1][:, t], two[1][:, t])


def test_prefix_takes_any_axis_and_works_in_float32_at_least(rng):
    step = steps(rng, "matrices")
    want = prefix(step, product, np.eye(3))
    exclusive, inclusive, last = prefix(np.moveaxis(step, 1, -3), product, np.eye(3), axis=-3)
    assert close((np.moveaxis(exclusive, -3, 1), np.moveaxis(inclusive, -3, 1), last), want)
    narrow = jax.eval_shape(partial(prefix, mul=product, identity=np.eye(3)), jnp.zeros(step.shape, jnp.bfloat16))
    assert [x.dtype for x in narrow] == [jnp.float32] * 3


def test_prefix_names_a_restart_that_does_not_fit(rng):
    with pytest.raises(ValueError, match=r"restart has the shape \(2,\); steps .* need \(2, 7\)"):
        prefix(steps(rng, "angles"), jnp.add, 0.0, restart=np.zeros(B, bool))


def test_sums_in_turns_stay_exact_where_sums_in_radians_drift(rng):
    turn, angle = 2 * np.pi, 1 + np.pi * np.tanh(0.3 * rng.normal(size=(1, 4096, 9)))

    def error(unit, mul):
        """In radians, up to whole turns, against the float64 sum of the same float32 steps."""
        step = (angle / unit).astype(np.float32)
        off = np.asarray(prefix(step, mul, 0.0)[1], np.float64) - np.cumsum(step, 1, np.float64)
        return turn * np.abs(off * unit / turn - np.round(off * unit / turn)).max()

    assert error(turn, wrapped_add) < 3e-5 and error(1.0, jnp.add) > 3e-4


def test_wrapping_takes_whole_turns_and_leaves_the_derivative(rng):
    a, b = rng.uniform(-0.5, 0.5, (2, 999)).astype(np.float32)
    wrapped = wrapped_add(jnp.asarray(a), jnp.asarray(b))
    turns = (a + b).astype(np.float64) - np.asarray(wrapped, np.float64)
    assert set(np.unique(turns)) == {-1.0, 0.0, 1.0} and np.abs(wrapped).max() <= 0.5
    assert (jax.grad(lambda a: wrapped_add(a, b).sum())(jnp.asarray(a)) == 1).all()
