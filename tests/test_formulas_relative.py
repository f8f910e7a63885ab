"""Biases of a pair against plain loops in float64: buckets, kernels, the MLP, tables and distances on grids; both
attention implementations; the parameters that learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

import test_formulas_vit as images
import zoo
from jojax import encodings, evaluate
from jojax.encodings import relative
from jojax.models import attention
from test_formulas import EYE, H, L, compare, logits, model_and_params, nope

FAR = np.array([0, 1, 2, 5, 17, 19, 40, 90, 130, 131, 600])  # positions with all kinds of distances
SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])  # of six heads


def softplus(x):
    return np.log1p(np.exp(x))


def bucket_of(d, buckets, furthest):
    """Of a distance, in logarithms as the paper's text has it."""
    exact = buckets // 2
    if d < exact:
        return d
    grown = exact + int(np.log(d / exact) / np.log(furthest / exact) * (buckets - exact) + 1e-9)
    return min(grown, buckets - 1)


def t5(p, d, at, h, buckets=32, furthest=128):
    return p["table"][bucket_of(d, buckets, furthest), h]


def kerple_log(p, d, at, h):
    return -softplus(p["r1"][h]) * np.log(1 + softplus(p["r2"][h]) * d)


def kerple_power(p, d, at, h):
    return -softplus(p["r1"][h]) * d ** (2 / (1 + np.exp(-p["r2"][h])))


def fire(p, d, at, h, start=512.0):
    def psi(x):
        return np.log(abs(p["c"]) * x + 1)

    x = psi(d) / (psi(max(abs(p["threshold"]) * start, at)) + 1e-6)
    return np.maximum(x * p["mlp_in"] + p["mlp_bias"], 0) @ p["mlp_out"][:, h]


def encode(of_pair, shared=None):
    """shared: the parameters of all blocks."""

    def of_block(layer, p, h, x, before):
        bias = np.zeros((H, L, L))
        for head, t, j in np.ndindex(H, L, L):
            bias[head, t, j] = of_pair(shared or p, max(FAR[t] - FAR[j], 0), FAR[t], head)
        return EYE, None, bias

    return of_block


CASES = {
    "t5": ({}, t5, lambda *a: t5(*a, furthest=64)),
    "t5_few": ({"buckets": 6, "max_distance": 40}, lambda *a: t5(*a, 6, 40), lambda *a: t5(*a, 6, 128)),
    "t5_shared": ({"share_layers": True}, t5, kerple_log),
    "kerple": ({"kind": "kerple"}, kerple_log, kerple_power),
    "kerple_power": ({"kind": "kerple", "kernel": "power"}, kerple_power, kerple_log),
    "fire": ({"kind": "fire"}, fire, lambda p, d, at, h: fire(p, d, 0, h)),
    "fire_early": (
        {"kind": "fire", "threshold": 8.0, "hidden": 5},
        lambda *a: fire(*a, 8.0),
        fire,
    ),
}


@pytest.mark.parametrize("case", zoo.some(CASES))
def test_text(case):
    options, right, wrong = CASES[case]
    if case == "t5_shared":  # in the place of kernels, which have other parameters: the first block's bias alone
        wrong = lambda p, d, at, h: t5(p, d, at, h) * (at < 100)  # noqa: E731
    model, params = model_and_params({"name": "relative", **options})
    shared = params.get("encoding")
    got = logits(model, params, position=jnp.asarray(FAR)[None])
    compare(got, params, encode(right, shared), nope, encode(wrong, shared))


def test_t5_buckets_by_hand():
    """Where buckets begin, 32 of them to 128 and sixteen a direction; powers of √2 on the edge do not depend on how
    logarithms are rounded."""
    starts = [19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert list(relative.bucket_bounds(32, 128)) == [*range(1, 17), *starts]
    assert list(relative.bucket_bounds(16, 128)) == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]
    for buckets, furthest in ((32, 128), (16, 128), (7, 50), (2, 9)):
        bounds = np.array(relative.bucket_bounds(buckets, furthest))
        assert [(bounds <= d).sum() for d in range(200)] == [bucket_of(d, buckets, furthest) for d in range(200)]


def biases(options, position, params, dims=None, dtype="float64"):
    """[H, L, L] of an encoding alone, in an encoder unless dims say otherwise; position [L, A]."""
    dims = dims or zoo.lm_dims(axes=position.shape[1], causal=False)
    with jax.enable_x64(dtype == "float64"):
        encoding = encodings.build({"name": "relative", **options}, dims, dtype)(parent=None)
        ctx = encodings.Context(position=jnp.asarray(position, dtype)[None], restart=None, segment=None)
        edge = encoding.apply({"params": params}, None, None, ctx, method="journey").edge
        return np.asarray(edge.step(None, edge.query, edge.key, None, edge.weights)[0][0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_t5_in_an_encoder_has_buckets_for_each_direction(dtype):
    """Literally: sixteen for keys before the query, sixteen for those after it."""
    got = biases({}, FAR[:, None], {"table": np.arange(32.0)[:, None] * np.ones(6)}, dtype=dtype)[0]
    assert got[0].tolist() == [0, 17, 18, 21, 26, 26, 28, 30, 31, 31, 31]
    assert got[:, 0].tolist() == [0, 1, 2, 5, 10, 10, 12, 14, 15, 15, 15]


def test_known_values():
    at, ones = np.array([[0.0], [6.0], [100.0], [600.0]]), np.ones(6)
    raw = {"r1": np.log(np.expm1(2)) * ones, "r2": np.log(np.expm1(0.5)) * ones}
    np.testing.assert_allclose(biases({"kind": "kerple"}, at, raw)[3, 1, 0], -2 * np.log(4), rtol=1e-12)
    raw["r2"] = np.log(3) * ones  # a power of 3/2
    np.testing.assert_allclose(biases({"kind": "kerple", "kernel": "power"}, at, raw)[0, 2, 0], -2000, rtol=1e-12)
    mlp = {"mlp_in": np.ones(1), "mlp_bias": np.zeros(1), "mlp_out": ones[None]}
    got = biases({"kind": "fire", "hidden": 1}, at, {"c": np.float64(0.1), "threshold": np.float64(1), **mlp})[0]
    np.testing.assert_allclose(got[3, 2], 3.9318256 / 4.1108739, rtol=1e-6)  # ln 51 / ln 61
    np.testing.assert_allclose(got[2, 0], 2.3978953 / 3.9550825, rtol=1e-6)  # ln 11 / ln 52.2


def test_fire_depends_on_where_the_query_stands_beyond_its_threshold_alone():
    at, rng = np.arange(5.0)[:, None], np.random.default_rng(0)
    mlp = {"mlp_in": rng.normal(size=32), "mlp_bias": rng.normal(size=32), "mlp_out": rng.normal(size=(32, 6))}

    def change(first, second):
        a, b = (
            biases({"kind": "fire"}, at + s, {"c": np.float64(0.1), "threshold": np.float64(0.5), **mlp})
            for s in (first, second)
        )
        return np.abs(a - b).max()

    assert change(0, 250) < 1e-12 and change(250, 400) > 1e-3  # half of 512


# On grids


def grid_pairs(pool):
    """(displacement of query and key, indices) of all pairs of patches."""
    at, first = images.places(pool).T, int(pool == "cls")
    for t, j in np.ndindex(len(at), len(at)):
        yield at[t] - at[j], (t + first, j + first)


def encode_grid(pool, of_pair):
    def of_block(layer, p, h, x, before):
        bias = np.zeros((6, len(h), len(h)))  # the class token's stays 0
        for far, (t, j) in grid_pairs(pool):
            bias[:, t, j] = of_pair(p, far)
        return images.nope(layer, p, h, x, before)[0], None, bias

    return of_block


def table_entry(grid, swap=False):
    (h, w), sign = grid, -1 if swap else 1
    return lambda p, far: p["table"].reshape(2 * h - 1, 2 * w - 1, 6)[sign * far[0] + h - 1, sign * far[1] + w - 1]


GRIDS = {
    "table": ({"kind": "table"}, "cls", lambda pool: table_entry(images.GRIDS[pool])),
    "table_mean": ({"kind": "table"}, "mean", lambda pool: table_entry(images.GRIDS[pool])),
    "alibi": ({"kind": "alibi"}, "cls", lambda pool: lambda p, far: -SLOPES * np.abs(far).sum()),
    "euclid": ({"kind": "alibi", "norm": "l2"}, "mean", lambda pool: lambda p, far: -SLOPES * np.hypot(*far)),
}


@pytest.mark.parametrize("case", zoo.some(GRIDS))
def test_images(case):
    options, pool, right = GRIDS[case]
    model, params = images.model_and_params({"name": "relative", **options}, pool)
    got = images.logits(model, params, offset=(2.5, -1))
    np.testing.assert_allclose(got, images.formula(params, encode_grid(pool, right(pool))), atol=1e-10)
    if "table" in case:
        wrong = table_entry(images.GRIDS[pool], swap=True)
    else:
        wrong = GRIDS["euclid" if case == "alibi" else "alibi"][2](pool)
    for other in (images.nope, encode_grid(pool, wrong)):
        assert np.abs(got - images.formula(params, other)).max() > 1e-5


def test_alibi_on_three_axes_and_in_a_text_encoder():
    at = np.random.default_rng(0).integers(0, 5, (7, 3)).astype(float)
    far = at[:, None] - at
    for norm, order in (("l1", 1), ("l2", 2)):
        want = -SLOPES[:, None, None] * np.linalg.norm(far, order, axis=-1)
        np.testing.assert_allclose(biases({"kind": "alibi", "norm": norm}, at, {}), want, atol=1e-12)
        text = -SLOPES[:, None, None] * np.abs(far[..., 0])
        np.testing.assert_allclose(biases({"kind": "alibi", "norm": norm}, at[:, :1], {}), text, atol=1e-12)


def test_a_table_is_resized_block_by_block():
    """Bicubic, (2·4 − 1) × (2·5 − 1) to (2·6 − 1) × (2·5 − 1): the pair of a patch with itself keeps its entry."""
    old, new = (4, 5), (6, 5)
    tables = np.random.default_rng(0).normal(size=(3, 7 * 9, 2))
    config = evaluate.ConfigDict({"encoding": {"name": "relative"}})
    with jax.enable_x64(True):
        params = {"blocks": {"encoding": {"table": jnp.asarray(tables)}, "key": 1}, "head": 2}
        fitted = evaluate.resized(config, params, old, new)
        alone = relative.resize({"table": jnp.asarray(tables[1])}, old, new)["table"]
        assert relative.resize({"c": 1}, old, new) == {"c": 1}
    got = fitted["blocks"]["encoding"]["table"]
    assert got.shape == (3, 11 * 9, 2) and fitted["head"] == 2 and fitted["blocks"]["key"] == 1
    np.testing.assert_array_equal(got[1], alone)
    np.testing.assert_allclose(got[:, 5 * 9 : 6 * 9], tables[:, 3 * 9 : 4 * 9], atol=1e-12)  # Δy = 0
    ramp = np.broadcast_to(np.arange(7.0)[:, None, None], (7, 9, 1)).reshape(-1, 1)
    with jax.enable_x64(True):
        line = relative.resize({"table": jnp.asarray(ramp)}, old, new)["table"].reshape(11, 9)[:, 4]
    where = (np.arange(11) + 0.5) * 7 / 11 - 0.5
    linear = scipy.ndimage.map_coordinates(np.arange(7.0), [where], order=1, mode="nearest")
    np.testing.assert_allclose(line[3:8], linear[3:8], atol=0.1)  # a ramp stays one; a = −3/4 bends it a little


# Both implementations, and what learns


KINDS = [
    {"kind": "t5", "buckets": 8, "max_distance": 12},
    {"kind": "kerple", "kernel": "power"},
    {"kind": "fire", "threshold": 6.0, "hidden": 4},
    {"kind": "table"},
]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values())))
def test_chunked_equals_xla_and_every_parameter_learns(options):
    rng, B, n = np.random.default_rng(0), 2, 12
    image = options["kind"] == "table"
    dims = zoo.vit_dims(grid=(3, 4)) if image else zoo.lm_dims()
    position = (
        np.indices((3, 4)).reshape(2, -1).T[None] if image else np.stack([np.arange(n), np.arange(n) + 40])[..., None]
    )
    with jax.enable_x64(True):
        ctx = encodings.Context(position=jnp.asarray(position, float), restart=None, segment=None)
        encoding = encodings.build({"name": "relative", **options}, dims, "float64")(parent=None)
        like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), None, None, ctx, method="journey"))["params"]
        params = zoo.noisy(jax.tree.map(lambda t: np.zeros(t.shape), like), 1.0)
        q, k, v = (jnp.asarray(rng.normal(size=(B, n, 3, *rest))) for rest in ((2, 4), (4,), (4,)))
        sites = attention.Sites(jnp.arange(n), None)

        def loss(params, function, **more):
            edge = encoding.apply({"params": params}, None, None, ctx, method="journey").edge
            causal = dict(causal=dims.causal, scale=0.5)
            out = function(q, k, v, sites, sites, **causal, edge=edge, edge_key=edge.key, **more)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        value = jax.jit(jax.value_and_grad(loss), static_argnames=("function", "block"))
        want, grads = value(params, attention.xla)
        got, other = value(params, attention.chunked, block=5)
        np.testing.assert_allclose(got, want, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), other, grads)
    for name, g in grads.items():
        assert np.isfinite(g).all() and np.abs(g).max() > 1e-4, name


def test_an_mlp_of_pairs_takes_linear_memory_in_chunks():
    """Backwards too: eight times the length takes about eight times as much, not sixty-four."""
    encoding = encodings.build({"name": "relative", "kind": "fire", "hidden": 8}, zoo.lm_dims())(parent=None)

    def temporaries(n):
        ctx = encodings.Context(position=jnp.zeros((1, n, 1)), restart=None, segment=None)
        shapes = jax.eval_shape(lambda: encoding.init(jax.random.key(0), None, None, ctx, method="journey"))
        q, k = (jax.ShapeDtypeStruct((1, n, 3, *rest), "float32") for rest in ((2, 4), (4,)))
        sites = attention.Sites(jnp.arange(n), None)

        def loss(params, q, k):
            edge = encoding.apply(params, None, None, ctx, method="journey").edge
            more = dict(causal=True, scale=0.5, edge=edge, edge_key=edge.key, block=128)
            return attention.chunked(q, k, k, sites, sites, **more).sum()

        return jax.jit(jax.grad(loss)).lower(shapes, q, k).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(8192)
    assert long < 12 * short, (short, long)


@pytest.mark.parametrize(
    ("options", "dims", "words"),
    [
        ({"kind": "t5"}, zoo.vit_dims(), r"kind = 't5' has one axis: for images use table or alibi"),
        ({"kind": "table"}, zoo.lm_dims(), r"kind = 'table' is for images: for text use t5, kerple or fire"),
        ({"buckets": 7}, zoo.lm_dims(), r"buckets = 7 with max_distance = 128: needs an even number"),
        ({"max_distance": 16}, zoo.lm_dims(), r"a distance beyond the 16 that have a bucket each"),
        ({"kind": "fire", "hidden": 0}, zoo.lm_dims(), r"encoding\.hidden needs 1 unit or more"),
        ({"kind": "alibi", "share_layers": True}, zoo.lm_dims(), r"share_layers = True does nothing here"),
        ({"kind": "fire", "norm": "l2"}, zoo.lm_dims(), r"norm = 'l2' does nothing here: it is for kind = 'alibi'"),
    ],
)
def test_refused(options, dims, words):
    with pytest.raises(encodings.base.UserError, match=words):
        encodings.build({"name": "relative", **options}, dims)
