"""Rotations and exponentials in float64: the laws, each beside what must break it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from jojax.algebra import operators
from jojax.algebra.operators import PAIRINGS, exp_skew, expm, plane_matrix, skew

B, L, H, N = 2, 7, 3, 5
rotate = jax.jit(operators.rotate, static_argnums=2)
closed = jax.jit(exp_skew)
error = jax.jit(operators.orthogonality_error)


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


@pytest.mark.parametrize("pairing", PAIRINGS)
@law
def test_rotations_compose_invert_and_equal_their_matrix(pairing, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, L, H, 2 * N))
    one, two = rng.uniform(-9, 9, (2, B, L, H, N))
    turned = rotate(x, one, pairing)
    assert close(rotate(turned, two, pairing), rotate(x, one + two, pairing))
    assert close(rotate(turned, -one, pairing), x)
    assert close(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1))
    matrix = np.asarray(plane_matrix(jnp.asarray(one), pairing))
    assert close(error(matrix), 0) and close((matrix @ x[..., None])[..., 0], turned)
    assert not close((x[..., None, :] @ matrix)[..., 0, :], turned, tol=1e-2)
    (other,) = set(PAIRINGS) - {pairing}
    assert not close(rotate(x, one, other), turned, tol=1e-2)


def test_pairings_against_numbers():
    x, quarter = np.array([1.0, 2.0, 3.0, 4.0]), np.array([np.pi / 2, 0.0])
    assert close(rotate(x, quarter, "half"), [-3, 2, 1, 4])
    assert close(rotate(x, quarter, "interleaved"), [-2, 1, 3, 4])


def test_rotation_of_bfloat16_is_the_float32_rotation_rounded_once(rng):
    x = jnp.asarray(rng.normal(size=(L, 2 * N)), jnp.bfloat16)
    angles = jnp.asarray(rng.uniform(0, 4000, (L, N)), jnp.float32)
    turned = rotate(x, angles, "half")
    assert turned.dtype == jnp.bfloat16
    assert (turned == rotate(x.astype(jnp.float32), angles, "half").astype(jnp.bfloat16)).all()
    assert not close(turned, rotate(x, angles.astype(jnp.bfloat16), "half"), tol=0.1)


def test_rotate_says_what_does_not_fit():
    with pytest.raises(ValueError, match="pairing='pairs' is not known; use one of half, interleaved"):
        rotate(np.ones(4), np.ones(2), "pairs")
    with pytest.raises(ValueError, match="2 angles turn vectors of width 4, not 5"):
        rotate(np.ones(5), np.ones(2), "half")


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@law
def test_exponentials_of_skew_matrices_are_rotations(n, seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-4, 1, (L, 1, 1))  # on both sides of the series' end
    free = scale * rng.normal(size=(L, n, n))
    s = np.asarray(skew(jnp.asarray(free)))
    assert close(s, -np.swapaxes(s, -1, -2)) and close(skew(s / 2), s)
    found = closed(s)
    assert close(found, expm(s)) and close(error(found), 0)
    assert error(expm(free)).max() > 1e-2


def test_expm_keeps_float32_at_norms_where_a_squaring_is_easily_missed(rng):
    angle = np.linspace(1, 60, 99).astype(np.float32)
    s = angle[:, None, None] * np.array([[0, -1], [1, 0]], np.float32)
    wide = angle.astype(np.float64)
    want = np.array([[np.cos(wide), -np.sin(wide)], [np.sin(wide), np.cos(wide)]]).transpose(2, 0, 1)
    assert expm(s).dtype == closed(s).dtype == jnp.float32
    assert close(expm(s), want, tol=5e-6) and close(closed(s), want, tol=1e-6)


@pytest.mark.parametrize("n", [4, 8])
def test_exponentials_keep_float32_from_small_to_large_radii(n, rng):
    """All at once: the largest decides how often all are squared. Planes that turn alike are no special case."""
    s = np.asarray(skew(rng.normal(size=(4, n, n))))
    s = s * (np.array([1e-3, 1, 16, 40]) / np.abs(np.linalg.eigvals(s)).max(-1))[:, None, None]
    s = np.concatenate([s, 2 * np.kron(np.eye(n // 2), [[0, -1], [1, 0]])[None], 0 * s[:1]])
    want = np.array([scipy.linalg.expm(one) for one in s])
    narrow = closed(s.astype(np.float32))
    ulp = 2.0**8 * np.finfo(np.float32).eps  # all are squared eight times, which doubles an error of 1 + s/2⁸ each time
    assert narrow.dtype == jnp.float32 and close(narrow, want, tol=ulp) and close(error(narrow), 0, tol=ulp)
    assert close(closed(s), want, tol=1e-12)


@pytest.mark.parametrize(("exp", "n"), [(exp_skew, 2), (exp_skew, 3), (exp_skew, 4), (exp_skew, 5), (expm, 3)])
def test_gradients_are_right_at_zero_and_beyond(exp, n, rng):
    a, along, weight = rng.normal(size=(3, n, n))
    slope = jax.jit(jax.grad(lambda a: (weight * exp(skew(a))).sum()))
    for scale in (0.0, 1e-9, 0.05, 0.1, 2.0):
        moved = scipy.linalg.expm_frechet(skew(scale * a), skew(along), compute_expm=False)
        assert close((slope(scale * a) * along).sum(), (weight * moved).sum())
        assert abs((weight * moved).sum()) > 1e-3


@pytest.mark.parametrize("n", [2, 3, 4])
def test_second_derivatives_of_closed_forms_along_a_line(n, rng):
    s = np.asarray(skew(rng.normal(size=(n, n))))
    second = jax.jit(jax.jacfwd(jax.jacfwd(lambda t: exp_skew(t * s))))
    for t in (0.0, 1e-9, 1e-5, 0.05, 0.1, 2.0):
        assert close(second(t), s @ s @ scipy.linalg.expm(t * s))


@pytest.mark.parametrize("batch", [1, 5])
def test_phases_sum_over_the_axes(batch, rng):
    """Also where the program makes the coordinates: there XLA (jaxlib 0.10) takes other planes' speeds for `sum`."""
    speeds = rng.normal(size=(2, 4, 12)).astype("float32")

    def grid():
        at = jnp.stack(jnp.meshgrid(jnp.arange(4), jnp.arange(4), indexing="ij"), -1).reshape(-1, 2)
        return jnp.broadcast_to(at.astype("float32"), (batch, 16, 2))

    with jax.enable_x64(False):
        got, at = jax.jit(lambda: operators.phases(grid(), speeds))(), np.asarray(grid())
    assert got.dtype == jnp.float32 and got.shape == (batch, 16, 4, 12)
    np.testing.assert_allclose(got, np.einsum("bla,agn->blgn", at, speeds), atol=1e-5)
