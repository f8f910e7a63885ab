"""The models in plain NumPy float64 loops, from the formulas alone: frames as dense matrices, biases as tables.

One document or image a call. `encode(layer, p, h, x, before)` answers for one block. It gets the block's number, the
encoding's parameters there, its normalised and its raw input [L, C], and (activation [L, F], the encoding's
parameters) of the block before it, None in the first. It returns A [L, G, D, D], value frames likewise or None, and
the bias [H, L, L] or 0. Nothing of jojax is used.
"""

import itertools

import numpy as np
from scipy.linalg import expm
from scipy.special import erf


def layer_norm(x, p, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def gelu(u):
    return u * 0.5 * (1 + erf(u / np.sqrt(2)))


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def plane_rotation(angles, pairing="half"):
    """Dense rotation of the planes, through the matrix exponential of the generator: [D, D]."""
    n = len(angles)
    generator = np.zeros((2 * n, 2 * n))
    for b, angle in enumerate(angles):
        i, j = (b, b + n) if pairing == "half" else (2 * b, 2 * b + 1)
        generator[j, i], generator[i, j] = angle, -angle
    return expm(generator)


def attention(h, p, A, V, bias, causal):
    """c_k = Σ_j softmax_j(q_kᵀ A_k⁻¹ A_j k_j /√d + b_kj) P_{j→k} v_j, causal over j ≤ k, then the output projection."""
    q, k, v = (np.einsum("lc,chd->lhd", h, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value"))
    for name, y in (("shift_key", k), ("shift_value", v)):
        if name in p:  # the site before, by a gate
            a = 1 / (1 + np.exp(-h @ p[name]["kernel"]))[..., None]
            y[:] = a * np.concatenate([np.zeros_like(y[:1]), y[:-1]]) + (1 - a) * y
    L, H, D = q.shape
    group = H // k.shape[1]
    out, bias = np.zeros((L, H, D)), np.broadcast_to(bias, (H, L, L))
    for head in range(H):
        g = head // group
        for t in range(L):
            back = np.linalg.inv(A[t, g])
            seen = range(t + 1 if causal else L)
            s = [q[t, head] @ back @ A[j, g] @ k[j, g] / np.sqrt(D) + bias[head, t, j] for j in seen]
            w = np.exp(np.array(s) - max(s))
            w /= w.sum()
            home = np.eye(D) if V is None else np.linalg.inv(V[t, g])
            travel = [np.eye(D) if V is None else V[j, g] for j in seen]
            out[t, head] = sum(w[j] * home @ travel[j] @ v[j, g] for j in seen)
    return np.einsum("lhd,hdc->lc", out, p["out"]["kernel"]) + p["out"]["bias"]


def blocks(params, x, encode, depth, causal):
    """[L, C] through all blocks and the last norm."""
    before = None
    for layer in range(depth):
        p = pick(params["blocks"], layer, depth)
        own = p.get("encoding", {})
        h = layer_norm(x, p["norm_attention"])
        x = x + attention(h, p, *encode(layer, own, h, x, before), causal)
        g = gelu(dense(layer_norm(x, p["norm_mlp"]), p["mlp_in"]))
        before = (g, own)
        x = x + dense(g, p["mlp_out"])
    return layer_norm(x, params["norm"])


def forward(params, tokens, encode, depth, begin=lambda x: x):
    """Logits [L, V] of the language model; `begin` changes the embedding [L, C]."""
    x = blocks(params, begin(params["embed"]["embedding"][tokens]), encode, depth, causal=True)
    return dense(x, params["head"])


def vit(params, image, encode, depth, patch, begin=lambda x: x):
    """Logits [classes] of the vision transformer; image [[frames,] height, width, 3]. A class token where there is a
    "cls"."""
    kernel = params["patches"]["kernel"]
    corners = itertools.product(*(range(0, n, side) for n, side in zip(image.shape[:-1], patch, strict=True)))
    boxes = (tuple(slice(at, at + side) for at, side in zip(corner, patch, strict=True)) for corner in corners)
    x = np.array([np.tensordot(image[box], kernel, kernel.ndim - 1) for box in boxes]) + params["patches"]["bias"]
    if "cls" in params:
        x = np.concatenate([params["cls"][0], x])
    x = blocks(params, begin(x), encode, depth, causal=False)
    return dense(x[0] if "cls" in params else x.mean(0), params["head"])


def pick(tree, layer, depth):
    """The parameters of one block; what only depth − 1 blocks have is missing in the last."""
    if not isinstance(tree, dict):
        return tree[layer]
    short = {k for k, v in tree.items() if k.startswith("advance")}
    return {k: pick(v, layer, depth) for k, v in tree.items() if k not in short or layer < depth - 1}


def omega(D, base=1e4):
    return base ** (-2 * np.arange(D // 2) / D)


def frames(angles, pairing="half"):
    """angles [L, G, D/2] -> [L, G, D, D]"""
    return np.array([[plane_rotation(a, pairing) for a in site] for site in angles])


def slopes(H):
    """ALiBi's slopes, spelled out for the head counts of the tests."""
    return {6: 2.0 ** -np.array([2, 4, 6, 8, 1, 3]), 4: 2.0 ** -np.array([2, 4, 6, 8])}[H]
