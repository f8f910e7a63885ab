"""Models folded into plain rope: the same logits in float64, by frames of planes alone; and what does not fold."""

import jax
import numpy as np
import pytest

import reference
import zoo
from jojax import encodings
from jojax.encodings.fold import fold, generators, planes
from jojax.encodings.frames import PlaneFrame
from jojax.errors import UserError
from test_comrope import first_block

DIMS = (("depth", 2), ("heads", 4), ("kv_heads", 2))
AP, VALUES = {"name": "comrope", "block": 4}, {"transport": "qkv"}
MODELS = {
    "ap": ("image", AP),
    "ld": ("image", AP | VALUES | {"partition": "ld", "cls_pos": "none", "coord": "train_prop"}),
    "liere": ("image", {"name": "liere", "block": 2, "share_layers": True, "transport": "v"}),
    "basis": ("text", {"name": "grape_m", "kind": "basis"} | VALUES),
}
GROUPS = {
    "ap": ("image", AP),
    "ld_odd": ("image", AP | {"partition": "ld", "block": 3, "ld_theta": "shared"}),
    "ld_text": ("text", AP | {"partition": "ld", "coord": "index", "cls_pos": "none"}),
    "liere": ("image", {"name": "liere", "block": 2}),
    "liere_text": ("text", {"name": "liere", "coord": "index"}),
    "basis": ("text", {"name": "grape_m", "kind": "basis", "per_head": True}),
    "householder": ("text", {"name": "grape_m", "kind": "basis", "basis": "householder"}),
    "unitary": ("text", {"name": "grape_m", "kind": "basis", "basis": "unitary"}),
    "mix": ("text", {"name": "grape_m", "kind": "mix"}),
    "plane": ("text", {"name": "grape_m", "kind": "plane"}),
    "freq": ("text", {"name": "grape_m", "kind": "freq", "per_head": True}),
    "one": ("text", {"name": "grape_m", "kind": "ctx", "phase_fn": "one", "pairing": "interleaved"}),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def model(kind, options, **more):
    if kind == "text":
        return zoo.lm_of(options, dims=(*DIMS, ("head_dim", 8)), **more), zoo.tokens()
    return zoo.vit_of(options, dims=DIMS, **more), np.random.default_rng(0).normal(size=(2, 4 * 2, 5 * 3, 3))


def logits(model, params, given):
    return np.asarray(zoo.run(model, params, given))


def folded(kind, options, **more):
    """the model, its parameters, its input; the options and parameters of the folded one"""
    whole, given = model(kind, options, **more)
    params = zoo.drawn(whole, given)
    return whole, params, given, *fold(whole.encoding(parent=None), params)


@pytest.mark.parametrize("name", zoo.some(MODELS, 4))
def test_a_folded_model_has_the_same_logits(name):
    kind, options = MODELS[name]
    whole, params, given, made, other = folded(kind, options)
    want, plain = logits(whole, params, given), model(kind, made)[0]
    np.testing.assert_allclose(logits(plain, other, given), want, atol=1e-10)
    assert jax.tree.structure(other) == jax.tree.structure(zoo.drawn(plain, given))  # nothing is missing or left
    half = {"query", "value"}  # half of it is another model
    blocks = {n: (params if n in half else other)["blocks"][n] for n in other["blocks"]}
    assert np.abs(logits(plain, {**other, "blocks": blocks}, given) - want).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_frames_are_planes_in_another_basis(name):
    """At any site A_i = S R(Σ_a u_a ω_a) Sᵀ, with S and ω from the generators alone."""
    kind, options = GROUPS[name]
    D = {"ld_odd": 6, "liere_text": 16}.get(name, 8)
    dims = dict(heads=4, kv_heads=2, head_dim=D)
    encoding = encodings.build(options, (zoo.vit_dims if kind == "image" else zoo.lm_dims)(**dims), "float64")(
        parent=None
    )
    position = np.indices((4, 5)).reshape(2, -1).T if kind == "image" else np.arange(7)[:, None]
    ctx = encodings.Context(position=position[None].astype(float), restart=None, segment=None)
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), ctx, method=first_block))["params"]
    params = jax.tree.map(lambda t: np.random.default_rng(1).normal(size=t.shape), like)
    L = len(position)
    units = np.broadcast_to(np.eye(D)[:, None, None], (D, L, 2, D))
    frame = encoding.apply({"params": params}, ctx, method=first_block).frame
    got = np.moveaxis(np.asarray(frame.apply(units)), 0, -1)  # [L, G, D, D]
    u = np.asarray(encoding.apply({}, None, ctx, method="coordinates"))[0] if kind == "image" else position
    for g, of_head in enumerate(generators(encoding, params)):
        basis, speeds = planes(of_head)
        np.testing.assert_allclose(basis.T @ basis, np.eye(D), atol=1e-12)
        want = [basis @ reference.plane_rotation(site @ speeds, "interleaved") @ basis.T for site in u]
        np.testing.assert_allclose(got[:, g], want, atol=1e-10)
        assert np.abs(got[:, g] - np.eye(D)).max() > 0.1


def test_a_folded_model_turns_planes():
    options = folded(*MODELS["ld"])[3]
    encoding = encodings.build(options, zoo.vit_dims(**dict(DIMS)), "float64")(parent=None)
    ctx = encodings.Context(position=np.zeros((1, 3, 2)), restart=None, segment=None)
    journey = encoding.init_with_output(jax.random.key(0), None, None, ctx, method="journey")[0]
    assert isinstance(journey.frame, PlaneFrame) and journey.value_frame is journey.frame


def test_gains_between_projection_and_rotation_do_not_fold():
    """The norm alone commutes with a change of basis; its gains do only where they are all equal."""
    for where in ("before", "after"):
        whole, given = model("image", AP, qk_norm=where)
        params = zoo.drawn(whole, given)
        with pytest.raises(UserError, match=r"gains of model.qk_norm \(norm_q\) differ .* nothing folds"):
            fold(whole.encoding(parent=None), params)
    gains = {n: params["blocks"][n] for n in ("norm_q", "norm_k")}
    same = {n: {"scale": np.full_like(gains[n]["scale"], 1.3)} for n in gains}
    even = {**params, "blocks": params["blocks"] | same}
    options, other = fold(whole.encoding(parent=None), even)
    plain = model("image", options, qk_norm="after")[0]
    np.testing.assert_allclose(logits(plain, other, given), logits(whole, even, given), atol=1e-10)
    wrong = {**other, "blocks": other["blocks"] | gains}
    assert np.abs(logits(plain, wrong, given) - logits(whole, params, given)).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("image", {"name": "liere", "block": 4}, "generators of the coordinate axes do not commute"),
        ("text", {"name": "grape_m", "kind": "ctx"}, "GrapeM has no frames"),
        ("text", {"name": "joformer"}, "JoFormer has no frames"),
        ("image", {"name": "ape_grid"}, "ApeGrid has no frames"),
    ],
)
def test_what_is_no_plain_rope_is_refused(kind, options, words):
    with pytest.raises(UserError, match=words):
        folded(kind, options)


def test_what_stands_still():
    basis, speeds = planes(np.zeros((2, 6, 6)))
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-12)
    assert speeds.shape == (2, 3) and not speeds.any()
