"""Whole vision transformers against the plain formulas in float64: axial, mixed, absolute; the class token. And their
gradients: no dead parameter. Compiled; one case runs op by op as well."""

import jax
import numpy as np
import pytest

import reference
import reference_rotary
import zoo

DEPTH, G, H, D, C = 2, 3, 6, 16, 20
GRIDS, PATCH = {"cls": (2, 4), "mean": (3, 3)}, (2, 3)  # 9 sites in both, so that their operations are shared


def image(pool):
    height, width = GRIDS[pool]
    return np.random.default_rng(0).normal(size=(1, 2 * height, 3 * width, 3))


def places(pool):
    return np.indices(GRIDS[pool]).reshape(2, -1)


AXIAL = {"name": "rope", "form": "axial", "base": 100.0, "pairing": "interleaved"}
MIXED = {**AXIAL, "form": "mixed", "base": 10.0}
LEARNED = {"name": "rope", "pairing": "interleaved", "learned": True, "freq_init": "normal"}
POINT = {"name": "joformer", "angle_source": "linear", "accumulate": "none", "base": 100.0}

# options, class token, offset (y, x) -> what must not equal it: the formula with these options changed
CASES = {
    "axial": (AXIAL, "cls", (0, 0), dict(pairing="half"), dict(form="mixed")),
    "axial_values": ({**AXIAL, "transport": "qkv"}, "cls", (1.5, -0.25), dict(transport="qk"), dict(transport="v")),
    "axial_mean": ({**AXIAL, "transport": "v"}, "mean", (0, 0), dict(transport="qk"), dict(base=10.0)),
    "axial_learned": ({**LEARNED, "form": "axial"}, "cls", (0, 0), dict(learned=False)),
    "axial_shared": ({**LEARNED, "form": "axial", "angle_share_layers": True}, "mean", (0, 0), dict(learned=False)),
    "mixed": (MIXED, "cls", (0, 0), dict(pairing="half"), dict(form="axial")),
    "mixed_mean": ({**MIXED, "transport": "qkv"}, "mean", (0, 0), dict(transport="qk"), dict(base=100.0)),
    "mixed_learned": ({**MIXED, "learned": True, "transport": "qkv"}, "cls", (-2, 0.5), dict(learned=False)),
    "mixed_shared": (
        {**LEARNED, "form": "mixed", "angle_share_layers": True, "angle_share_heads": True},
        "mean",
        (0, 0),
        dict(learned=False),
    ),
    "content_axial": ({**POINT, "form": "axial"}, "cls", (0, 0), dict(journey_sign=-1), dict(angle_bound="none")),
    "content_mixed": (
        {**POINT, "form": "mixed", "angle_bound": "tanh_freq"},
        "mean",
        (0, 0),
        dict(angle_bound="tanh"),
        dict(angle_base="zero"),
    ),
}


def model_and_params(encoding, pool):
    model = zoo.vit_of(encoding, dims=(("depth", DEPTH), ("grid", GRIDS[pool])), model=(("pool", pool),))
    with jax.enable_x64(True):
        return model, zoo.drawn(model, image(pool))


def logits(model, params, offset=(0, 0), compiled=True):
    def run(params, image):
        return model.apply({"params": params}, image, offset=offset)

    with jax.enable_x64(True), jax.disable_jit(not compiled):
        return np.asarray(jax.jit(run)(params, image(model.pool)))[0]


def formula(params, encode, begin=lambda x: x):
    pool = "cls" if "cls" in params else "mean"
    return reference.vit(params, image(pool)[0], encode, DEPTH, PATCH, begin)


def rotary(options, params, pool, offset=(0, 0)):
    position = places(pool).T + np.array(offset)
    placed = np.ones(len(position), bool)
    if pool == "cls":  # at no place, whatever its coordinates
        position, placed = np.concatenate([[[9.0, 9.0]], position]), np.concatenate([[False], placed])
    return reference_rotary.encode(options, params, position, G, D, placed=placed)


def nope(layer, p, h, x, before):
    return np.broadcast_to(np.eye(D), (len(h), G, D, D)), None, 0


@pytest.mark.parametrize("case", zoo.some(CASES))
def test_rotary(case):
    options, pool, offset, *changes = CASES[case]
    model, params = model_and_params(options, pool)
    got = logits(model, params, offset)
    np.testing.assert_allclose(got, formula(params, rotary(options, params, pool, offset)), atol=1e-10)
    wrong = [rotary(options | change, params, pool, offset) for change in changes]
    if offset != (0, 0) and pool == "cls":  # the class token sees how far off they are
        wrong.append(rotary(options, params, pool))
    for encode in (nope, *wrong):
        assert np.abs(got - formula(params, encode)).max() > 1e-4


@pytest.mark.slow
def test_op_by_op_equals_compiled():
    options = {**MIXED, "transport": "qkv"}
    model, params = model_and_params(options, "cls")
    got = logits(model, params, compiled=False)
    np.testing.assert_allclose(got, formula(params, rotary(options, params, "cls")), atol=1e-10)


def sincos(coordinate):
    phase = coordinate[:, None] * 10_000.0 ** (-np.arange(C // 4) / (C // 4))
    return np.concatenate([np.sin(phase), np.cos(phase)], -1)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("kind", ["sincos2d", "learned"])
def test_absolute(kind, pool):
    """Added to the patches, not to the class token; y's half first."""
    model, params = model_and_params({"name": "absolute", "kind": kind}, pool)
    added = np.concatenate([*map(sincos, places(pool))], -1) if kind == "sincos2d" else params["encoding"]["table"]
    first = (np.zeros((1, C)),) if pool == "cls" else ()
    got = logits(model, params)
    np.testing.assert_allclose(got, formula(params, nope, lambda x: x + np.concatenate([*first, added])), atol=1e-10)
    assert np.abs(got - formula(params, nope)).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), zoo.families([(n, "vision") for n in zoo.VISION]))
def test_no_dead_parameter(name, kind):
    """Every array moves the loss. Without frames on keys the key bias cannot: it shifts all logits of a query alike."""
    model, params = model_and_params(zoo.preset(name), "cls")
    with jax.enable_x64(True):
        grads = jax.jit(jax.grad(lambda p: (model.apply({"params": p}, image("cls")) ** 2).sum()))(params)
    sizes = {
        jax.tree_util.keystr(path): np.abs(np.asarray(g)).reshape(len(g), -1).max(1)  # of every block
        for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]
    }
    top = max(size.max() for size in sizes.values())
    dead = {path for path, size in sizes.items() if (size if "blocks" in path else size.max()).min() < 1e-6 * top}
    silent = set() if "qk" in zoo.preset(name).get("transport", "") else {"['blocks']['key']['bias']"}
    if name == "rel_bias_2d":  # in the last block only the class token is heard, whose pairs have no bias
        silent.add("['blocks']['encoding']['table']")
    assert dead == silent
