"""JoFormer's relatives in whole models against the plain formulas in float64: controls of its experiments, frames that
are products of matrices (blocks, reflections), content angles on a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import reference
import reference_rotary
import test_formulas_vit as of_images
import zoo
from jojax import encodings
from test_formulas import DEPTH, JO, LINEAR, TOKS, D, G, L, T, accumulated, compare, draws, logits, nope, rotary

TOKENS = np.asarray(TOKS)[0]
SEGMENT = jnp.full((1, L), 9)


def model_and_params(encoding, width=D):
    model = zoo.lm_of(encoding, dims=(("depth", DEPTH), ("head_dim", width)))
    with jax.enable_x64(True):
        return model, zoo.drawn(model, TOKS)


# Controls

PMLP, CBD = {**JO, "angle_source": "token_mlp"}, {**JO, "angle_source": "templates"}
NORMAL = {"angle_init": "normal"}
SOURCES = {
    "pmlp": (PMLP, dict(angle_source="token_table"), dict(angle_base="zero")),
    "pmlp_norm": ({**PMLP, **NORMAL, "angle_bound": "norm", "angle_ln": False}, dict(angle_ln=True)),
    "cbd": (CBD, dict(angle_source="linear"), dict(angle_base="zero")),
    "cbd_raw": ({**CBD, "angle_ln": False, "angle_templates": 2, "angle_bound": "none"}, dict(angle_ln=True)),
    "norm_freq": ({**LINEAR, **NORMAL, "angle_bound": "norm_freq"}, dict(angle_bound="norm")),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sources(case):
    options, *changes = SOURCES[case]
    model, params = model_and_params(options)
    wrong = [rotary(options | change, params) for change in changes]
    compare(logits(model, params), params, rotary(options, params), nope, *wrong)


@pytest.mark.parametrize("name", ["jo_lf", "jo_rpemb"])
def test_content_angles_times_noise(name):
    options = zoo.preset(name)
    model, params = model_and_params(options)
    plain = jax.tree.map(np.asarray, params)
    with jax.enable_x64(True):
        noises = [draws(jax.random.key(0), document, 1) for document in (9, 0)] + [1]
    formulas = [reference_rotary.encode(options, plain, T[:, None], G, D, TOKENS, noise=u) for u in noises]
    compare(logits(model, params, segment=SEGMENT), params, formulas[0], nope, *formulas[1:])


def test_signs_of_tokens():
    """±ω, of the token alone: the same in every block, document and run; about as many of either sign."""
    model, params = model_and_params({"name": "accumulated", "steps": "token", "transport": "qkv"})
    with jax.enable_x64(True):
        ctx = encodings.Context(position=None, restart=None, segment=None, tokens=np.arange(zoo.V)[None])
        signs = np.asarray(model.encoding(parent=None).draws(ctx))[0] * 2 * np.pi / reference.omega(D)
    np.testing.assert_allclose(np.abs(signs), 1, atol=1e-12)
    assert abs(signs.mean()) < 0.3 and len(np.unique(signs.reshape(zoo.V, -1), axis=0)) > 12  # 64 patterns
    steps = [(signs * reference.omega(D))[TOKENS]] * DEPTH
    got = logits(model, params, segment=SEGMENT, rngs={"encoding": jax.random.key(3)})
    compare(got, params, accumulated(steps), nope, accumulated(steps, "qk"), accumulated([-s for s in steps]))


# Products of matrices


def prefix_products(steps):
    """A_t = R_1 … R_{t−1} of steps [L, G, D, D], one after the other."""
    out = [np.broadcast_to(np.eye(steps.shape[-1]), steps.shape[1:])]
    for step in steps[:-1]:
        out.append(out[-1] @ step)
    return np.array(out)


def diagonal(blocks):
    """[..., m, b, b] -> [..., D, D]"""
    out = [scipy.linalg.block_diag(*site) for site in blocks.reshape(-1, *blocks.shape[-3:])]
    return np.array(out).reshape(*blocks.shape[:-3], *out[0].shape)


def encode_blocks(options, params, width=D):
    """Steps exp(S_t) R(ω), or the frame exp(S_t) R(tω) of a site alone."""
    plain = jax.tree.map(np.asarray, params)
    o = reference_rotary.JOFORMER | {"block": 4} | options
    b, m = o["block"], width // o["block"]
    below = [(i, j) for i in range(b) for j in range(i)]
    omega = 1e4 ** (-np.arange(width // 2) / (width // 2))[: m * (b // 2)].reshape(m, b // 2)

    def base(t):
        blocks = np.broadcast_to(np.eye(b), (m, b, b)).copy()
        for which, plane in np.ndindex(omega.shape):
            at = slice(2 * plane, 2 * plane + 2)
            c, s = np.cos(t * omega[which, plane]), np.sin(t * omega[which, plane])
            blocks[which, at, at] = [[c, -s], [s, c]]
        return blocks if o["angle_base"] == "rope" else np.broadcast_to(np.eye(b), (m, b, b))

    def of_block(layer, p, h, x, before):
        z = reference_rotary.raw(o, p, plain.get("encoding", {}), TOKENS, h, x, before)
        delta = z if o["angle_bound"] == "none" else np.pi * np.tanh(z)
        delta = np.broadcast_to(delta.reshape(L, -1, m, len(below)), (L, G, m, len(below)))
        content = np.zeros((L, G, m, b, b))
        for t, g, which in np.ndindex(L, G, m):
            generator = np.zeros((b, b))
            for (i, j), angle in zip(below, delta[t, g, which], strict=True):
                generator[i, j], generator[j, i] = angle, -angle
            content[t, g, which] = scipy.linalg.expm(generator)
        if o["accumulate"] == "none":
            A = diagonal(np.array([content[t] @ base(t) for t in T]))
        else:
            A = prefix_products(diagonal(content @ base(1)))
            if o["step_convention"] == "query":
                A = A @ diagonal(content @ base(1))
        values = diagonal(np.array([np.broadcast_to(base(t), (G, m, b, b)) for t in T]))
        values = values if o["v_angles"] == "fixed" else A
        return A, values if "v" in o["transport"] else None, 0

    return of_block


BLOCKS = {"name": "jo_blocks"}
BY_X = {**BLOCKS, "angle_source": "linear"}
BLOCK_CASES = {
    "four": (BLOCKS, D, dict(angle_base="zero"), dict(transport="qk"), dict(accumulate="none")),
    "two": ({**BLOCKS, "block": 2, "angle_source": "own_mlp", "transport": "qk"}, D, dict(transport="qkv")),
    "three": ({**BY_X, "block": 3, "angle_bound": "none", "v_angles": "stop"}, 12, dict(angle_bound="tanh")),
    "eight": ({**BLOCKS, "block": 8, "angle_source": "token_table", "angle_base": "zero"}, 16, dict(angle_base="rope")),
    "query": ({**BY_X, "step_convention": "query", "angle_share_heads": True}, D, dict(step_convention="source")),
    "pointwise": ({**BY_X, "accumulate": "none"}, D, dict(accumulate="prefix")),
    "values_fixed": ({**BY_X, "v_angles": "fixed"}, D, dict(v_angles="same")),
}


@pytest.mark.parametrize("case", zoo.some(BLOCK_CASES))
def test_blocks(case):
    options, width, *changes = BLOCK_CASES[case]
    model, params = model_and_params(options, width)
    got = logits(model, params)
    np.testing.assert_allclose(got, formula(params, encode_blocks(options, params, width)), atol=1e-10)
    for change in changes:
        assert np.abs(got - formula(params, encode_blocks(options | change, params, width))).max() > 1e-3


def formula(params, encode):
    return reference.forward(jax.tree.map(np.asarray, params), TOKENS, encode, DEPTH)


def encode_householder(block, pairs=False, tokens=False, transport="qkv", inclusive=False):
    def of_block(layer, p, h, x, before):
        def mirrors(w):
            w = w.reshape(L, G, -1, block)
            unit = w / np.linalg.norm(w, axis=-1, keepdims=True)
            return diagonal(np.eye(block) - 2 * unit[..., None] * unit[..., None, :])

        def read(name):
            return p[name]["embedding"][TOKENS] if tokens else reference.dense(h, p[name])

        step = mirrors(read("mirror"))
        if pairs:
            step = step @ mirrors(read("mirror") + read("mirror_pair"))
        A = prefix_products(step)
        A = A @ step if inclusive else A
        return A, A if "v" in transport else None, 0

    return of_block


@pytest.mark.parametrize(
    ("options", "right"),
    zoo.some(
        [
            ({}, {}),
            ({"block": 2, "transport": "qk"}, dict(block=2, transport="qk")),
            ({"pairs": True, "source": "token_table"}, dict(pairs=True, tokens=True)),
        ]
    ),
    ids=["whole_head", "blocks", "pairs_of_tokens"],
)
def test_householder(options, right):
    model, params = model_and_params({"name": "householder", "transport": "qkv"} | options)
    right = {"block": D} | right
    wrong = [encode_householder(**right | {"inclusive": True})]  # PaTH's own convention
    if right["block"] == D:
        wrong.append(encode_householder(**right | {"block": 2}))
    compare(logits(model, params), params, encode_householder(**right), nope, *wrong)


# On a grid

GRID = {"name": "joformer", "angle_source": "own_mlp", "form": "axial", "pairing": "interleaved", "base": 100.0}
GRID_CASES = {
    "potential": ({**GRID, "accumulate": "none"}, "cls", dict(accumulate="raster"), dict(angle_base="zero")),
    "raster": ({**GRID, "accumulate": "raster"}, "cls", dict(accumulate="none"), dict(step_convention="query")),
    "raster_query": (
        {**GRID, "accumulate": "raster", "form": "mixed", "step_convention": "query", "transport": "qk"},
        "mean",
        dict(step_convention="source"),
        dict(transport="qkv"),
    ),
}


@pytest.mark.parametrize("case", GRID_CASES)
def test_content_angles_on_a_grid(case):
    options, pool, *changes = GRID_CASES[case]
    model, params = of_images.model_and_params(options, pool)
    got = of_images.logits(model, params)
    right = of_images.formula(params, of_images.rotary(options, params, pool))
    np.testing.assert_allclose(got, right, atol=1e-10)
    for change in changes:
        assert np.abs(got - of_images.formula(params, of_images.rotary(options | change, params, pool))).max() > 1e-4
