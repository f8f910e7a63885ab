"""GRAPE's encodings in whole language models against the plain formulas in float64: gates, paths, group actions."""

import jax
import numpy as np
import pytest
import scipy.linalg

import reference
import reference_rotary
import zoo
from test_formulas import DEPTH, EYE, TOKS, D, G, H, L, T, compare, encode_alibi, logits, model_and_params, nope


def softplus(x):
    return np.log1p(np.exp(x))


def encode_gated(params, gate, shift=0.0):
    """−m ω (λ(q) + λ(k))(t − j), the gates that `gate` names; keys' gates are per key head."""
    plain = jax.tree.map(np.asarray, params)

    def encode(layer, p, h, x, before):
        block, bias = reference.pick(plain["blocks"], layer, DEPTH), np.zeros((H, L, L))
        for head, t, j in np.ndindex(H, L, L):
            for name, site, projection, at in (("q", t, "query", head), ("k", j, "key", head // 2)):
                if name in gate:
                    y = h[site] @ block[projection]["kernel"][:, at] + block[projection]["bias"][at]
                    u = p[f"gate_{name}"][at]
                    bias[head, t, j] += softplus(y @ u / np.linalg.norm(u) / np.sqrt(D) + shift)
            bias[head, t, j] *= -reference.slopes(H)[head] * softplus(p["omega"][head]) * (t - j)
        return EYE, None, bias

    return encode


def encode_fox(params, gate=None, late=0):
    """Σ log f over the sites after j up to the query; one gate a key head."""

    def encode(layer, p, h, x, before):
        raw = reference.dense(h, p["gate"]) if gate is None else np.broadcast_to(gate(p), (L, G))
        bias = np.zeros((H, L, L))
        for head, t, j in np.ndindex(H, L, L):
            bias[head, t, j] = -softplus(-raw[j + 1 - late : t + 1 - late, head // 2]).sum()
        return EYE, None, bias

    return encode


def tau_bias(p):
    return -np.log(np.expm1(1 / np.geomspace(4, 256, G)))


LINKS = {
    "logsigmoid": lambda z: -np.log1p(np.exp(-z)),
    "quad": lambda z: -np.log(2) + z / 2 - z**2 / 8,
    "linear": lambda z: -np.log(2) + z / 2,
}


def encode_grape_ap(params, link="logsigmoid", rotate="both", query_norm=True, own_step=True, gated_by_query=True):
    """The step of site m, seen from t, is in the path from j where j < m ≤ t."""
    turn = np.array([reference.plane_rotation(np.full(4, float(t))) for t in range(L)])

    def path(h, kernel, norm=True, turned=True):
        out = np.einsum("lc,chr->lhr", h, kernel)
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) if norm else out
        return np.einsum("lrs,lhs->lhr", turn, out) if turned else out

    def encode(layer, p, h, x, before):
        key = path(h, p["path"]["kernel"])
        query = path(h, p["path_query"]["kernel"], query_norm, rotate == "both")
        bias = np.zeros((H, L, L))
        for head, t in np.ndindex(H, L):
            for j in range(t):
                seen = query[t, head] if gated_by_query else np.ones(8)
                z = [seen @ key[m, head // 2] / 8 for m in range(j + 1, t + own_step)]
                bias[head, t, j] = reference.slopes(H)[head] * sum(map(LINKS[link], z))
        return EYE, None, bias

    return encode


@pytest.mark.parametrize("gate", ["k", "q", "qk"])
def test_gated_slopes(gate):
    encoding = {"name": "grape_a", "gate": gate} | ({"gate_bias": 0.5} if gate == "q" else {})
    model, params = model_and_params(encoding)
    right = encode_gated(params, gate, encoding.get("gate_bias", 0.0))
    compare(logits(model, params), params, right, nope, encode_alibi(params))


def test_gates_read_queries_and_keys_after_their_norm():
    """Wherever the norm stands: without a rotation both places are the same model, and it is not the one without."""
    found = {}
    for place in ("before", "after", "none"):
        model = zoo.lm_of({"name": "grape_a", "gate": "qk"}, qk_norm=place)
        with jax.enable_x64(True):
            params = zoo.drawn(model, TOKS)
        found[place] = logits(model, params)
    np.testing.assert_allclose(found["after"], found["before"], atol=1e-10)
    assert np.abs(found["none"] - found["before"]).max() > 1e-3


@pytest.mark.parametrize(
    ("fox_gate", "bias"), [("full", None), ("bias_only", lambda own: own["gate_bias"]), ("fixed", tau_bias)]
)
def test_fox(fox_gate, bias):
    model, params = model_and_params({"name": "fox", "fox_gate": fox_gate})
    wrong = [encode_fox(params, late=1)] if bias is None else []  # erratum E3: the key's own gate, not the query's
    compare(logits(model, params), params, encode_fox(params, bias), nope, *wrong)


@pytest.mark.parametrize(
    ("options", "wrong"),
    zoo.some(
        [
            ({}, {"own_step": False}),
            ({"link": "quad"}, {"link": "linear"}),
            ({"link": "linear"}, {"link": "quad"}),
            ({"rotate": "key", "query_norm": False}, {"rotate": "key"}),
            ({"rotate": "key"}, {}),
            ({}, {"gated_by_query": False}),
        ]
    ),
    ids=str,
)
def test_grape_ap(options, wrong):
    model, params = model_and_params({"name": "grape_ap", **options})
    others = [nope] + ([encode_grape_ap(params, **wrong)] if options != wrong else [])
    compare(logits(model, params), params, encode_grape_ap(params, **options), *others)


def test_grape_joint():
    """Frames of one and bias of the other; gates that read turned queries are the mistake."""
    rotation, bias = {"name": "rope", "transport": "qkv"}, {"name": "grape_a", "gate": "qk"}
    model, params = model_and_params({"name": "joint", "rotation": rotation, "bias": bias})

    def encode(layer, p, h, x, before, turned=True):
        a, v, _ = reference_rotary.encode(rotation, params, T[:, None], G, D)(layer, p, h, x, before)
        of_bias = encode_gated(params, "qk")(layer, p["of_bias"], h, x, before)[2]
        return (a if turned else EYE), v, of_bias

    compare(
        logits(model, params), params, encode, nope, lambda *a: encode(*a, turned=False), encode_gated_alone(params)
    )


def encode_gated_alone(params):
    gated = encode_gated(params, "qk")
    return lambda layer, p, h, x, before: gated(layer, p["of_bias"], h, x, before)


# Multiplicative GRAPE: dense frames through matrix exponentials


def gram_schmidt(span):
    columns = []
    for v in span.T:
        v = v - sum((v @ c) * c for c in columns)
        columns.append(v / np.linalg.norm(v))
    return np.array(columns).T


def turns(angles):
    """Generator of neighbouring planes [2n, 2n]."""
    s = np.zeros((2 * len(angles),) * 2)
    for i, angle in enumerate(angles):
        s[2 * i + 1, 2 * i], s[2 * i, 2 * i + 1] = angle, -angle
    return s


def learned_basis(kind, p, g):
    if kind == "cayley":
        s = p["cayley"][g] - p["cayley"][g].T
        return (np.eye(D) - s) @ np.linalg.inv(np.eye(D) + s)
    if kind == "householder":
        b = np.eye(D)
        for v in p["mirrors"][:, g]:
            b = (np.eye(D) - 2 * np.outer(v, v) / (v @ v)) @ b
        return b
    x = p["unitary"][:, g]
    u = scipy.linalg.expm(x[0] - x[0].T + 1j * (x[1] + x[1].T))
    return np.block([[np.array([[z.real, -z.imag], [z.imag, z.real]]) for z in row] for row in u])


def grape_m_generator(options, p, g):
    """L of a key head's group exp(nL)."""
    kind = options["kind"]
    if kind in ("plane", "mix"):
        e = gram_schmidt(p["span"][g])
        k = turns(np.exp(p["log_speed"][g])) if kind == "plane" else p["generator"][g] - p["generator"][g].T
        return e @ k @ e.T
    theta = np.exp(p["log_freq"][g if options.get("per_head") and kind != "ctx" else 0] / (1 if kind == "ctx" else 16))
    if kind == "basis":
        b = learned_basis(options.get("basis", "cayley"), p, g)
        return b @ turns(theta) @ b.T
    pairs = np.arange(D).reshape(2, D // 2).T.ravel()  # half: planes (i, i + D/2)
    whole = np.zeros((D, D))
    whole[np.ix_(pairs, pairs)] = turns(theta)
    return whole


def encode_grape_m(options, phase=None):
    def encode(layer, p, h, x, before):
        n = np.repeat(T[:, None].astype(float), G, 1)
        if options["kind"] == "ctx" and options.get("phase_fn") != "one":
            raw = reference.dense(h, p["gate"])
            step = softplus(raw) if options.get("phase_fn") else 1 / (1 + np.exp(-raw / 16))
            n = np.broadcast_to(np.cumsum(step, 0) - step, n.shape)
        n = n if phase is None else phase(n)
        own = [grape_m_generator(options, p, g) for g in range(G)]
        A = np.array([[scipy.linalg.expm(n[t, g] * own[g]) for g in range(G)] for t in range(L)])
        return A, A if "v" in options.get("transport", "qk") else None, 0

    return encode


@pytest.mark.parametrize(
    "options",
    zoo.some(
        [
            {"kind": "plane"},
            {"kind": "freq", "per_head": True, "transport": "qkv"},
            {"kind": "basis", "transport": "qkv"},
            {"kind": "mix", "transport": "qkv"},
            {"kind": "basis", "basis": "householder", "reflectors": 4, "per_head": True},
            {"kind": "basis", "basis": "unitary"},
            {"kind": "ctx", "per_head": True},
            {"kind": "ctx", "phase_fn": "softplus", "transport": "qkv"},
            {"kind": "ctx", "phase_fn": "one"},
        ]
    ),
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_grape_m(options):
    model, params = model_and_params({"name": "grape_m", **options})
    wrong = [encode_grape_m(options, lambda n: 0.8 * n)]
    if "v" in options.get("transport", "qk"):
        wrong.append(encode_grape_m(options | {"transport": "qk"}))
    compare(logits(model, params), params, encode_grape_m(options), nope, *wrong)
