"""JoFormer's relatives in whole models against the plain formulas in float64: controls of its experiments, frames that
are products of matrices (blocks, reflections), content angles on a grid. What they start as, and what they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import reference
import reference_rotary
import test_claims
import test_formulas_vit as of_images
import zoo
from jojax import encodings
from jojax.algebra import elements, operators
from jojax.encodings.frames import orthonormal
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


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_blocks(case):
    options, width, *changes = BLOCK_CASES[case]
    model, params = model_and_params(options, width)
    got = logits(model, params, compiled=True)  # as exponentials of matrices must be
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
    [
        ({}, {}),
        ({"block": 2, "transport": "qk"}, dict(block=2, transport="qk")),
        ({"pairs": True, "source": "token_table"}, dict(pairs=True, tokens=True)),
    ],
    ids=["whole_head", "blocks", "pairs_of_tokens"],
)
def test_householder(options, right):
    model, params = model_and_params({"name": "householder", "transport": "qkv"} | options)
    right = {"block": D} | right
    wrong = [encode_householder(**right | {"inclusive": True})]  # PaTH's own convention
    if right["block"] == D:
        wrong.append(encode_householder(**right | {"block": 2}))
    compare(logits(model, params), params, encode_householder(**right), nope, *wrong)


# On the encoding alone


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=0)
def journey_of(made, params, ctx):
    return test_claims.journey_of(made, params, ctx)


@pytest.mark.parametrize("options", [{"angle_source": "linear"}, {"step_convention": "query", "angle_base": "zero"}])
def test_blocks_of_two_are_planes(options, float64):
    """jo_projected with the same parameters, values and all."""
    ctx, found = test_claims.context("jo_fixed"), []
    for encoding in ({**BLOCKS, "block": 2}, {**JO, "pairing": "interleaved"}):
        made = encodings.build(encoding | options, zoo.lm_dims(), "float64")(parent=None)
        journey = journey_of(made, test_claims.params_of(made, ctx), ctx)
        found.append([frame.apply(ctx.k) for frame in (journey.frame, journey.value_frame)])
    np.testing.assert_allclose(*found, atol=1e-10)
    assert np.abs(found[0][0] - ctx.k).max() > 0.1


def started(encoding, ctx):
    made = encodings.build(encoding, zoo.lm_dims(), "float64")(parent=None)
    run = jax.jit(lambda key: made.init_with_output(key, ctx.residual, ctx, method=test_claims.first_block))
    return made, *run(jax.random.key(0))


@pytest.mark.parametrize("name", ["jo_blocks", "jo_pmlp", "jo_cbd", "householder"])
def test_what_starts_at_zero_is_its_base(name, float64):
    """jo_fixed, or none for pairs of reflections; single ones, and noise without a base, are no such start."""
    ctx = test_claims.context("jo_fixed")
    encoding = zoo.preset(name) | ({"pairs": True} if name == "householder" else {})
    base = "none" if name == "householder" else "jo_fixed"
    pairing = {"pairing": "interleaved"} if name == "jo_blocks" else {}
    _, journey, _ = started(encoding, ctx)
    _, fixed, _ = started(zoo.preset(base) | pairing, ctx)
    for which in ("frame", "value_frame"):
        want = getattr(fixed, which)
        want = ctx.k if want is None else want.apply(ctx.k)
        np.testing.assert_allclose(getattr(journey, which).apply(ctx.k), want, atol=1e-12)
    if name == "householder":
        _, single, _ = started(zoo.preset(name), ctx)
        assert np.abs(single.frame.apply(ctx.k) - ctx.k).max() > 0.1


@pytest.mark.parametrize("name", ["jo_blocks", "jo_pmlp", "jo_cbd", "householder"])
def test_gradients_at_the_start_are_finite_and_reach_the_angles(name, float64):
    ctx = test_claims.context("jo_fixed")
    made, _, variables = started(zoo.preset(name) | ({"pairs": True} if name == "householder" else {}), ctx)
    weight = np.random.default_rng(1).normal(size=ctx.k.shape)

    @jax.jit
    def gradients(params):
        return jax.grad(lambda p: (test_claims.journey_of(made, p, ctx).frame.apply(ctx.k) * weight).sum())(params)

    sizes = {jax.tree_util.keystr(path): np.abs(g).max() for path, g in flat(gradients(variables["params"]))}
    assert np.isfinite(list(sizes.values())).all()
    alive = {path for path, size in sizes.items() if size > 1e-3}
    zero = {  # MLPs and choices wait for a gate, or for templates, that have left zero
        "jo_blocks": set(),
        "jo_pmlp": {f"['{n}']['{k}']" for n in ("angle_in", "angle_out") for k in ("kernel", "bias")},
        "jo_cbd": {"['angle_out']['kernel']", "['angle_out']['bias']"},
        "householder": {"['mirror']['kernel']", "['mirror']['bias']"},  # H H is the identity for every w
    }
    assert alive == set(sizes) - zero[name]


def flat(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def journeys(encoding, ctx):
    """P [L, L, D, D] from j to k of head 0."""
    made = encodings.build(encoding, zoo.lm_dims(), "float64")(parent=None)
    journey = journey_of(made, test_claims.params_of(made, ctx), ctx)
    a = test_claims.dense(journey.frame, ctx.k)[:, 0]
    return np.einsum("kba,jbc->jkac", a, a)  # A_k⁻¹ A_j of orthogonal frames


@pytest.mark.parametrize("block", [2, 4])
def test_blocks_beyond_two_are_curved(block, float64):
    """Cocycles all; the order of what lies between matters where blocks are larger than planes. Displacement alone
    decides where every step is the same, and nowhere else."""
    ctx, encoding = test_claims.context("jo_fixed"), {**BY_X, "block": block}
    P = journeys(encoding, ctx)
    for i, j, k in np.ndindex(4, 4, 4):
        np.testing.assert_allclose(P[j, k] @ P[i, j], P[i, k], atol=1e-10)
    order = np.arange(10)
    order[[4, 6]] = 6, 4
    swapped = journeys(encoding, ctx.replace(x=ctx.x[:, order]))
    changed = np.abs(swapped[2, 8] - P[2, 8]).max()
    assert changed < 1e-10 if block == 2 else changed > 1e-2
    still = journeys(encoding, ctx.replace(x=np.broadcast_to(ctx.x[:, :1], ctx.x.shape)))
    np.testing.assert_allclose(still[1, 4], still[5, 8], atol=1e-10)  # shift invariance
    assert np.abs(P[1, 4] - P[5, 8]).max() > 1e-2


def test_reflections_mirror_and_pairs_turn(float64):
    ctx = test_claims.context("jo_fixed")
    for pairs in (False, True):
        P = journeys({"name": "householder", "pairs": pairs}, ctx)
        want = 1 if pairs else (-1.0) ** np.subtract.outer(np.arange(10), np.arange(10))
        np.testing.assert_allclose(np.linalg.det(P), want, atol=1e-10)


def test_long_products_stay_orthogonal_in_float32():
    """One Newton–Schulz step; without it they drift."""
    steps = np.random.default_rng(0).uniform(-np.pi, np.pi, (1, 4096, 12, 4, 4)).astype("float32")

    @jax.jit
    def worst(steps):
        path, _, last = elements.prefix(
            operators.exp_skew(operators.skew(jnp.tril(steps, -1))), elements.product, jnp.eye(4)
        )
        return [operators.orthogonality_error(a).max() for a in (path, orthonormal(path), orthonormal(last))]

    drifted, *mended = worst(steps)
    assert drifted > 1e-5 and max(mended) < 1e-6


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
