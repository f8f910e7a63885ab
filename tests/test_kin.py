"""JoFormer's relatives on the encoding alone, in float64: what they start as, gradients there, which journeys are flat,
what turns and what mirrors; and in float32, how long products stay orthogonal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax import encodings
from jojax.algebra import elements, operators
from jojax.encodings.frames import orthonormal
from jojax.laws import journeys

JO, BLOCKS = {"name": "joformer"}, {"name": "jo_blocks"}
BY_X = {**BLOCKS, "angle_source": "linear"}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def context():
    return journeys.Sample({"name": "rope"}, "text").context()


def params_of(made, ctx):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda t: rng.normal(size=t.shape), journeys.shapes(made, ctx))


@functools.partial(jax.jit, static_argnums=0)
def journey_of(made, params, ctx):
    return made.apply({"params": params}, ctx.residual, ctx, method=journeys.first_block)


@pytest.mark.parametrize("options", [{"angle_source": "linear"}, {"step_convention": "query", "angle_base": "zero"}])
def test_blocks_of_two_are_planes(options, float64):
    """jo_projected with the same parameters, values and all."""
    ctx, found = context(), []
    for encoding in ({**BLOCKS, "block": 2}, {**JO, "pairing": "interleaved"}):
        made = encodings.build(encoding | options, journeys.TEXT, "float64")(parent=None)
        journey = journey_of(made, params_of(made, ctx), ctx)
        found.append([frame.apply(ctx.k) for frame in (journey.frame, journey.value_frame)])
    np.testing.assert_allclose(*found, atol=1e-10)
    assert np.abs(found[0][0] - ctx.k).max() > 0.1


def started(encoding, ctx):
    made = encodings.build(encoding, journeys.TEXT, "float64")(parent=None)
    run = jax.jit(lambda key: made.init_with_output(key, ctx.residual, ctx, method=journeys.first_block))
    return made, *run(jax.random.key(0))


@pytest.mark.parametrize("name", ["jo_blocks", "jo_pmlp", "jo_cbd", "householder"])
def test_what_starts_at_zero_is_its_base(name, float64):
    """jo_fixed, or none for pairs of reflections; single ones, and noise without a base, are no such start."""
    ctx = context()
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
    ctx = context()
    made, _, variables = started(zoo.preset(name) | ({"pairs": True} if name == "householder" else {}), ctx)
    weight = np.random.default_rng(1).normal(size=ctx.k.shape)

    @jax.jit
    def gradients(params):
        return jax.grad(lambda p: (journey_of(made, p, ctx).frame.apply(ctx.k) * weight).sum())(params)

    own = {k: v for k, v in gradients(variables["params"]).items() if k != "advance"}  # that is for the next block
    sizes = {jax.tree_util.keystr(path): np.abs(g).max() for path, g in flat(own)}
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


def all_ways(encoding, ctx):
    """P [L, L, D, D] from j to k of head 0."""
    made = encodings.build(encoding, journeys.TEXT, "float64")(parent=None)
    journey = journey_of(made, params_of(made, ctx), ctx)
    a = journeys.dense(journey.frame, ctx.k)[:, 0]
    return np.einsum("kba,jbc->jkac", a, a)  # A_k⁻¹ A_j of orthogonal frames


@pytest.mark.parametrize("block", [2, 4])
def test_blocks_beyond_two_are_curved(block, float64):
    """Cocycles all; the order of what lies between matters where blocks are larger than planes. Displacement alone
    decides where every step is the same, and nowhere else."""
    ctx, encoding = context(), {**BY_X, "block": block}
    P = all_ways(encoding, ctx)
    for i, j, k in np.ndindex(4, 4, 4):
        np.testing.assert_allclose(P[j, k] @ P[i, j], P[i, k], atol=1e-10)
    order = np.arange(ctx.x.shape[1])
    order[[4, 6]] = 6, 4
    swapped = all_ways(encoding, ctx.replace(x=ctx.x[:, order]))
    changed = np.abs(swapped[2, 8] - P[2, 8]).max()
    assert changed < 1e-10 if block == 2 else changed > 1e-2
    still = all_ways(encoding, ctx.replace(x=np.broadcast_to(ctx.x[:, :1], ctx.x.shape)))
    np.testing.assert_allclose(still[1, 4], still[5, 8], atol=1e-10)  # shift invariance
    assert np.abs(P[1, 4] - P[5, 8]).max() > 1e-2


def test_reflections_mirror_and_pairs_turn(float64):
    ctx = context()
    for pairs in (False, True):
        P = all_ways({"name": "householder", "pairs": pairs}, ctx)
        site = np.arange(len(P))
        want = 1 if pairs else (-1.0) ** np.subtract.outer(site, site)
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
