"""Models folded into plain rope: the same logits in float64, by frames of planes alone; and what does not fold."""

import jax
import numpy as np
import pytest

import zoo
from jojax import encodings
from jojax.encodings.fold import fold
from jojax.encodings.frames import PlaneFrame
from jojax.errors import UserError

DIMS = (("depth", 2), ("heads", 4), ("kv_heads", 2))
BOTH = {"transport": "qkv"}
IMAGES = {
    "ap": {"name": "comrope"},
    "ld": {"name": "comrope", "partition": "ld", "block": 4, **BOTH},
    "ld_odd": {"name": "comrope", "partition": "ld", "block": 3, "ld_theta": "shared", "transport": "v"},
    "ap_none": {"name": "comrope", "block": 4, "cls_pos": "none", "coord": "train_prop", **BOTH},
    "liere": {"name": "liere", "block": 2, "share_layers": True, **BOTH},
}
TEXT = {
    "basis": {"name": "grape_m", "kind": "basis", **BOTH},
    "householder": {"name": "grape_m", "kind": "basis", "basis": "householder", "per_head": True},
    "mix": {"name": "grape_m", "kind": "mix", **BOTH},
    "plane": {"name": "grape_m", "kind": "plane", "transport": "v"},
    "freq": {"name": "grape_m", "kind": "freq", "per_head": True},
    "one": {"name": "grape_m", "kind": "ctx", "phase_fn": "one", "pairing": "interleaved"},
    "liere": {"name": "liere", "block": 4, "coord": "index"},
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def image():
    return np.random.default_rng(0).normal(size=(2, 4 * 2, 5 * 3, 3))


def model(kind, options, **more):
    if kind == "text":
        return zoo.lm_of(options, dims=(*DIMS, ("head_dim", 8)), **more), zoo.tokens()
    return zoo.vit_of(options, dims=(*DIMS, ("head_dim", 6 if options.get("block") == 3 else 16)), **more), image()


def logits(model, params, given):
    with jax.disable_jit():
        return np.asarray(model.apply({"params": params}, given))


def folded(kind, options, **more):
    """the model, its parameters, its input; the same folded"""
    whole, given = model(kind, options, **more)
    params = zoo.drawn(whole, given)
    return whole, params, given, *fold(whole.encoding(parent=None), params)


CASES = [("image", name) for name in IMAGES] + [("text", name) for name in TEXT]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_folded_model_has_the_same_logits(kind, name):
    given_options = (IMAGES if kind == "image" else TEXT)[name]
    whole, params, given, options, other = folded(kind, given_options)
    want, plain = logits(whole, params, given), model(kind, options)[0]
    np.testing.assert_allclose(logits(plain, other, given), want, atol=1e-10)
    assert jax.tree.structure(other) == jax.tree.structure(zoo.drawn(plain, given))  # nothing is missing or left
    half = {"query", "value"}  # half of it is another model
    blocks = {n: (other if n not in half else params)["blocks"][n] for n in other["blocks"]}
    assert np.abs(logits(plain, {**other, "blocks": blocks}, given) - want).max() > 1e-3


def test_a_folded_model_turns_planes():
    options = folded("image", IMAGES["ld"])[3]
    encoding = encodings.build(options, zoo.vit_dims(**dict(DIMS)), "float64")(parent=None)
    ctx = encodings.Context(position=np.zeros((1, 3, 2)), restart=None, segment=None)
    journey = encoding.init_with_output(jax.random.key(0), None, None, ctx, method="journey")[0]
    assert isinstance(journey.frame, PlaneFrame) and journey.value_frame is journey.frame


@pytest.mark.parametrize("qk_norm", ["before", "after"])
def test_gains_between_projection_and_rotation_do_not_fold(qk_norm):
    """The norm alone commutes with a change of basis; its gains do only where they are all equal."""
    whole, given = model("image", IMAGES["ap"], qk_norm=qk_norm)
    params = zoo.drawn(whole, given)
    with pytest.raises(UserError, match=r"gains of model.qk_norm \(norm_q\) differ .* nothing folds"):
        fold(whole.encoding(parent=None), params)
    same = {n: {"scale": np.full_like(params["blocks"][n]["scale"], 1.3)} for n in ("norm_q", "norm_k")}
    even = {**params, "blocks": params["blocks"] | same}
    options, other = fold(whole.encoding(parent=None), even)
    plain = model("image", options, qk_norm=qk_norm)[0]
    np.testing.assert_allclose(logits(plain, other, given), logits(whole, even, given), atol=1e-10)
    gains = {n: params["blocks"][n] for n in ("norm_q", "norm_k")}
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


def test_rotations_that_stand_still_fold():
    """P = 0, and generators of which one dimension never turns."""
    whole, params, given, options, other = folded("image", IMAGES["ap"] | {"block": 4})
    params["blocks"]["encoding"]["p"] = np.zeros_like(params["blocks"]["encoding"]["p"])
    options, other = fold(whole.encoding(parent=None), params)
    assert not other["blocks"]["encoding"]["freq"].any()
    np.testing.assert_allclose(
        logits(model("image", options)[0], other, given), logits(whole, params, given), atol=1e-10
    )
