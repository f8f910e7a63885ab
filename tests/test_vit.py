"""The vision transformer: class token, grids that are not square, offsets, value travel, drop-path, switches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax.encodings import absolute
from jojax.errors import UserError
from jojax.models.block import Block

B = 3
SHAPE = (B, 4 * 2, 5 * 3, 3)  # a grid of 4 × 5 patches of 2 × 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def image(seed=0, shape=SHAPE):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def made(name, noise=0.3, **options):
    model = zoo.vit(name, **options)
    params = jax.jit(model.init)(jax.random.key(1), image())["params"]
    params = jax.tree.map(lambda t: t.astype("float64"), params)
    return model, zoo.noisy(params, noise) if noise else params


def logits(model, params, x, **kw):
    return np.asarray(jax.jit(lambda p, x: model.apply({"params": p}, x, **kw))(params, x))


@pytest.mark.slow
def test_order_matters():
    """Columns of patches moved round: another answer. NoPE in an encoder cannot tell."""
    moved = jnp.roll(image(), 3, axis=2)  # no mirror image: distances are alike in one
    for name, blind in (("rope_axial", False), ("none", True)):
        model, params = made(name)
        far = np.abs(logits(model, params, image()) - logits(model, params, moved)).max()
        assert far < 1e-10 if blind else far > 1e-4


@pytest.mark.parametrize("pool", zoo.some(["cls", "mean"], 2))
def test_value_rotation_is_another_model(pool):
    """Rotated values with both ways of pooling; transport 'none' is NoPE."""
    switches = (("pool", pool),)
    _, params = made("rope_axial", model=switches)
    outs = [
        logits(zoo.vit(n, model=switches), params, image())
        for n in ("rope_axial", "rope_axial_qkv", "rope_axial_v", "none")
    ]
    for i in range(4):
        for j in range(i):
            assert np.abs(outs[i] - outs[j]).max() > 1e-4


def test_axial_and_mixed_frames_are_the_formulas():
    """Angles of the published forms on the grid, y planes then x planes; mixed: y cos φ + x sin φ."""
    from jojax.encodings import Context, build

    y, x = np.mgrid[:4, :5].reshape(2, -1)
    position = jnp.asarray(np.stack([y, x], -1)[None], "float64")
    ctx = Context(position=position, restart=None, segment=None)
    dims = zoo.vit("none").spec.dims  # heads of width 16: 8 planes, 3 key heads

    def angles(name):
        encoding = build(zoo.preset(name), dims, "float64")()
        return encoding.apply({}, None, None, ctx, method="journey").frame.angles[0]

    omega = 100.0 ** -(np.arange(4) / 4)
    want = np.concatenate([y[:, None] * omega, x[:, None] * omega], -1)
    np.testing.assert_allclose(angles("rope_axial")[:, 0], want, atol=1e-12)
    magnitude = 10.0 ** -(np.arange(4) / 4)
    phi = np.pi * (np.arange(3)[:, None] + 0.5) / 3  # [G, 1]
    first = (y[:, None, None] * np.cos(phi) + x[:, None, None] * np.sin(phi)) * magnitude
    second = (-y[:, None, None] * np.sin(phi) + x[:, None, None] * np.cos(phi)) * magnitude
    np.testing.assert_allclose(angles("rope_mixed_fixed"), np.concatenate([first, second], -1), atol=1e-12)


def test_a_learned_table_fits_another_grid_by_resizing():
    _, params = made("learned")
    other = zoo.vit("learned", dims=(("grid", (6, 4)),))
    fitted = {**params, "encoding": absolute.resize(params["encoding"], (4, 5), (6, 4))}
    assert logits(other, fitted, image(shape=(B, 12, 12, 3))).shape == (B, 7)
    same = absolute.resize(params["encoding"], (4, 5), (4, 5))
    np.testing.assert_allclose(same["table"], params["encoding"]["table"], atol=1e-12)
    with pytest.raises(ValueError, match="zip"):
        absolute.resize(params["encoding"], (4, 5), (20,))


def test_tables_are_resized_by_cubic_convolution_without_anti_aliasing():
    """Weights by hand, a = −3/4: halves and quarters of a step between two sites; both axes, edges repeated."""
    quarter = np.array([-0.10546875, 0.87890625, 0.26171875, -0.03515625])
    half = np.array([-0.09375, 0.59375, 0.59375, -0.09375])
    np.testing.assert_allclose(absolute.cubic(8, 16)[7], [0, 0, *quarter, 0, 0], atol=1e-15)
    np.testing.assert_allclose(absolute.cubic(8, 4)[1], [0, *half, 0, 0, 0], atol=1e-15)  # half of the sites count
    np.testing.assert_allclose(absolute.cubic(8, 4)[0], [half[:2].sum(), *half[2:], 0, 0, 0, 0, 0], atol=1e-15)
    point = np.zeros((8, 6, 2))
    point[3, 2, 1] = 1
    other = absolute.resize({"table": jnp.asarray(point.reshape(48, 2))}, (8, 6), (16, 3))["table"]
    want = np.outer(absolute.cubic(8, 16)[:, 3], absolute.cubic(6, 3)[:, 2])
    np.testing.assert_allclose(other.reshape(16, 3, 2)[..., 1], want, atol=1e-12)
    assert not other[:, 0].any()


@pytest.mark.slow
def test_scan_unrolled_remat_and_chunked_are_equal():
    x, results = image(), []
    _, params = made("rope_mixed_qkv")
    for switches, attention in (((), "xla"), ((("scan", False),), "xla"), ((("remat", True),), "chunked")):
        model = zoo.vit("rope_mixed_qkv", model=switches, attention=attention)
        loss = jax.jit(jax.value_and_grad(lambda p, m=model: (m.apply({"params": p}, x) ** 2).sum()))
        results.append(loss(params))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), results[0], other)


def test_drop_path_leaves_whole_branches_out_in_training_only():
    model, params = made("none", model=(("drop_path", 0.9),))
    plain = zoo.vit("none")
    np.testing.assert_array_equal(logits(model, params, image()), logits(plain, params, image()))

    def train(seed):
        return np.asarray(zoo.run(model, params, image(), train=True, rngs={"dropout": jax.random.key(seed)}))

    assert np.abs(train(0) - train(1)).max() > 1e-4
    np.testing.assert_array_equal(train(0), train(0))


def test_layer_scale_is_a_gain_in_the_output_projections():
    """And starts where it is told to; a gain a block and channel."""
    model, params = made("rope_axial_qkv", layer_scale=0.25)
    start = jax.jit(model.init)(jax.random.key(1), image())["params"]["blocks"]
    blocks = dict(params["blocks"])
    for branch, out in (("mixer", "out"), ("mlp", "mlp_out")):
        gain = blocks.pop(f"layer_scale_{branch}")
        assert (start[f"layer_scale_{branch}"] == 0.25).all() and gain.shape == (3, 20)
        kernel, bias = blocks[out]["kernel"], blocks[out]["bias"]
        blocks[out] = {"kernel": kernel * gain.reshape(3, *[1] * (kernel.ndim - 2), 20), "bias": bias * gain}
    folded = logits(zoo.vit("rope_axial_qkv"), {**params, "blocks": blocks}, image())
    np.testing.assert_allclose(logits(model, params, image()), folded, rtol=1e-9, atol=1e-10)


def test_dropped_branches_keep_their_mean():
    """Kept with probability 1 − rate and then divided by it, an example at a time; rates rise linearly over depth."""
    x = jnp.ones((4000, 2, 3))
    block = Block(zoo.vit("none").spec, None)
    out = block.apply({}, x, 0.3, True, method=Block.drop, rngs={"dropout": jax.random.key(0)})
    kept = np.asarray(out[:, 0, 0])
    assert (np.asarray(out) == kept[:, None, None]).all() and abs((kept > 0).mean() - 0.7) < 0.02
    np.testing.assert_allclose(kept[kept > 0], 1 / 0.7, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    zoo.some([{"qk_norm": "after"}, {"norm": "rmsnorm", "mlp": "swiglu", "bias": False}, {"qk_norm": "before"}]),
)
def test_block_switches(options):
    model, params = made("rope_axial_qkv", model=(("pool", "mean"),), **options)
    names = {p[-1].key for p, _ in jax.tree_util.tree_flatten_with_path(params["blocks"])[0]}
    assert ("bias" in names) == options.get("bias", True)
    assert ("norm_q" in params["blocks"]) == ("qk_norm" in options)
    base, moved = (logits(model, params, image(), offset=o) for o in ((0.0, 0.0), (3.0, 3.0)))
    # a gain for each channel after the rotation breaks the relative law, before it does not
    broken = options.get("qk_norm") == "after"
    assert (np.abs(base - moved).max() > 1e-6) == broken


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made("rope_axial", dims=(("head_dim", 6),)), "head_dim = 6 divisible by 4"),
        (lambda: made("rope_mixed", dims=(("head_dim", 6),)), "head_dim = 6 divisible by 4"),
        (lambda: made("rope_axial", dims=(("head_dim", 5),)), "head_dim = 5"),
        (lambda: made("rope", dims=()), "coordinates, which have 2 axes"),
        (lambda: made("alibi"), "causal model"),
        (lambda: made("sincos2d", dims=(("width", 18),)), "model.width = 18: sincos2d needs a multiple of 4"),
        (lambda: made("none", dims=(("kv_heads", 4),)), "model.kv_heads = 4 must divide model.heads = 6"),
        (lambda: made("none", mlp="relu"), "model.mlp = 'relu': choose from gelu, swiglu"),
        (lambda: made("none", model=(("pool", "max"),)), "model.pool = 'max'"),
    ],
)
def test_sizes_and_names_that_do_not_fit_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_an_image_of_no_whole_patches_is_refused():
    model, params = made("none")
    with pytest.raises(UserError, match="9×15 has no whole number of 2×3 patches"):
        model.apply({"params": params}, image(shape=(B, 9, 15, 3)))
