"""exp(sB) x for one skew generator B and many phases s, without a matrix exponential a site.

iB is Hermitian, iB = V diag(w) Vᴴ, so exp(sB) = V diag(e^{−iws}) Vᴴ: one small eigendecomposition a generator, then
phases. Differentiating through the decomposition divides by gaps w_i − w_j, which are zero at B = 0; the rule below
divides by none. Source: the derivative of the exponential in its eigenbasis (Daleckii and Krein 1965).
"""

import jax
import jax.numpy as jnp
from jax import Array

from jojax.algebra.elements import widen


def exp_phases(b: Array, s: Array) -> Array:
    """exp(s b) [..., *h, n, n] of skew b [*h, n, n] and phases s [..., *h]; gradients as of `exp_times`."""
    units = jnp.broadcast_to(jnp.eye(b.shape[-1], dtype=widen(s).dtype), (*s.shape, *b.shape[-1:] * 2))
    return exp_times(b[..., None, :, :], s[..., None], units).swapaxes(-1, -2)


@jax.custom_vjp
def exp_times(b: Array, s: Array, x: Array) -> Array:
    """exp(s b) x: b [*h, n, n] skew, s [..., *h], x [..., *h, n] -> [..., *h, n], float32 or wider.

    The leading axes of b and s broadcast to those of x. Gradients are exact and finite everywhere, b = 0 included;
    that of b is skew."""
    return _forward(b, s, x)[0]


def _forward(b, s, x):
    b, s, x = (widen(t) for t in (b, s, x))
    w, v = jnp.linalg.eigh(1j * b)
    turned = jnp.exp(-1j * s[..., None] * w) * into(v, x)
    return out_of(v, turned).real, (b, s, x, w, v, turned)


def into(v, x):
    """Vᴴ x"""
    return jnp.einsum("...ji,...j->...i", v.conj(), x)


def out_of(v, z):
    """V z"""
    return jnp.einsum("...ij,...j->...i", v, z)


def _backward(saved, g):
    b, s, x, w, v, turned = saved
    y = out_of(v, turned).real
    g_in, x_in = into(v, g), into(v, x)
    x_bar = out_of(v, jnp.exp(1j * s[..., None] * w) * g_in).real
    s_bar = (g * jnp.einsum("...ij,...j->...i", b, y)).sum(-1)
    # M_jk = Σ s conj(g_j) Φ_jk(s) x_k with Φ_jk = e^{−is(w_j+w_k)/2} sinc(s(w_j−w_k)/2), smooth where w_j = w_k
    half = jnp.exp(-0.5j * s[..., None] * w)
    sinc = jnp.sinc(s[..., None, None] * (w[..., :, None] - w[..., None, :]) / (2 * jnp.pi))
    m = jnp.einsum("...j,...jk,...k->...jk", s[..., None] * (half * g_in.conj()), sinc, half * x_in)
    m = _unbroadcast(m, b)
    b_bar = (v.conj() @ m @ v.swapaxes(-1, -2)).real
    b_bar = (b_bar - b_bar.swapaxes(-1, -2)) / 2
    return b_bar, _unbroadcast(s_bar, s), _unbroadcast(x_bar, x)


def _unbroadcast(t, like):
    """Summed over what `like` was broadcast along."""
    t = t.sum(tuple(range(t.ndim - like.ndim)))
    return t.sum(tuple(i for i in range(like.ndim) if like.shape[i] == 1 and t.shape[i] != 1), keepdims=True)


exp_times.defvjp(_forward, _backward)
