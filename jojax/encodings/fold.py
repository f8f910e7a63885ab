"""Exact export to plain rope with learned frequencies: ComRoPE, GRAPE-M, and LieRE where its generators commute.

Commuting skew generators A_a have one orthogonal S with A_a = S K_a Sᵀ, K_a turning neighbouring dimensions by ω_a.
In a score the outer S of query and key cancels, the inner one goes into the projections:

    qᵀ exp(Σ_a (u_ja − u_ka) A_a) k = (Sᵀq)ᵀ exp(Σ_a (u_ja − u_ka) K_a) (Sᵀk),     W_q ← W_q S,  W_k ← W_k S

and where values travel, W_v ← W_v S and W_o ← Sᵀ W_o, biases likewise. Source: the spectral theorem; STRING (arXiv
2502.02562), theorem 3.4. Nothing may stand between projection and rotation but what commutes with S: a QK-norm may, its
gains may not unless they are all equal.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jojax.encodings.build import options
from jojax.encodings.coordinates import Places
from jojax.errors import UserError

SMALL = 1e-9  # of the largest speed: below it a plane stands still


def fold(encoding, params):
    """(config.encoding, params) of the same model with `rope` for `encoding`; params of the whole model, as arrays of
    this host. UserError: no plain rope is the same function."""
    first, blocks = params.get("encoding", {}), params["blocks"]
    depth = len(blocks["query"]["kernel"])
    own = (first | jax.tree.map(lambda t, i=i: t[i], blocks.get("encoding", {})) for i in range(depth))
    heads = [[planes(of_head) for of_head in generators(encoding, p)] for p in own]
    basis, speeds = (np.array([[head[i] for head in layer] for layer in heads]) for i in (0, 1))
    names = {"qk": ("query", "key"), "v": ("value", "out")}
    turned = [name for part in names if part in encoding.transport for name in names[part]]
    if "query" in turned:
        refuse_gains(blocks)
    folded = blocks | {name: turn(name, blocks[name], basis) for name in turned}
    folded["encoding"] = {"freq": speeds.swapaxes(1, 2).astype(blocks["query"]["kernel"].dtype)}
    spatial = {name: getattr(encoding, name) for name in options(Places)} if isinstance(encoding, Places) else {}
    made = {
        "name": "rope",
        "transport": encoding.transport,
        "form": "1d" if speeds.shape[2] == 1 else "mixed",
        "pairing": "interleaved",
        "learned": True,
        "freq_init": "normal",
    }
    return made | spatial, {k: v for k, v in params.items() if k != "encoding"} | {"blocks": folded}


def refuse_gains(blocks):
    for name in ("norm_q", "norm_k"):
        if name in blocks and np.ptp(np.asarray(blocks[name]["scale"]), axis=-1).any():
            raise UserError(
                f"the gains of model.qk_norm ({name}) differ between dimensions and stand between projection and "
                "rotation: no rotation passes them, so nothing folds"
            )


def generators(encoding, params):
    """[G, A, D, D] of one block, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: jnp.asarray(t, "float64"), params)
        blocks = np.asarray(encoding.clone(dtype="float64").apply({"params": wide}, method="group")).swapaxes(0, 1)
    G, A, m, b, _ = blocks.shape
    dense = np.zeros((G, A, m, b, m, b))
    for j in range(m):
        dense[:, :, j, :, j] = blocks[:, :, j]
    return dense.reshape(G, A, m * b, m * b)


def planes(generators):
    """S [D, D] and ω [A, D/2] of skew generators [A, D, D]: Sᵀ A_a S turns the dimensions 2p and 2p + 1 by ω_ap."""
    weights = np.random.default_rng(0).normal(size=len(generators))  # planes of the sum are planes of each
    w, z = np.linalg.eigh(1j * np.tensordot(weights, generators, 1))
    z = z[:, w > SMALL * max(w.max(), np.finfo(float).tiny)]
    turning = np.sqrt(2) * np.stack([z.real, z.imag], -1).reshape(len(w), -1)
    still = np.linalg.eigh(turning @ turning.T)[1][:, : len(w) - turning.shape[1]]
    basis = np.concatenate([turning, still], 1)
    inside = basis.T @ generators @ basis
    even, odd = np.arange(0, len(w), 2), np.arange(1, len(w), 2)
    speeds = inside[:, odd, even]
    inside[:, odd, even] = inside[:, even, odd] = 0
    if np.abs(inside).max() > 10 * SMALL * np.abs(generators).max():
        raise UserError(
            "the generators of the coordinate axes do not commute (LieRE with blocks larger than 2): no plain rope is "
            "the same function, so nothing folds"
        )
    return basis, speeds


def turn(name, projection, basis):
    """W S and b S of a projection onto heads [depth, …, H or G, D], or Sᵀ W of the one from heads [depth, H, D, C]."""
    kernel = projection["kernel"]
    if name == "out":
        basis = np.repeat(basis, kernel.shape[1] // basis.shape[1], 1)
        return projection | {"kernel": np.einsum("lhdc,lhde->lhec", kernel, basis).astype(kernel.dtype)}
    basis = np.repeat(basis, kernel.shape[2] // basis.shape[1], 1)
    forms = {"kernel": "lchd,lhde->lche", "bias": "lhd,lhde->lhe"}
    return {part: np.einsum(forms[part], t, basis).astype(t.dtype) for part, t in projection.items()}
