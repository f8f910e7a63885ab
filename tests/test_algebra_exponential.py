"""exp(sB) by phases in the eigenbasis: values and its rule of differentiation, against scipy and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jojax.algebra.exponential import exp_phases
from jojax.algebra.operators import skew

H, G, T = 2, 3, 4


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def matrices(n, kind, rng):
    """P [H, G, n, n]; repeated: B = P − Pᵀ turns all its planes alike."""
    if kind == "repeated":
        basis = np.linalg.qr(rng.normal(size=(H, G, n, n)))[0][..., : n // 2 * 2]
        turn = np.kron(np.eye(n // 2), [[0, 0], [1.3, 0]])
        return basis @ turn @ np.swapaxes(basis, -1, -2)
    return {"zero": 0.0, "tiny": 1e-9, "some": 1.0}[kind] * rng.normal(size=(H, G, n, n))


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("kind", ["zero", "tiny", "repeated", "some"])
def test_values_and_gradients(n, kind, rng):
    p, s, along = matrices(n, kind, rng), rng.normal(size=(T, H, G)), rng.normal(size=(H, G, n, n))
    weight, ahead = rng.normal(size=(T, H, G, n, n)), rng.normal(size=(T, H, G))

    @jax.jit
    def loss(p, s):
        return (weight * exp_phases(skew(p), s)).sum()

    b = np.asarray(skew(p))
    moved = 0
    for t, h, g in np.ndindex(T, H, G):
        found = scipy.linalg.expm_frechet(s[t, h, g] * b[h, g], s[t, h, g] * skew(along[h, g]))[1]
        moved += (weight[t, h, g] * found).sum()
    want = np.array([[[scipy.linalg.expm(s[t, h, g] * b[h, g]) for g in range(G)] for h in range(H)] for t in range(T)])
    np.testing.assert_allclose(exp_phases(b, s), want, atol=1e-11)
    p_bar, s_bar = jax.jit(jax.grad(loss, (0, 1)))(p, s)
    np.testing.assert_allclose((p_bar * along).sum(), moved, atol=1e-10)
    np.testing.assert_allclose(p_bar, -np.swapaxes(p_bar, -1, -2), atol=1e-12)
    np.testing.assert_allclose(s_bar, (weight * (b @ want)).sum((-2, -1)), atol=1e-10)
    eps = 1e-5
    slope = (loss(p + eps * along, s + eps * ahead) - loss(p - eps * along, s - eps * ahead)) / (2 * eps)
    np.testing.assert_allclose((p_bar * along).sum() + (s_bar * ahead).sum(), slope, rtol=1e-6, atol=1e-6)


def test_through_the_decomposition_itself_there_is_no_gradient_at_zero(rng):
    def naive(b):
        w, v = jnp.linalg.eigh(1j * b)
        return ((v * jnp.exp(-1j * w)) @ v.conj().T).real[1, 0]

    assert np.isnan(jax.jit(jax.grad(naive))(jnp.zeros((4, 4)))).any()
    assert np.isfinite(jax.jit(jax.grad(lambda b: exp_phases(b, jnp.ones(()))[1, 0]))(jnp.zeros((4, 4)))).all()


def test_float32_stays_near_at_large_phases(rng):
    b = np.asarray(skew(rng.normal(size=(8, 8))))
    s = np.linspace(-40, 40, 33) / np.abs(np.linalg.eigvals(b)).max()
    got = exp_phases(b.astype(np.float32), s.astype(np.float32))
    want = [scipy.linalg.expm(one * b) for one in s]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=3e-5)
