"""Rotations: planes of SO(2) given by angles, and exponentials of skew matrices.

A head of even width D holds D/2 planes. Which two coordinates make plane p is the `pairing`:

    'half'         (x_p, x_{p + D/2})    text models
    'interleaved'  (x_{2p}, x_{2p+1})    vision models

and R(θ) turns each plane by its angle: [[cos θ, −sin θ], [sin θ, cos θ]].
"""

import jax
import jax.numpy as jnp
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


def plane_matrix(angles: Array, pairing: str = "half") -> Array:
    """R(θ) as a matrix [..., D, D] for angles [..., D/2]: column i is the i-th unit vector, turned."""
    angles = widen(angles)
    units = jnp.eye(2 * angles.shape[-1], dtype=angles.dtype)
    return rotate(units, angles[..., None, :], pairing).swapaxes(-1, -2)


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
    """exp(s) of *skew* matrices [..., n, n], in float32 or wider: closed form for n = 2 and 3, else `expm`.

    The closed forms read the lower triangle alone. Gradients are finite everywhere, s = 0 included.
    """
    s = widen(s)
    closed = {2: lambda s: plane_matrix(s[..., 1, :1]), 3: _rodrigues}
    return closed.get(s.shape[-1], expm)(s)


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


def orthogonality_error(r: Array) -> Array:
    """max |RᵀR − I| of each matrix [..., n, n] → [...]; a long product of rotations should log it."""
    r = widen(r)
    gram = product(r.swapaxes(-1, -2), r)
    return jnp.abs(gram - jnp.eye(r.shape[-1], dtype=r.dtype)).max(axis=(-2, -1))
