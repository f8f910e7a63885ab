"""Frames on two and three axes: RoPE and GRAPE-M against matrix exponentials in float64; the relative law, and that it
fails where planes overlap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import test_formulas_vit as images
import zoo
from jojax import encodings
from jojax.errors import UserError
from test_formulas_grape import turns

CUBE = zoo.vit_dims(axes=3, grid=(2, 3, 4), head_dim=12)
D, G = 12, 3
FREQ, BASIS = {"name": "grape_m"}, {"name": "grape_m", "kind": "basis"}
MIXED = {"form": "mixed", "base": 10.0}
AXIAL = {"name": "rope", "form": "axial", "base": 100.0}


def frames(options, position, params, dims=CUBE):
    """A [L, G, D, D] of an encoding alone."""
    with jax.enable_x64(True):
        encoding = encodings.build(options, dims, "float64")(parent=None)
        ctx = encodings.Context(position=jnp.asarray(position, float)[None], restart=None, segment=None)
        frame = encoding.apply({"params": params}, None, None, ctx, method="journey").frame
        like = (1, len(position), dims.kv_heads, dims.head_dim)
        units = np.eye(dims.head_dim)
        return np.stack([np.asarray(frame.apply(jnp.asarray(np.broadcast_to(e, like))))[0] for e in units], -1)


def drawn(options, dims=CUBE, seed=0):
    encoding = encodings.build(options, dims)(parent=None)
    ctx = encodings.Context(position=jnp.zeros((1, 2, dims.axes)), restart=None, segment=None)
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), None, None, ctx, method="journey"))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda t: rng.normal(0, 0.5, t.shape), like.get("params", {}))


def generators(options, p, g, axes=3, size=D):
    """L of each axis for a key head."""
    planes = size // 2
    if options.get("form") == "mixed":
        theta = p["freq"][:, g if options.get("per_head") else 0]
    else:
        log = p["log_freq"][g if options.get("per_head") else 0] / 16
        own = np.arange(planes) // (planes // axes)
        theta = np.array([np.where(own == axis, np.exp(log), 0) for axis in range(axes)])
    if options["kind"] == "basis":
        s = p["cayley"][g] - p["cayley"][g].T
        order, basis = np.arange(size), (np.eye(size) - s) @ np.linalg.inv(np.eye(size) + s)
    else:  # half: planes (i, i + D/2)
        order, basis = np.arange(size).reshape(2, planes).T.ravel(), np.eye(size)
    out = np.zeros((axes, size, size))
    for axis in range(axes):
        out[axis][np.ix_(order, order)] = turns(theta[axis])
        out[axis] = basis @ out[axis] @ basis.T
    return out


def points(n=6):
    return np.random.default_rng(1).integers(-4, 5, (n, 3)) + 0.25


OPTIONS = {
    "freq": {**FREQ, "kind": "freq", "per_head": True},
    "freq_mixed": {**FREQ, "kind": "freq", **MIXED},
    "basis": BASIS,
    "basis_mixed": {**BASIS, **MIXED, "per_head": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_grape_m_on_three_axes_is_the_exponential_of_commuting_generators(case):
    options, at = OPTIONS[case], points()
    params = drawn(options)
    got = frames(options, at, params)
    for g in range(G):
        L = generators(options, params, g)
        for a in range(3):
            assert np.abs(L[a] @ L[a - 1] - L[a - 1] @ L[a]).max() < 1e-12
        want = [scipy.linalg.expm((u[:, None, None] * L).sum(0)) for u in at]
        np.testing.assert_allclose(got[:, g], want, atol=1e-10)


def law(of_point, shift=(2.0, -1.0, 3.0)):
    """Largest change of A_iᵀ A_j where all points are shifted."""
    here, there = of_point(points()), of_point(points() + np.array(shift))
    pairs = [np.einsum("igab,jgac->ijgbc", a, a) for a in (here, there)]
    return np.abs(pairs[0] - pairs[1]).max()


ROPE_3D = {
    "axial": AXIAL,
    "mixed": {"name": "rope", **MIXED},
    "mixed_learned": {"name": "rope", **MIXED, "learned": True},
}


@pytest.mark.parametrize("case", [*OPTIONS, *ROPE_3D])
def test_relative_law_on_three_axes(case):
    options = (OPTIONS | ROPE_3D)[case]
    params = drawn(options)
    assert law(lambda at: frames(options, at, params)) < 1e-12
    for axis in range(3):  # and all axes are seen
        at = np.stack([np.zeros(3), 1.5 * np.eye(3)[axis]])
        assert np.abs(np.subtract(*frames(options, at, params))).max() > 0.05


def test_overlapping_planes_break_the_law():
    """Each axis with planes of its own basis: products of exponentials whose generators do not commute."""
    params = [drawn(BASIS, seed=s) for s in range(3)]

    def product(at):
        parts = [frames(BASIS, at * np.eye(3)[axis], params[axis]) for axis in range(3)]
        return parts[0] @ parts[1] @ parts[2]

    assert law(product) > 0.07


def encode_image(options, pool="cls", swap=False):
    """Matrix exponentials at the patches of an image; the class token's frame is 1."""
    size, at, first = images.D, images.places(pool).T, int(pool == "cls")

    def of_block(layer, p, h, x, before):
        A = np.broadcast_to(np.eye(size), (len(h), images.G, size, size)).copy()
        for g in range(images.G):
            L = generators(options, p, g, 2, size)
            for site, u in enumerate(at[:, ::-1] if swap else at):
                A[site + first, g] = scipy.linalg.expm((u[:, None, None] * L).sum(0))
        return A, A if options.get("transport") == "qkv" else None, 0

    return of_block


@pytest.mark.parametrize(
    "options", [OPTIONS["freq"], {"name": "grape_m", "kind": "basis", **MIXED, "transport": "qkv"}]
)
def test_grape_m_in_a_vision_model(options):
    model, params = images.model_and_params(options, "cls")
    got = images.logits(model, params)
    np.testing.assert_allclose(got, images.formula(params, encode_image(options)), atol=1e-10)
    for wrong in (images.nope, encode_image(options, swap=True)):
        assert np.abs(got - images.formula(params, wrong)).max() > 1e-4


def angles(options, dims=CUBE):
    """[A, G or 1, D/2]: of one unit along each axis, at the start of learned ones."""
    with jax.enable_x64(True):
        encoding = encodings.build(options, dims, "float64")(parent=None)
        ctx = encodings.Context(position=jnp.eye(3)[None], restart=None, segment=None)
        frame = encoding.init_with_output(jax.random.key(3), None, None, ctx, method="journey")[0].frame
        return np.asarray(frame.angles[0])


@pytest.mark.parametrize("options", [AXIAL, FREQ, BASIS], ids=["rope", "freq", "basis"])
def test_images_share_their_angles(options):
    encoding = encodings.build(options, CUBE)(parent=None)
    ctx = encodings.Context(position=jnp.zeros((5, 7, 3)), restart=None, segment=None, placed=jnp.ones((5, 7), bool))
    frame = encoding.init_with_output(jax.random.key(0), None, None, ctx, method="journey")[0].frame
    assert len(frame.angles) == len(frame.where(ctx.placed).angles) == 1


def test_starts_on_three_axes():
    """Axial: a third of the planes an axis, spectrum and all. Mixed: three orthonormal directions a head."""
    one = 100.0 ** -np.array([0, 0.5])
    want = np.kron(np.eye(3), one)
    np.testing.assert_allclose(angles(AXIAL)[:, 0], want, rtol=1e-12)
    np.testing.assert_allclose(angles({**FREQ, "kind": "freq", "base": 100.0})[:, 0], want, rtol=1e-6)
    heads = []
    for more in ({"name": "rope"}, {"name": "rope", "learned": True}, {"name": "grape_m", "per_head": True}):
        omega = angles({**MIXED, **more}).reshape(3, G, 3, 2)  # axis, head, group, plane
        for g in range(G):
            for plane in range(2):
                q = omega[:, g, :, plane] * 10.0 ** (plane / 2)
                np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-6)
            heads.append(q)
    assert min(np.abs(heads[i] - heads[j]).max() for i in range(6) for j in range(i)) > 0.05


@pytest.mark.parametrize(
    ("options", "dims", "words"),
    [
        ({"kind": "plane"}, CUBE, r"kind = 'plane' has one axis: for images use freq or basis"),
        ({"kind": "freq"}, zoo.vit_dims(head_dim=6), r"make model\.head_dim = 6 divisible by 4"),
        (
            {"form": "mixed"},
            zoo.lm_dims(),
            r"form = 'mixed' does nothing here: it is for coordinates with several axes",
        ),
    ],
)
def test_refused(options, dims, words):
    with pytest.raises(UserError, match=words):
        encodings.build({"name": "grape_m", **options}, dims)
