"""Rotations: planes of SO(2) given by angles, and exponentials of skew matrices.

A head of even width D holds D/2 planes. Which two coordinates make plane p is the `pairing`:

    'half'         (x_p, x_{p + D/2})    text models
    'interleaved'  (x_{2p}, x_{2p+1})    vision models

and R(θ) turns each plane by its angle: [[cos θ, −sin θ], [sin θ, cos θ]].
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jojax.algebra.elements import product, widen

PAIRINGS = ("half", "interleaved")


def rotate(x: Array, angles: Array, pairing: str = "half") -> Array:
    """R(θ) x: x [..., D], angles in radians [..., D/2], leading axes broadcast; returned in x's dtype.

    Computed in float32 or wider. The inverse is rotate(x, −angles). Raises ValueError for an unknown pairing
    and for angles that do not fit the width.
    """
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing={pairing!r} is not known; use one of {', '.join(PAIRINGS)}.")
    if x.shape[-1] != (width := 2 * angles.shape[-1]):
        raise ValueError(f"{width // 2} angles turn vectors of width {width}, not {x.shape[-1]}.")
    dtype = jnp.result_type(x, angles, jnp.float32)
    angles = angles.astype(dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    wide = x.astype(dtype)
    if pairing == "half":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = first * cos - second * sin, first * sin + second * cos
    if pairing == "half":
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    out = jnp.stack(turned, axis=-1)
    return out.reshape(*out.shape[:-2], -1).astype(x.dtype)


def phases(position: Array, speeds: Array) -> Array:
    """Σ_a position_a speeds_a: position [..., A], speeds [A, ...] -> [..., ...] in position's dtype, float32 or wider.

    Written out: a dot would be rounded by accelerators, and what XLA makes of the product and `sum` on CPUs (jaxlib
    0.10) has angles of other planes where the positions are made in the same program."""
    position = widen(position)
    own = range(position.ndim - 1, position.ndim + speeds.ndim - 2)
    speeds = speeds.astype(position.dtype)
    return sum(jnp.expand_dims(position[..., a], tuple(own)) * speed for a, speed in enumerate(speeds))


def plane_matrix(angles: Array, pairing: str = "half") -> Array:
    """R(θ) as a matrix [..., D, D] for angles [..., D/2]: column i is the i-th unit vector, turned."""
    angles = widen(angles)
    units = jnp.eye(2 * angles.shape[-1], dtype=angles.dtype)
    return rotate(units, angles[..., None, :], pairing).swapaxes(-1, -2)


def plane_generator(omega: Array) -> Array:
    """The skew matrix [..., 2n, 2n] that turns the planes (2p, 2p+1) at speeds ω [..., n]."""
    n = omega.shape[-1]
    at = 2 * jnp.arange(n)
    return skew(jnp.zeros((*omega.shape[:-1], 2 * n, 2 * n), omega.dtype).at[..., at + 1, at].set(omega))


def skew(a: Array) -> Array:
    """a − aᵀ: the skew matrix [..., n, n] of a free one. Every skew matrix is one (take half of itself)."""
    return a - a.swapaxes(-1, -2)


@jax.jit
def expm(s: Array) -> Array:
    """exp(s) of any matrices [..., n, n], in float32 or wider: the reference for the closed forms.

    Scaled and squared here: of itself `jax.scipy.linalg.expm` squares once too few, which costs float32 up to
    6e-3 at n = 2, 3e-5 at n = 4 (norms 5–50). Good for norms (largest column sum) up to 2e5.
    """
    s = widen(s)
    norm = lax.stop_gradient(jnp.abs(s).sum(-2, keepdims=True).max(-1, keepdims=True))
    squarings = jnp.clip(jnp.ceil(jnp.log2(norm / 3.9)), 0, 16)  # 3.9: float32's Padé approximant ends there
    start = jax.scipy.linalg.expm(s * 2.0**-squarings, max_squarings=0)
    return lax.fori_loop(0, 16, lambda i, r: jnp.where(i < squarings, product(r, r), r), start)


def exp_skew(s: Array) -> Array:
    """exp(s) of *skew* matrices [..., n, n], in float32 or wider: closed form for n = 2, 3 and 4, else by squaring.

    The closed forms read the lower triangle alone. Gradients are finite everywhere, s = 0 included.
    """
    s = widen(s)
    closed = {2: lambda s: plane_matrix(s[..., 1, :1]), 3: _rodrigues, 4: _isoclinic}
    return closed.get(s.shape[-1], _squared)(s)


def _rodrigues(s: Array) -> Array:
    """cos θ I + (sin θ/θ) S + (1 − cos θ)/θ² w wᵀ, where S x = w × x, θ = |w|: all smooth in θ²."""
    w = jnp.stack([s[..., 2, 1], -s[..., 2, 0], s[..., 1, 0]], axis=-1)
    square = jnp.sum(w * w, axis=-1)[..., None, None]
    b = _sinc(square / 4) ** 2 / 2
    even = (1 - b * square) * jnp.eye(3, dtype=s.dtype) + b * w[..., :, None] * w[..., None, :]
    return even + _sinc(square) * skew(jnp.tril(s))


def _sinc(square: Array) -> Array:
    """sin θ / θ as a function of θ²: by its series near 0, where the root has no derivative."""
    near = square < 1e-2
    theta = jnp.sqrt(jnp.where(near, 1.0, square))
    series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    return jnp.where(near, series, jnp.sin(theta) / theta)


def _isoclinic(s: Array) -> Array:
    """exp(x·E) exp(y·F) with s = x·E + y·F, its self-dual and anti-self-dual parts: they commute, and
    exp(x·E) = cos |x| + sin |x| /|x| x·E. No eigenvalue, so nothing degenerates."""
    one = jnp.stack([s[..., 1, 0], s[..., 2, 0], s[..., 3, 0]], -1)
    other = jnp.stack([s[..., 3, 2], -s[..., 3, 1], s[..., 2, 1]], -1)

    def quaternion(x):
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return jnp.concatenate([1 - square / 2 * _sinc(square / 4) ** 2, _sinc(square) * x], -1)

    p, q = quaternion((one + other) / 2), quaternion((one - other) / 2)
    table = np.einsum("iab,jbc->ijac", _units(1), _units(-1)).reshape(16, 16)
    both = (p[..., :, None] * q[..., None, :]).reshape(*p.shape[:-1], 16)
    return product(both, jnp.asarray(table, s.dtype)).reshape(s.shape)


def _units(sign: int) -> np.ndarray:
    """I and the units E (sign 1) or F (−1): skew, of square −I; each turns a plane and its complement [4, 4, 4]."""
    units = np.zeros((4, 4, 4))
    for unit, (i, j, k, l) in zip(units[1:], ((0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2)), strict=True):
        unit[j, i], unit[l, k] = 1, sign
    units -= units.swapaxes(-1, -2)
    units[0] = np.eye(4)
    return units


@jax.custom_vjp
def _squared(s: Array) -> Array:
    """exp(s/2ⁿ) by Taylor's polynomial, squared n times; n as the largest of the matrices needs it."""
    return _square(s)[0]


def _square(s: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    radius = jnp.sqrt((s * s).sum((-2, -1)).max() / 2)  # a bound: eigenvalues of skew matrices come in pairs
    n = jnp.ceil(jnp.log2(radius / (0.05 if s.dtype == jnp.float64 else 0.4)))
    n = jnp.where(n > 0, jnp.minimum(n, 30), 0).astype(int)  # none for NaN, no endless loop for infinity
    r = lax.fori_loop(0, n, lambda _, r: product(r, r), _taylor(s * jnp.asarray(0.5, s.dtype) ** n))
    return r, (s, r, n)


def _square_bar(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array]:
    """∫₀¹ e^{−us} g rᵀ e^{us} du: over [0, 2⁻ⁿ] through the polynomial, then the interval doubles n times. (Through
    the squarings themselves all of them would have to be kept.)"""
    s, r, n = saved
    q, pull = jax.vjp(_taylor, s * jnp.asarray(0.5, s.dtype) ** n)
    (mean,) = pull(product(product(g, r.swapaxes(-1, -2)), q))

    def double(_, carry):
        q, mean = carry
        return product(q, q), (mean + product(product(q.swapaxes(-1, -2), mean), q)) / 2

    return (lax.fori_loop(0, n, double, (q, mean))[1],)


_squared.defvjp(_square, _square_bar)


@jax.custom_vjp
def _times(a: Array, b: Array) -> Array:
    """The product of matrices of equal shapes. Its derivative transposes before it multiplies: XLA on CPUs takes ten
    times as long for small ones that are to be read by columns."""
    return product(a, b)


_times.defvjp(
    lambda a, b: (product(a, b), (a, b)),
    lambda saved, g: (product(g, saved[1].swapaxes(-1, -2)), product(saved[0].swapaxes(-1, -2), g)),
)


def _taylor(a: Array) -> Array:
    """1 + a + a²/2 + … + a⁸/8! in three products (Bader, Blanes and Casas 2019)."""
    root, x3 = math.sqrt(177), 2 / 3
    a2 = _times(a, a)
    a4 = _times(a2, x3 * (1 + root) / 88 * a + x3 * (1 + root) / 352 * a2)
    right = (-271 + 29 * root) / (315 * x3) * jnp.eye(a.shape[-1], dtype=a.dtype)
    right = right + 11 * (-1 + root) / (1260 * x3) * a + 11 * (-9 + root) / (5040 * x3) * a2
    right = right + (89 - root) / (5040 * x3**2) * a4
    return jnp.eye(a.shape[-1], dtype=a.dtype) + a + (857 - 58 * root) / 630 * a2 + _times(x3 * a2 + a4, right)


def orthogonality_error(r: Array) -> Array:
    """max |RᵀR − I| of each matrix [..., n, n] → [...]; a long product of rotations should log it."""
    r = widen(r)
    gram = product(r.swapaxes(-1, -2), r)
    return jnp.abs(gram - jnp.eye(r.shape[-1], dtype=r.dtype)).max(axis=(-2, -1))
