"""A gated linear recurrence in the place of attention: (α, P) = (1, product) of the value-path hierarchy.

    h_t = a_t ⊙ h_{t−1} + (1 − a_t) ⊙ v_t,   a_t = σ(W_a x_t + c),   v_t = W_v x_t,   out_t = W_o(silu(W_g x_t) ⊙ h_t)

so that h_k = Σ_{j≤k} (a_k a_{k−1} … a_{j+1}) ⊙ (1 − a_j) ⊙ v_j: a sum with no softmax, along products that depend on
the input (JoFormer, Theorem F.1, with diagonal A). One number of state for each of the H · D channels: the cell of HGRN
(arXiv 2311.04823) with real gates, or GLA (2312.06635) and Mamba-2 (2405.21060) at state size one, b tied to 1 − a.
h is a weighted mean of values, never longer than they are. Four maps between C and H · D, as attention has: with as
many key heads as heads the parameters are equally many.

c starts at −log(e^{1/τ} − 1), so that log a = −1/τ, τ log-spaced over a head from 1 to 256 sites. Gates and states are
float32 or wider.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jojax.algebra.journey import gated_recurrence
from jojax.encodings.base import Encoding, shards, wide
from jojax.errors import UserError

TAU = (1.0, 256.0)


def check(spec):
    """UserError for what a recurrence cannot have, and for options that it does not read."""
    if not spec.dims.causal:
        raise UserError("model.mixer = 'recurrence' needs an order: use it in a causal model (model.kind = 'lm')")
    for key, idle in (
        ("model.kv_heads", spec.dims.kv_heads != spec.dims.heads),
        ("model.qk_norm", spec.qk_norm != "none"),
        ("model.window", spec.window != 0),
        ("model.kv_shift", spec.kv_shift),
        ("attention", spec.attention != "auto"),
    ):
        if idle:
            raise UserError(f"{key} does nothing beside model.mixer = 'recurrence': leave its default")


def check_encoding(encoding):
    """UserError for an encoding that acts on attention. Those that change the embedding alone have no journey."""
    if type(encoding).journey is not Encoding.journey:
        raise UserError(
            f"encoding {type(encoding).__name__} acts on attention, which model.mixer = 'recurrence' has not: "
            "use none, sinusoidal or learned"
        )


class Recurrence(nn.Module):
    spec: Any  # models.block.Spec

    @nn.compact
    def __call__(self, x, restart, past=None):
        """x [B, L, C], restart [B, L], past [B, H, D] the last state of the chunk before -> out [B, L, C], the last
        state."""
        spec, dtype = self.spec, wide(self.spec.dtype)
        heads = spec.dims.heads, spec.dims.head_dim
        v, gate = (spec.dense(heads, name)(x) for name in ("value", "gate"))
        raw = spec.dense(heads, "decay", dtype=dtype, use_bias=True, bias_init=self.slow)(x)
        a, b = nn.sigmoid(raw), nn.sigmoid(-raw) * v.astype(dtype)
        h, last = gated_recurrence(a, b, restart, past, shards())
        return spec.dense(x.shape[-1], "out", axis=(-2, -1))(nn.silu(gate) * h.astype(gate.dtype)), last

    def slow(self, key, shape, dtype):
        """c, one head after the other [H · D]"""
        return jnp.resize(-jnp.log(jnp.expm1(1 / jnp.geomspace(*TAU, self.spec.dims.head_dim))), shape).astype(dtype)
