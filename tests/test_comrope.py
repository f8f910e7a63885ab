"""The laws of ComRoPE's rotations in float64, each beside LieRE or another rotation that breaks it: the relative law,
the class token, starts, coordinates, perturbation; and errors of released code that must not come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import zoo
from jojax import encodings
from jojax.algebra.operators import plane_matrix
from jojax.encodings import Context
from jojax.encodings.ape_grid import ApeGrid
from jojax.encodings.frames import BlockFrame
from jojax.errors import UserError

DIMS = zoo.vit_dims(heads=4, kv_heads=2)
PLAIN = {"coord": "index", "cls_pos": "none"}
AP, LD = ({"name": "comrope", "partition": p, **PLAIN} for p in ("ap", "ld"))
LIERE = {"name": "liere", **PLAIN}
MIXED = {"name": "rope", "form": "mixed", "base": 10.0, "pairing": "interleaved", "learned": True}
RELATIVE = {
    "ap": AP,
    "ld": LD,
    "ld_4": LD | {"block": 4, "ld_theta": "shared"},
    "liere_2": LIERE | {"block": 2},
    "axial": MIXED | {"form": "axial", "base": 100.0, "learned": False},
    "mixed": MIXED,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def first_block(encoding, ctx):
    return encoding.journey(encoding.begin(None, ctx)[1], None, ctx)


def at(u, **more):
    return Context(position=jnp.asarray(u)[None], restart=None, segment=None, **more)


def made(options, scale=0.3, dims=DIMS, dtype="float64"):
    """An encoding and random parameters of it."""
    encoding = encodings.build(options, dims, dtype)(parent=None)
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), at(np.zeros((2, 2))), method=first_block))
    rng = np.random.default_rng(1)
    return encoding, jax.tree.map(lambda t: rng.normal(0, scale, t.shape), like.get("params", {}))


@functools.partial(jax.jit, static_argnums=0)
def frame_of(encoding, params, ctx):
    return encoding.apply({"params": params}, ctx, method=first_block).frame


def rotations(encoding, params, u):
    """[L, G, m, b, b] at coordinates u [L, 2]"""
    frame = frame_of(encoding, params, at(u))
    if isinstance(frame, BlockFrame):
        return np.asarray(frame.matrix[0])
    return np.asarray(plane_matrix(frame.angles, "interleaved")[0])[:, :, None]


def generators(encoding, params):
    return np.asarray(encoding.apply({"params": params}, method="group"))


def t(m):
    return np.swapaxes(m, -1, -2)


def largest(m):
    return np.abs(m).max()


def sites(seed=0, n=6):
    return np.random.default_rng(seed).uniform(size=(2, n, 2))


def relative_error(r, x, y):
    return largest(t(r(x)) @ r(y) - r(y - x))


@pytest.mark.parametrize("name", RELATIVE)
def test_the_relative_law_and_what_follows(name):
    encoding, params = made(RELATIVE[name])

    def r(u):
        return rotations(encoding, params, u)

    x, y = sites()
    assert relative_error(r, x, y) < 1e-12 and encoding.RELATIVE
    assert largest(r(x) @ r(y) - r(x + y)) < 1e-12
    assert largest(r(0 * x) - np.eye(r(x).shape[-1])) < 1e-14
    assert largest(r(-x) - t(r(x))) < 1e-13
    assert largest(t(r(x)) @ r(x) - np.eye(r(x).shape[-1])) < 1e-12
    assert largest(np.linalg.det(r(x)) - 1) < 1e-12
    assert largest(r(x) - r(y)) > 0.01


def test_generators_of_liere_do_not_commute_and_break_the_law():
    """Rotations they are; the error begins with −½[X, Y]; along a line the law holds."""
    encoding, params = made(LIERE)

    def r(u):
        return rotations(encoding, params, u)

    a, b = generators(encoding, params)
    assert largest(a @ b - b @ a) > 0.1 and not encoding.RELATIVE
    x, y = sites()
    assert relative_error(r, x, y) > 0.05
    assert largest(r(x) @ r(y) - r(x + y)) > 0.05
    assert largest(t(r(x)) @ r(x) - np.eye(8)) < 1e-12 and largest(np.linalg.det(r(x)) - 1) < 1e-12
    assert largest(r(-x) - t(r(x))) < 1e-13
    small, (X, Y) = 1e-4, (np.einsum("la,agmij->lgmij", u, np.stack([a, b])) for u in (x, y))
    error = (t(r(small * x)) @ r(small * y) - r(small * (y - x))) / small**2
    assert largest(error + (X @ Y - Y @ X) / 2) < 1e-3 * largest(error)
    line = np.array([0.3, -0.8])
    assert relative_error(r, x[:, :1] * line, y[:, :1] * line) < 1e-12


@pytest.mark.parametrize(("options", "limit"), [(AP, 0), (LD, 1e-14), (LIERE | {"block": 2}, 0)], ids=lambda v: str(v))
def test_generators_are_skew_and_commute(options, limit):
    a, b = generators(*made(options))
    assert largest(a + t(a)) == largest(b + t(b)) == 0
    assert largest(a @ b - b @ a) <= limit and largest(a) > 0.1


def test_a_cayley_transform_is_no_substitute_for_the_exponential():
    """Orthogonal, and angles 2 atan(sw/2) do not add."""
    a, b = generators(*made(AP))

    def cayley(u):
        m = np.einsum("la,agmij->lgmij", u, np.stack([a, b])) / 2
        return np.linalg.solve(np.eye(8) - m, np.eye(8) + m)

    x, y = (6 * u for u in sites())
    assert largest(t(cayley(x)) @ cayley(x) - np.eye(8)) < 1e-12
    assert relative_error(cayley, x, y) > 0.1


@pytest.mark.parametrize("name", [*RELATIVE, "liere"])
def test_scores_of_an_image_moved_as_a_whole(name):
    options = RELATIVE.get(name, LIERE)
    encoding, params = made(options)
    u = sites(n=9)[0]
    r = [rotations(encoding, params, u + offset) for offset in ((0, 0), (0.37, -1.9))]
    q, k = np.random.default_rng(3).normal(size=(2, *r[0].shape[:-1]))
    scores = [np.einsum("xgmji,xgmi,ygmjn,ygmn->gxy", m, q, m, k) for m in r]
    moved = largest(scores[1] - scores[0]) / largest(scores[0])
    assert moved > 0.1 if name == "liere" else moved < 1e-12


@pytest.mark.parametrize(
    ("options", "invariant"),
    [
        ({"name": "comrope"}, True),
        ({"name": "comrope", "partition": "ld", "coord": "index"}, True),
        (zoo.preset("rope_unit10k"), True),
        ({"name": "comrope", "cls_pos": "none"}, False),
        ({"name": "liere", "cls_pos": "center"}, False),
    ],
    ids=str,
)
def test_an_offset_moves_the_class_token_along_where_that_has_a_place(options, invariant):
    """Scores of patches with patches, and of the class token with them."""
    encoding, params = made(options)
    grid = np.concatenate([[[99.0, 99.0]], np.indices((2, 3)).reshape(2, -1).T])
    placed = jnp.arange(7)[None] > 0
    q, k = np.random.default_rng(3).normal(size=(2, 1, 7, 2, 16))

    def scores(offset):
        frame = frame_of(encoding, params, at(grid + offset, placed=placed)).where(placed)
        return np.einsum("xgd,ygd->gxy", frame.dual(q)[0], frame.apply(k)[0])

    moved = np.abs(scores((7.5, -3.25)) - scores((0, 0)))
    assert moved[:, 1:, 1:].max() > 1e-4 if options["name"] == "liere" else moved[:, 1:, 1:].max() < 1e-12
    assert moved.max() < 1e-12 if invariant else moved[:, 0, 1:].min() > 1e-6


def test_an_axis_turns_its_own_blocks():
    encoding, params = made(AP | {"block": 4})
    u = sites()[0]
    before, after = (rotations(encoding, params, v) for v in (u, u + np.array([0, 1])))
    np.testing.assert_array_equal(before[:, :, ::2], after[:, :, ::2])
    assert np.abs(before - after)[:, :, 1::2].max((0, 2, 3, 4)).min() > 0.01


# Starts


def start(encoding, ctx):
    return jax.jit(lambda: encoding.init(jax.random.key(0), ctx, method=first_block))()["params"]


@pytest.mark.parametrize("partition", ["ap", "ld"])
def test_a_zero_start_is_no_rotation_and_learns(partition):
    """P = 0 moves; θ after it. Both zero never would."""
    encoding = encodings.build({"name": "comrope", "partition": partition, "angle_init": "zero"}, DIMS)(parent=None)
    ctx = at(np.indices((4, 5)).reshape(2, -1).T.astype(float))
    params = start(encoding, ctx)
    weight = np.random.default_rng(0).normal(size=(20, 2, 2, 8, 8))

    @jax.jit
    @jax.grad
    def slopes(params):
        return (encoding.apply({"params": params}, ctx, method=first_block).frame.matrix * weight).sum()

    np.testing.assert_array_equal(rotations(encoding, params, ctx.position[0]), np.zeros_like(weight) + np.eye(8))
    slope = slopes(params)
    assert largest(slope["p"]) > 0.1 and np.isfinite(slope["p"]).all()
    assert largest(slope["p"] + t(slope["p"])) < 1e-12
    if partition == "ld":
        assert largest(slope["theta"]) == 0
        dead = slopes(jax.tree.map(np.zeros_like, params))
        assert max(map(largest, dead.values())) == 0


def test_the_spectrum_start_has_the_frequencies_of_rope_axial_and_mixed():
    """Radians an image: n · 100^(−4t/D) of an axis; 10^(−4t/D) a patch, in either half of the blocks."""
    found = {}
    for options in ({"name": "comrope"}, {"name": "comrope", "partition": "ld", "block": 4}):
        encoding = encodings.build(options | {"angle_init": "spectrum"}, DIMS, "float64")(parent=None)
        params = start(encoding, at(np.indices((4, 5)).reshape(2, -1).T))
        g = generators(encoding, params)
        found[options.get("partition")] = np.sort(np.linalg.eigvals(g).imag, -1)[..., ::-1]  # [A, G, m, b]
    axial, mixed = found[None][..., :4], found["ld"]
    for axis, n in enumerate((4, 5)):
        np.testing.assert_allclose(axial[axis, :, axis], np.tile(n * 100.0 ** -(np.arange(4) / 4), (2, 1)), rtol=1e-6)
    length = np.sqrt(((mixed[..., :2] / np.array([4, 5])[:, None, None, None]) ** 2).sum(0))  # [G, m, b/2]
    want = 10.0 ** -(np.arange(4).reshape(2, 2) / 4)
    np.testing.assert_allclose(length, np.tile(want, (2, 2, 1)), rtol=1e-6)


# Coordinates


def places(coord, n, trained, **more):
    grid = (n, n + 1)
    options = {"name": "rope", "form": "axial", "pairing": "interleaved", "coord": coord, **more}
    encoding = encodings.build(options, zoo.vit_dims(grid=(trained, trained)), "float64")(parent=None)
    position = np.indices(grid).reshape(2, -1).T.astype(float)
    return np.asarray(encoding.apply({}, None, at(position), method="places")[0]).reshape(*grid, 2)


def test_coordinates():
    """A patch of 14 stands at its centre; the centre of two of 28 is that of one of 14; ranges of each scale."""
    coarse, fine = places("unit_center", 14, 14), places("unit_center", 28, 14)
    assert coarse[0, 0] == pytest.approx([0.5 / 14, 0.5 / 15])
    np.testing.assert_allclose((fine[0::2, 0, 0] + fine[1::2, 0, 0]) / 2, coarse[:, 0, 0], atol=1e-15)
    for coord, row in (("train_prop_linspace", (0, 24 / 14)), ("train_prop", (0, 23 / 14)), ("index", (0, 23))):
        u = places(coord, 24, 14)
        assert (u[0, 0, 0], u[-1, 0, 0]) == pytest.approx(row)
        np.testing.assert_allclose(np.diff(u[:, 3, 0], 2), 0, atol=1e-12)
    assert largest(places("train_prop", 14, 14) - places("train_prop", 24, 14)[:14, :15]) < 1e-15  # steps stay
    assert largest(coarse - places("unit_center", 24, 14)[:14, :15]) > 0.1  # these shrink


@pytest.mark.parametrize(
    ("options", "std", "border"),
    [({}, 0.359, 0.317), (dict(perturb_scale=1.0), 0.431, 0.617), (dict(perturb_mode="truncnorm"), 0.27, 0.0)],
    ids=["code", "clamped", "inside"],
)
def test_perturbation_stays_inside_the_patch(options, std, border):
    options = {"name": "comrope", "perturb_sigma": 1.0, "perturb_per_sample": True} | options
    encoding = encodings.build(options, zoo.vit_dims(), "float64")(parent=None)
    ctx = Context(position=np.zeros((40, 501, 2)), restart=None, segment=None, train=True)
    ctx = ctx.replace(placed=np.broadcast_to(np.arange(501) > 0, (40, 501)))

    def noise(encoding, ctx, seed):
        return np.asarray(encoding.apply({}, ctx, method="noise", rngs={"encoding": jax.random.key(seed)}))

    drawn = noise(encoding, ctx, 0)
    assert largest(drawn) <= 0.5 and not drawn[:, 0].any() and drawn[:, 1:].all()
    assert drawn[:, 1:].std() == pytest.approx(std, abs=0.005)
    assert (np.abs(drawn[:, 1:]) == 0.5).mean() == pytest.approx(border, abs=0.01)
    np.testing.assert_array_equal(drawn, noise(encoding, ctx, 0))
    assert largest(drawn - noise(encoding, ctx, 1)) > 0.1 and largest(drawn[0] - drawn[1]) > 0.1
    assert noise(encoding.clone(perturb_per_sample=False), ctx, 0).shape == (1, 501, 2)
    assert encoding.apply({}, ctx.replace(train=False), method="noise") is None


def test_angles_stay_float32_under_bfloat16():
    u = 20 * sites()[0].astype("float32")
    for options in (AP, LD, LIERE):
        wide, narrow = (made(options, dtype=dtype) for dtype in ("float64", "bfloat16"))
        got = rotations(narrow[0], jax.tree.map(np.float32, narrow[1]), u)
        want = rotations(*wide, u.astype(float))
        assert got.dtype == np.float32 and largest(got - want) < 2e-4
        rough = rotations(*wide, np.asarray(jnp.asarray(u, jnp.bfloat16), float))
        assert largest(rough - want) > 0.02


# What released code got wrong


def sees(encoding_class):
    """How far embeddings differ along (rows, columns)."""
    encoding = encoding_class(zoo.vit_dims(), dtype="float64", parent=None)
    table = np.random.default_rng(0).normal(size=(4, 5, 20))
    position = np.indices((4, 5)).reshape(2, -1).T.astype(float)
    added = encoding.apply({"params": {"table": table}}, jnp.zeros((1, 20, 20)), at(position), method="begin")[0]
    added = np.asarray(added).reshape(4, 5, 20)
    return added - table, largest(np.diff(added, axis=0)), largest(np.diff(added, axis=1))


class Blind(ApeGrid):
    """Reads (middle, row), as the released code does."""

    def places(self, noise, ctx):
        u, token = super().places(noise, ctx)
        return jnp.stack([jnp.full_like(u[..., 0], 0.5), u[..., 0]], -1), token


def test_a_table_depends_on_rows_and_columns():
    error, rows, columns = sees(ApeGrid)
    assert largest(error) < 1e-12 and min(rows, columns) > 0.1  # at the training grid it is its cells
    error, rows, columns = sees(Blind)
    assert largest(error) > 0.1 and columns == 0 < rows


def test_every_layer_has_its_own_liere_generators():
    """Released code hands the first layer's to all, so that those of the others never learn. (That all of them learn
    here is in test_formulas_vit.py: no dead parameter.)"""
    image = np.zeros((1, 4, 9, 3))
    model = zoo.vit_of({"name": "liere"}, dims=(("depth", 2), ("grid", (2, 3))))
    u = jax.jit(model.init)(jax.random.key(0), image)["params"]["blocks"]["encoding"]["u"]
    shared = zoo.vit_of({"name": "liere", "share_layers": True}, dims=(("depth", 2), ("grid", (2, 3))))
    shapes = jax.eval_shape(shared.init, jax.random.key(0), image)["params"]
    assert u.shape == (2, 2, 3, 2, 8, 8) and u.min() >= 0 and 6 < u.max() < 2 * np.pi
    assert largest(u[0] - u[1]) > 0.1
    assert shapes["encoding"]["u"].shape == u.shape[1:] and "encoding" not in shapes["blocks"]


def test_starts_of_liere():
    """The published one turns by many radians over an image, the re-implementation's by about a tenth; zero by none."""
    started = {}
    for start in ("uniform", "normal", "zero"):
        model = zoo.vit_of({"name": "liere", "angle_init": start, "triangle": start == "uniform"}, dims=(("depth", 1),))
        u = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4, 9, 3)))["params"]["blocks"]["encoding"]["u"]
        u = np.triu(u, 1) if start == "uniform" else np.asarray(u)
        started[start] = np.abs(np.linalg.eigvals(u - u.swapaxes(-1, -2))).max(-1)
    assert 13 < started["uniform"].mean() < 20
    assert 0.07 < started["normal"].mean() < 0.12 and not started["zero"].any()
    with pytest.raises(UserError, match=r"init_scale = 1\.0 does nothing here: it is for angle_init = 'uniform'"):
        encodings.build({"name": "liere", "angle_init": "zero", "init_scale": 1.0}, zoo.vit_dims())


@pytest.mark.parametrize(
    ("options", "dims", "words"),
    [
        (
            {"name": "comrope"},
            zoo.vit_dims(head_dim=24),
            "block = 8 with partition = 'ap': .*head_dim = 24 divisible by 16",
        ),
        ({"name": "comrope", "partition": "ld"}, zoo.vit_dims(head_dim=12), "head_dim = 12 divisible by 8"),
        ({"name": "comrope", "block": 1}, zoo.vit_dims(), "needs blocks of 2 or more"),
        ({"name": "liere"}, zoo.vit_dims(head_dim=12), "block = 8: needs blocks of 2 or more that divide"),
        (zoo.preset("rope_unit10k"), zoo.vit_dims(head_dim=6), "head_dim = 6 divisible by 4"),
        ({"name": "ape_grid"}, zoo.lm_dims(), "a table over an image"),
        ({"name": "ape_grid", "coord": "index"}, zoo.vit_dims(), "coord = 'index': choose from unit_center"),
        ({"name": "comrope"}, zoo.lm_dims(head_dim=16), "are for images; text counts its sites"),
        ({"name": "comrope", "ld_theta": "shared"}, zoo.vit_dims(), "ld_theta = 'shared' does nothing here"),
        ({"name": "liere", "perturb_scale": 1.0}, zoo.vit_dims(), "it is for perturb_sigma above 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, dims, words):
    with pytest.raises(UserError, match=words):
        encodings.build(options, dims)


def test_a_dense_exponential():
    """One block as wide as the head is scipy's exponential of the sum."""
    encoding, params = made(LIERE | {"block": 16})
    u = sites()[0]
    a = generators(encoding, params)[:, :, 0]
    want = [[scipy.linalg.expm(np.tensordot(site, a[:, g], 1)) for g in (0, 1)] for site in u]
    np.testing.assert_allclose(rotations(encoding, params, u)[:, :, 0], want, atol=1e-12)
