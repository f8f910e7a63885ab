"""Whole models against the plain formulas in float64: one encoding for each kind of answer in the contract."""

import jax
import numpy as np
import pytest
import reference
import zoo

H, G, D, L = 6, 3, 4, zoo.L


def zero_bias():
    return np.zeros((H, L, L))


def eye():
    return np.broadcast_to(np.eye(D), (L, G, D, D))


def encode_rope(layer, p, h, hidden):
    angles = np.arange(L)[:, None, None] * np.broadcast_to(reference.omega(D), (G, D // 2))
    A = reference.frames(angles)
    return A, None, zero_bias()


def encode_jo_fixed(layer, p, h, hidden):
    A, _, bias = encode_rope(layer, p, h, hidden)
    return A, A, bias


def jo_projected(params, toks):
    def encode(layer, p, h, hidden):
        if layer == 0:
            z = params["encoding"]["angle_table"]["embedding"][toks]
        else:
            g, before = hidden
            z = g @ before["advance"]["kernel"] + before["advance"]["bias"]
        step = reference.omega(D) + np.pi * np.tanh(z.reshape(L, G, D // 2))
        angles = np.concatenate([np.zeros_like(step[:1]), np.cumsum(step, 0)[:-1]])  # exclusive
        A = reference.frames(angles)
        return A, A, zero_bias()

    return encode


def encode_alibi(layer, p, h, hidden):
    t, j = np.mgrid[:L, :L]
    return eye(), None, -reference.slopes(H)[:, None, None] * (t - j)


def encode_xpos(layer, p, h, hidden):
    A, _, bias = encode_rope(layer, p, h, hidden)
    zeta = (np.arange(D // 2) / (D // 2) + 0.4) / 1.4
    scale = zeta ** (-np.arange(L)[:, None] / 512)
    return A * np.concatenate([scale, scale], -1)[:, None, None, :], None, bias


def encode_grape_ap(layer, p, h, hidden):
    def path(name, heads):
        out = np.einsum("lc,chr->lhr", h, p[name]["kernel"])
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
        turn = np.array([reference.plane_rotation(np.full(4, float(t))) for t in range(L)])
        return np.einsum("lrs,lhs->lhr", turn, out)

    key, query = path("path", G), path("path_query", H)
    bias = zero_bias()
    for head in range(H):
        for t in range(L):
            for j in range(t):
                z = [query[t, head] @ key[m, head // 2] / 8 for m in range(j + 1, t + 1)]
                bias[head, t, j] = reference.slopes(H)[head] * sum(-np.log1p(np.exp(-v)) for v in z)
    return eye(), None, bias


CASES = {
    "rope": lambda p, t: encode_rope,
    "jo_fixed": lambda p, t: encode_jo_fixed,
    "jo_projected": jo_projected,
    "alibi": lambda p, t: encode_alibi,
    "xpos": lambda p, t: encode_xpos,
    "grape_ap": lambda p, t: encode_grape_ap,
}


@pytest.mark.parametrize("name", CASES)
def test_model_equals_formula(name):
    toks = zoo.tokens()[:1]
    with jax.enable_x64(True):
        params = zoo.lm_params(name)
        got = np.asarray(zoo.run(zoo.lm(name), params, zoo.tokens()))[0]
    plain = jax.tree.map(np.asarray, params)
    encode = CASES[name](plain, np.asarray(toks)[0])
    want = reference.forward(plain, np.asarray(toks)[0], encode, depth=3)
    np.testing.assert_allclose(got, want, atol=1e-10)
    wrong = reference.forward(plain, np.asarray(toks)[0], lambda *a: (eye(), None, zero_bias()), depth=3)
    assert np.abs(got - wrong).max() > 1e-3  # without the encoding it is another model
