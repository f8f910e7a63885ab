"""exp(sB) for one skew generator B and many phases s, without a matrix exponential a site.

iB is Hermitian, iB = V diag(w) Vᴴ, so exp(sB) = V diag(e^{−iws}) Vᴴ: one small eigendecomposition a generator, then
phases. Differentiating through the decomposition divides by gaps w_i − w_j, which are zero at B = 0; the rule below
divides by none. Source: the derivative of the exponential in its eigenbasis (Daleckii and Krein 1965).
"""

import jax
import jax.numpy as jnp
from jax import Array

from jojax.algebra.elements import product, widen


def exp_phases(b: Array, s: Array) -> Array:
    """exp(s b) [..., *h, n, n] of skew b [*h, n, n] and phases s [..., *h], float32 or wider.

    Gradients are exact and finite everywhere, b = 0 included; that of b is skew."""
    n = b.shape[-1]
    flat = _exp(widen(b).reshape(-1, n, n), widen(s).reshape(-1, b.size // n**2).T)
    return flat.swapaxes(0, 1).reshape(*s.shape, n, n)


@jax.custom_vjp
def _exp(b, s):
    """b [h, n, n], s [h, t] -> [h, t, n, n]"""
    return _forward(b, s)[0]


def _forward(b, s):
    w, v = jnp.linalg.eigh(1j * b)
    modes = jnp.einsum("haj,hbj->hjab", v, v.conj()).reshape(*w.shape, -1)  # exp(sb) = Σ_j e^{−iw_j s} modes_j
    turns = s[..., None] * w[:, None]
    r = product(jnp.cos(turns), modes.real) + product(jnp.sin(turns), modes.imag)
    return r.reshape(*s.shape, *b.shape[1:]), (s, w, v)


def _backward(saved, g):
    s, w, v = saved
    inner = product(v.conj().swapaxes(-1, -2)[:, None], product(g.astype(v.dtype), v[:, None]))  # Vᴴ g V
    # M_jk = Σ s conj(inner_jk) Φ_jk(s) with Φ_jk = e^{−is(w_j+w_k)/2} sinc(s(w_j−w_k)/2), smooth where w_j = w_k
    half = jnp.exp(-0.5j * s[..., None] * w[:, None])
    sinc = jnp.sinc(s[..., None, None] * (w[:, None, :, None] - w[:, None, None, :]) / (2 * jnp.pi))
    m = (inner.conj() * sinc * half[..., :, None] * (s[..., None] * half)[..., None, :]).sum(1)
    along = jnp.diagonal(inner, axis1=-2, axis2=-1).conj() * half**2
    s_bar = (along * (-1j * w[:, None])).real.sum(-1)
    b_bar = product(product(v.conj(), m), v.swapaxes(-1, -2)).real
    return (b_bar - b_bar.swapaxes(-1, -2)) / 2, s_bar


_exp.defvjp(_forward, _backward)
