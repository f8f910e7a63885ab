"""Frames: the operator A_i of every site, applied to heads. All computed in float32 or wider, returned in x's dtype."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jojax.algebra import operators
from jojax.algebra.elements import product


@struct.dataclass
class PlaneFrame:
    """A_i = exp(s_i) R(θ_i): a rotation in each plane, times a positive factor a plane where `log_scale` is given.

    x is [B, L, G, D], or [B, L, G, H/G, D] for queries that share a key head's frame."""

    angles: Any  # [B or 1, L, G or 1, D/2] radians
    log_scale: Any = None  # [B, L, G or 1, D/2]; None = orthogonal
    pairing: str = struct.field(pytree_node=False, default="half")

    def apply(self, x):
        """A x"""
        return self._turn(x, 1, 1)

    def invert(self, x):
        """A⁻¹ x"""
        return self._turn(x, -1, -1)

    def dual(self, x):
        """A⁻ᵀ x: for queries, so that dual(q)ᵀ apply(k) = qᵀ A_q⁻¹ A_k k."""
        return self._turn(x, 1, -1)

    def where(self, placed):
        """The identity where `placed` [B, L] is False."""
        mask = placed[: len(self.angles), :, None, None]  # images that share angles have one grid
        scale = None if self.log_scale is None else jnp.where(mask, self.log_scale, 0)
        return dataclasses.replace(self, angles=jnp.where(mask, self.angles, 0), log_scale=scale)

    def _turn(self, x, turn, power):
        angles, scale = (t if t is None or t.ndim == x.ndim else t[..., None, :] for t in (self.angles, self.log_scale))
        y = operators.rotate(x, turn * angles, self.pairing)
        if scale is None:
            return y
        factor = jnp.exp(power * scale)
        both = jnp.concatenate([factor, factor], -1) if self.pairing == "half" else jnp.repeat(factor, 2, -1)
        return (y * both).astype(x.dtype)


def orthonormal(a):
    """a (3 − aᵀa)/2: one Newton–Schulz step, which squares the error of nearly orthogonal matrices [..., b, b]."""
    gram = product(a.swapaxes(-1, -2), a)
    return product(a, 1.5 * jnp.eye(a.shape[-1], dtype=a.dtype) - 0.5 * gram)


@struct.dataclass
class BlockFrame:
    """A_i = blockdiag(R_i1 … R_im), orthogonal b × b blocks; block j has the dimensions jb … (j+1)b − 1 of a head."""

    matrix: Any  # [B or 1, L, G or 1, m, b, b]

    def apply(self, x):
        """A x"""
        return self._times(self.matrix, x)

    def invert(self, x):
        """A⁻¹ x = Aᵀ x"""
        return self._times(self.matrix.swapaxes(-1, -2), x)

    dual = apply

    def where(self, placed):
        """The identity where `placed` [B, L] is False."""
        placed = placed[: len(self.matrix), :, None, None, None, None]  # images that share a frame have one grid
        return BlockFrame(jnp.where(placed, self.matrix, jnp.eye(self.matrix.shape[-1], dtype=self.matrix.dtype)))

    def _times(self, matrix, x):
        matrix = matrix if x.ndim == 4 else matrix[:, :, :, None]  # queries that share a key head's frame
        blocks = x.reshape(*x.shape[:-1], *matrix.shape[-3:-1])
        form = "...ij,...j->...i"
        turned = _in_wide(small, matrix, blocks) if matrix.shape[-1] <= 4 else _dot(form, matrix, blocks)
        return turned.reshape(x.shape)


@jax.custom_vjp
def small(matrix, x):
    """Rx of small matrices [..., b, b], x [..., b]; R's leading axes may be 1. Written out, derivative too: as dots and
    pads they take up to forty times as long on CPUs."""
    return sum(matrix[..., j] * x[..., j, None] for j in range(x.shape[-1]))


def _small_bar(saved, g):
    matrix, x = saved
    of_matrix = g[..., :, None] * x[..., None, :]
    shared = tuple(i for i, n in enumerate(matrix.shape) if n == 1 and of_matrix.shape[i] > 1)
    return of_matrix.sum(shared, keepdims=True), small(matrix.swapaxes(-1, -2), g)


small.defvjp(lambda matrix, x: (small(matrix, x), (matrix, x)), _small_bar)


@struct.dataclass
class SubspaceFrame:
    """A_i = I + E (R_i − I) Eᵀ: turns within the span of E's orthonormal columns, the rest stands still.

    R_i turns the planes of neighbouring columns by `angles`, or is the rotation `matrix`."""

    basis: Any  # E [G or 1, D, r]
    angles: Any = None  # [B or 1, L, G or 1, r/2] radians
    matrix: Any = None  # [B or 1, L, G or 1, r, r]

    def apply(self, x):
        """A x"""
        return self._turn(x, 1)

    def invert(self, x):
        """A⁻¹ x"""
        return self._turn(x, -1)

    dual = apply

    def where(self, placed):
        """The identity where `placed` [B, L] is False."""
        if self.matrix is None:
            mask = placed[: len(self.angles), :, None, None]  # images that share angles have one grid
            return dataclasses.replace(self, angles=jnp.where(mask, self.angles, 0))
        one = jnp.eye(self.matrix.shape[-1], dtype=self.matrix.dtype)
        mask = placed[: len(self.matrix), :, None, None, None]
        return dataclasses.replace(self, matrix=jnp.where(mask, self.matrix, one))

    def _turn(self, x, sign):
        grouped = x.ndim == 5  # queries that share a key head's frame
        e = self.basis[:, None] if grouped else self.basis
        wide = x.astype(jnp.promote_types(x.dtype, e.dtype))
        z = _dot("...dr,...d->...r", e, wide)
        if self.matrix is None:
            turned = operators.rotate(z, sign * (self.angles[..., None, :] if grouped else self.angles), "interleaved")
        else:
            matrix = self.matrix if sign > 0 else self.matrix.swapaxes(-1, -2)
            turned = _dot("...ij,...j->...i", matrix[:, :, :, None] if grouped else matrix, z)
        return (wide + _dot("...dr,...r->...d", e, turned - z)).astype(x.dtype)


def _dot(form, matrix, x):
    """At full precision: accelerators would round a rotation's entries."""
    return _in_wide(functools.partial(jnp.einsum, form, precision=lax.Precision.HIGHEST), matrix, x)


def _in_wide(multiply, matrix, x):
    """multiply(matrix, x) in the wider of their dtypes, returned in x's."""
    dtype = jnp.promote_types(x.dtype, matrix.dtype)
    return multiply(matrix.astype(dtype), x.astype(dtype)).astype(x.dtype)
