"""The causal LM in plain NumPy float64 loops, from the formulas alone: frames as dense matrices, biases as tables.

One document a call. `encode(params of one block, x, tokens, extra)` gives, per key head, frames A [L, G, D, D], value
frames (or None) and, per query head, bias [H, L, L]. Nothing of jojax is used.
"""

import numpy as np
from scipy.linalg import expm
from scipy.special import erf


def layer_norm(x, p, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def plane_rotation(angles):
    """Dense rotation by half-split planes, through the matrix exponential of the generator: [D, D]."""
    n = len(angles)
    generator = np.zeros((2 * n, 2 * n))
    for b, angle in enumerate(angles):
        generator[b + n, b], generator[b, b + n] = angle, -angle
    return expm(generator)


def attention(h, p, A, V, bias):
    """c_k = Σ_j softmax_j(q_kᵀ A_k⁻¹ A_j k_j /√d + b_kj) P_{j→k} v_j over j ≤ k, then the output projection."""
    q, k, v = (np.einsum("lc,chd->lhd", h, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value"))
    L, H, D = q.shape
    group = H // k.shape[1]
    out = np.zeros((L, H, D))
    for head in range(H):
        g = head // group
        for t in range(L):
            back = np.linalg.inv(A[t, g])
            s = [q[t, head] @ back @ A[j, g] @ k[j, g] / np.sqrt(D) + bias[head, t, j] for j in range(t + 1)]
            w = np.exp(np.array(s) - max(s))
            w /= w.sum()
            home = np.eye(D) if V is None else np.linalg.inv(V[t, g])
            travel = [np.eye(D) if V is None else V[j, g] for j in range(t + 1)]
            out[t, head] = sum(w[j] * home @ travel[j] @ v[j, g] for j in range(t + 1))
    return np.einsum("lhd,hdc->lc", out, p["out"]["kernel"]) + p["out"]["bias"]


def forward(params, tokens, encode, depth):
    """Logits [L, V]. `encode(layer, encoding params of the block, h, hidden of the block before)`."""
    x = params["embed"]["embedding"][tokens]
    hidden = None
    for layer in range(depth):
        p = pick(params["blocks"], layer, depth)
        h = layer_norm(x, p["norm_attention"])
        A, V, bias = encode(layer, p.get("encoding", {}), h, hidden)
        x = x + attention(h, p, A, V, bias)
        u = layer_norm(x, p["norm_mlp"]) @ p["mlp_in"]["kernel"] + p["mlp_in"]["bias"]
        g = u * 0.5 * (1 + erf(u / np.sqrt(2)))
        hidden = (g, p.get("encoding", {}))
        x = x + g @ p["mlp_out"]["kernel"] + p["mlp_out"]["bias"]
    return layer_norm(x, params["norm"]) @ params["head"]["kernel"] + params["head"]["bias"]


def pick(tree, layer, depth):
    """The parameters of one block; what only depth − 1 blocks have is missing in the last."""
    if not isinstance(tree, dict):
        return tree[layer]
    short = {k for k, v in tree.items() if k.startswith("advance")}
    return {k: pick(v, layer, depth) for k, v in tree.items() if k not in short or layer < depth - 1}


def omega(D, base=1e4):
    return base ** (-2 * np.arange(D // 2) / D)


def frames(angles):
    """angles [L, G, D/2] -> [L, G, D, D]"""
    return np.array([[plane_rotation(a) for a in site] for site in angles])


def slopes(H):
    """ALiBi's slopes, spelled out for the head counts of the tests."""
    return {6: 2.0 ** -np.array([2, 4, 6, 8, 1, 3]), 4: 2.0 ** -np.array([2, 4, 6, 8])}[H]
