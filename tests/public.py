"""jojax beside the values of public libraries in public_values.json, which scripts/record_public_values.py made: for
each entry the preset, the options that set it up alike, and others with which it must not agree."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.encodings import preset
from jojax import encodings
from jojax.encodings import absolute, relative
from jojax.encodings.base import Dims
from jojax.encodings.build import options
from scripts.record_public_values import drawn

VALUES = json.loads((Path(__file__).parent / "public_values.json").read_text())


def first_block(encoding, x, ctx):
    _, shared, carry = encoding.begin(x, ctx)
    return encoding.journey(shared, carry, ctx)


def places(given):
    """[L, A]"""
    grid = given.get("grid")
    return np.indices(grid).reshape(len(grid), -1).T if grid else np.array(given["position"])[:, None]


def context(given, **content):
    at = places(given)[None].astype(float)
    start = np.arange(at.shape[1])[None] == 0
    return encodings.Context(position=at, restart=start, segment=np.zeros(start.shape, np.int32), **content)


def make(config, given):
    heads, grid = given.get("heads", 1), tuple(given.get("grid", ()))
    dims = Dims(
        heads=heads,
        kv_heads=heads,
        head_dim=given.get("head_dim", 4),
        width=given.get("width", 4),
        depth=1,
        axes=len(grid) or 1,
        grid=grid,
        length=64,
        causal=not grid and not given.get("bidirectional"),
    )
    return encodings.build(config, dims, "float64")(parent=None)


def answer(config, given, params, ctx):
    x = jnp.zeros((*ctx.position.shape[:2], given.get("width", 4)))
    encoding = make(config, given)
    return jax.jit(lambda params: encoding.apply({"params": params}, x, ctx, method=first_block))(params)


def queries_and_keys(given, parts=2):
    """q, k [1, L, H, D]"""
    shape = given["heads"], len(places(given)), given["head_dim"]
    return np.moveaxis(drawn(given["seed"], parts, *shape), 2, 1)[:, None]


def scores(config, given, params=(), order=slice(None)):
    """q·k [H, Lq, Lk] after transport; `order` of the dimensions of a head."""
    q, k, *_ = queries_and_keys(given, given.get("parts", 2))[..., order]
    journey = answer(config, given, dict(params), context(given))
    q, k = journey.frame.dual(q), journey.frame.apply(k)
    return np.einsum("qhd,khd->hqk", q[0], k[0]) / journey.temperature


def bias(config, given, params=(), **content):
    """[H, Lq, Lk]; 0 at a site's own key."""
    journey = answer(config, given, dict(params), context(given, **content))
    if journey.lift is not None:
        found = np.einsum("bqhr,bkhr->hqk", *journey.lift)
    else:
        (_, L, *_), edge = journey.edge.query.shape, journey.edge
        state = jnp.zeros((1, given["heads"], L))
        found = edge.step(state, edge.query, edge.key, jnp.ones((1, L, L), bool), edge.weights)[0][0]
    return found - np.diagonal(found, 0, 1, 2)[..., None]


def added(config, given):
    """[L, C]"""
    x = jnp.zeros((1, len(places(given)), given["width"]))
    return make(config, given).apply({}, x, context(given), method="begin")[0][0]


# ------------------------------------------------------------------------------------ where more is to be set up
def neox(config, given):
    """NeoX turns the first half of 8 dimensions, as (0, 2) and (1, 3); jojax the first two of the planes (b, b + 4)."""
    return scores(config, given, order=[0, 1, 4, 5, 2, 3, 6, 7])


def yarn_frequencies(config, given):
    sites = {"heads": 1, "position": [1], **given}
    omega = make(config, sites).apply({}, method="frequencies")
    temperature = answer(config, sites, {}, context(sites)).temperature
    return np.append(omega, temperature**-0.5)


def values(config, given):
    v = queries_and_keys(given, 3)[2]
    journey = answer(config, given, {}, context(given))
    return np.moveaxis(journey.value_frame.apply(v)[0], 1, 0)


def dinov3(config, given):
    """2π · coordinate / period over a range of 2, not 1."""
    n = given["head_dim"] // 4
    omega = 4 * np.pi * given["temperature"] ** (-np.arange(n) / n)
    return scores(config, given, {"freq": np.broadcast_to(np.tile(omega, 2), (1, given["heads"], 2 * n))})


def mixed(config, given):
    return scores(config, given, {"freq": np.array(given["freqs"])[::-1]})  # y first


def resized(config, given):
    make(config, given)
    table = drawn(given["seed"], np.prod(given["grid"]), given["width"])
    return absolute.resize({"table": table}, given["grid"], given["new_grid"])["table"]


def alibi(config, given):
    """The last query's row, counted from one of the keys."""
    rows = [bias(config, given | {"heads": heads})[:, -1] for heads in given["head_counts"]]
    return np.concatenate([row - row[:, given["zero"], None] for row in rows])


def buckets(config, given):
    """Of the first key, and of keys after the first query: numbers in place of biases."""
    far = sorted({abs(d) for d in given["distances"]})
    sites = {"heads": 1, "position": far, **given}
    found = bias(config, sites, {"table": np.arange(config.get("buckets", 32.0))[:, None]})[0]
    return [found[far.index(d), 0] if d >= 0 else found[0, far.index(-d)] for d in given["distances"]]


def displacements(config, given):
    sites = int(np.prod([2 * n - 1 for n in given["grid"]]))
    found = bias(config, {"heads": 1, **given}, {"table": np.arange(float(sites))[:, None]})[0]
    return found + sites // 2  # of a site itself: the middle


def displacements_resized(config, given):
    make(config, given)
    H, (h, w) = given["heads"], (2 * np.array(given["grid"]) - 1)
    table = np.moveaxis(drawn(given["seed"], H, h, w), 0, -1).reshape(-1, H)
    h, w = 2 * np.array(given["new_grid"]) - 1
    fitted = relative.resize({"table": table}, given["grid"], given["new_grid"])["table"]
    return np.moveaxis(fitted.reshape(h, w, H), -1, 0)


def fox(config, given):
    H, C = given["heads"], given["width"]
    weights, x = np.split(drawn(given["seed"], H + len(given["position"]), C), [H])
    gate = {"kernel": weights.T, "bias": np.full(H, given["bias_init"])}
    return bias(config, given, {"gate": gate}, x=x[None])


# ------------------------------------------------------------------------------------ all entries
class Case(NamedTuple):
    preset: str
    ours: Callable
    options: dict
    wrong: dict  # options that must make a difference, or inputs where there are none


INTERLEAVED, HALF = {"pairing": "interleaved"}, {"pairing": "half"}
YARN = {"scale_factor": 8.0, "trained_length": 256}
CASES = {
    "rope": Case("rope", scores, {}, {"base": 5000.0}),
    "rope_interleaved": Case("rope", scores, INTERLEAVED, HALF),
    "rope_pi": Case("rope", scores, {"scale_method": "pi", "scale_factor": 4.0}, {"scale_factor": 3.0}),
    "rope_ntk": Case("rope", scores, {"scale_method": "ntk", "scale_factor": 4.0}, {"scale_method": "pi"}),
    "rope_yarn": Case("rope_yarn", scores, YARN, {"scale_factor": 4.0}),
    "rope_partial": Case("rope_partial", scores, {"fraction": 0.75}, {"fraction": 0.5}),
    # frequencies base^(−2b/4) of 4 dimensions among 8: (base²)^(−2b/8)
    "rope_partial_neox": Case("rope_partial", neox, {"fraction": 0.5, "base": 1e8}, {"base": 1e4}),
    "rope_values": Case("jo_fixed", values, INTERLEAVED, HALF),
    "xpos": Case("xpos", scores, {"scale_base": 16.0, **INTERLEAVED}, {"gamma": 0.3}),
    "xpos_consecutive": Case("xpos", scores, {"scale_base": 4.0, **INTERLEAVED}, {"scale_base": 5.0}),
    "rope_axial": Case("rope_axial", scores, {}, {"base": 10.0}),
    "rope_axial_three": Case("rope_axial", scores, {}, HALF),
    "rope_unit10k": Case("rope_unit10k", scores, {}, {"coord": "train_prop_linspace"}),
    "rope_axial_learned": Case(
        "rope_axial_learned_per_layer", dinov3, {"coord": "unit_center", **HALF}, {"coord": "index"}
    ),
    "rope_mixed": Case("rope_mixed", mixed, {}, HALF),
    "rope_mixed_fixed": Case("rope_mixed_fixed", scores, {}, {"base": 100.0}),
    "sinusoidal": Case("sinusoidal", added, {}, {"base": 5000.0}),
    "sincos2d": Case("sincos2d", added, {}, {"base": 5000.0}),
    "sincos2d_mae": Case("sincos2d", added, {}, {"base": 5000.0}),
    "learned_larger": Case("learned", resized, {}, {"grid": [3, 2]}),
    "learned_smaller": Case("learned", resized, {}, {"grid": [4, 5]}),
    "alibi": Case("alibi", alibi, {}, {"zero": 3}),
    "alibi_mpt": Case("alibi", alibi, {}, {"head_counts": [16, 12, 10, 8, 6, 5, 4, 2, 1]}),
    "alibi_two_sided": Case("alibi_2d", bias, {}, {"position": [0, 1, 3]}),
    "t5_bias": Case("t5_bias", buckets, {}, {"buckets": 16}),
    "t5_bias_two_sided": Case("t5_bias", buckets, {}, {"buckets": 16}),
    "rel_bias_2d": Case("rel_bias_2d", displacements, {}, {"grid": [3, 2]}),
    "rel_bias_2d_larger": Case("rel_bias_2d", displacements_resized, {}, {"grid": [3, 2]}),
    "fox": Case("fox", fox, {}, {"bias_init": 0.0}),
}
# where the library does otherwise, as test_public_values.py tells
APART = {
    "rope_yarn_frequencies": Case("rope_yarn", yarn_frequencies, YARN, {}),
    "learned_smaller_antialias": Case("learned", resized, {}, {}),
}


def theirs(entry):
    return np.array(VALUES[entry]["values"], VALUES[entry]["dtype"]).astype(float)


def ours(entry, wrong=False):
    case, given = (CASES | APART)[entry], VALUES[entry]["inputs"]
    config = preset(case.preset) | case.options
    if wrong:
        known = options(encodings.load(config["name"]))
        config |= {key: value for key, value in case.wrong.items() if key in known}
        given = given | {key: value for key, value in case.wrong.items() if key not in known}
    with jax.enable_x64(True):
        return np.asarray(case.ours(config, given))


@functools.cache
def error(entry, wrong=False):
    """The largest difference, relative to the largest value; with what must make one."""
    values, found = theirs(entry), ours(entry, wrong)
    assert found.shape == values.shape
    return float(np.abs(found - values).max() / np.abs(values).max())


@functools.cache
def public_errors():
    """{preset: (libraries with their versions, largest error)}"""
    found = {}
    for entry, case in CASES.items():
        library = "{library} {version}".format(**VALUES[entry])
        libraries, largest = found.get(case.preset, ((), 0.0))
        found[case.preset] = (*libraries, *{library} - {*libraries}), max(largest, error(entry))
    return {name: (", ".join(libraries), largest) for name, (libraries, largest) in found.items()}
