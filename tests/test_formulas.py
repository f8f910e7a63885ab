"""Whole language models against the plain formulas in float64: each kind of answer in the contract, each option.

The models are compiled; one case runs op by op as well.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import reference_rotary
import zoo
from jojax import encodings
from jojax.encodings.accumulated import Accumulated

DEPTH, G, H, D, L = 2, 3, 6, 4, zoo.L
TOKS = zoo.tokens()[:1]
T = np.arange(L)
EYE = np.broadcast_to(np.eye(D), (L, G, D, D))


def model_and_params(encoding):
    model = zoo.lm_of(encoding, dims=(("depth", DEPTH),))
    with jax.enable_x64(True):
        params = zoo.drawn(model, TOKS)
    return model, params


def logits(model, params, compiled=True, **kw):
    with jax.enable_x64(True), jax.disable_jit(not compiled):
        run = zoo.run if compiled else zoo.run.__wrapped__
        return np.asarray(run(model, params, TOKS, **kw))[0]


def formula(params, encode, begin=lambda x: x):
    plain = jax.tree.map(np.asarray, params)
    return reference.forward(plain, np.asarray(TOKS)[0], encode, DEPTH, begin)


def nope(layer, p, h, x, before):
    return EYE, None, 0


def rotary(options, params):
    """The formula of `rope` and `joformer` with these options."""
    plain = jax.tree.map(np.asarray, params)
    return reference_rotary.encode(options, plain, T[:, None], G, D, np.asarray(TOKS)[0])


def compare(got, params, right, *wrong, begin=lambda x: x):
    """Equal to the formula, and to none of the wrong ones."""
    np.testing.assert_allclose(got, formula(params, right, begin), atol=1e-10)
    for encode in wrong:
        assert np.abs(got - formula(params, encode)).max() > 1e-3


# One encoding for each kind of answer, as its preset has it


def encode_alibi(params):
    bias = -reference.slopes(H)[:, None, None] * (T[:, None] - T)
    return lambda layer, p, h, x, before: (EYE, None, bias)


def encode_xpos(params, gamma=0.4, scale_base=512, values=False):
    angles = np.broadcast_to(T[:, None, None] * reference.omega(D), (L, G, D // 2))
    zeta = (np.arange(D // 2) / (D // 2) + gamma) / (1 + gamma)
    scale = zeta ** (-T[:, None] / scale_base)
    A = np.concatenate([scale, scale], -1)[:, None, :, None] * reference.frames(angles)  # exp(s) R
    return lambda layer, p, h, x, before: (A, A if values else None, 0)


@pytest.mark.parametrize(
    ("encoding", "right"),
    [
        ({"name": "grape_a"}, encode_alibi),
        ({"name": "xpos"}, encode_xpos),
        ({"name": "xpos", "gamma": 0.2, "scale_base": 8.0}, lambda p: encode_xpos(p, 0.2, 8)),
        ({"name": "xpos", "transport": "qkv", "scale_base": 8.0}, lambda p: encode_xpos(p, 0.4, 8, True)),
    ],
    ids=["alibi", "xpos", "xpos_options", "xpos_values"],
)
def test_additive_and_scaled(encoding, right):
    model, params = model_and_params(encoding)
    wrong = [rotary(encoding | {"name": "rope"}, params)] if "scale_base" in encoding else []  # by default nearly that
    compare(logits(model, params), params, right(params), nope, *wrong)


# Rotary encodings: options -> what must not equal them: the formula with these options changed

JO = {"name": "joformer"}
WIKI = dict(angle_hidden_mult=2.0, angle_ln=False, angle_bound="none", angle_base="zero", angle_init="normal")
OWN, LINEAR = {**JO, "angle_source": "own_mlp"}, {**JO, "angle_source": "linear"}
TOKEN = {**JO, "angle_source": "token_table"}
ROPE = {"name": "rope"}
LEARNED = {**ROPE, "learned": True}

ROTARY = {
    "rope": (ROPE, dict(transport="qkv")),
    "rope_base": ({**ROPE, "base": 50.0}, dict(base=10_000.0)),
    "rope_integer": ({**ROPE, "freq": "integer"}, dict(freq="geometric")),
    "rope_interleaved": ({**ROPE, "pairing": "interleaved"}, dict(pairing="half")),
    "rope_v": ({**ROPE, "transport": "v"}, dict(transport="qk"), dict(transport="qkv")),
    "jo_fixed": ({**ROPE, "transport": "qkv"}, dict(transport="qk")),
    "learned_per_block": (LEARNED, dict(learned=False)),
    "learned_shared": ({**LEARNED, "angle_share_layers": True}, dict(learned=False)),
    "learned_one_for_all_heads": ({**LEARNED, "angle_share_heads": True}, dict(learned=False)),
    "position": ({**JO, "angle_source": "position", "learned": True}, dict(learned=False)),
    "ffn_flow": (JO, dict(journey_sign=-1), dict(angle_base="zero")),
    "ffn_flow_shared_heads": ({**JO, "angle_share_heads": True, "transport": "qk"}, dict(transport="qkv")),
    "ffn_flow_pointwise": ({**JO, "accumulate": "none"}, dict(accumulate="prefix")),
    "own_mlp": (OWN, dict(angle_ln=False), dict(angle_bound="none")),
    "own_mlp_raw": ({**OWN, **WIKI, "pairing": "interleaved"}, dict(angle_ln=True), dict(pairing="half")),
    "linear_pointwise": ({**LINEAR, "accumulate": "none"}, dict(accumulate="prefix")),
    "linear_learned": ({**LINEAR, "learned": True, "angle_share_layers": True}, dict(learned=False)),
    "linear_one_for_all_heads": ({**LINEAR, "learned": True, "angle_share_heads": True}, dict(learned=False)),
    "token_table": (TOKEN, dict(angle_base="zero")),
    "token_table_shared": ({**TOKEN, "angle_share_layers": True, "angle_base": "zero"}, dict(angle_base="rope")),
    "query": ({**LINEAR, "step_convention": "query"}, dict(step_convention="source")),
    "inverse_family": ({**LINEAR, "journey_sign": -1}, dict(journey_sign=1)),
    "tanh_freq": ({**LINEAR, "angle_bound": "tanh_freq"}, dict(angle_bound="tanh")),
    "tanh_freq_learned": ({**LINEAR, "angle_bound": "tanh_freq", "learned": True}, dict(learned=False)),
    "norm": ({**LINEAR, "angle_bound": "norm", "angle_init": "normal"}, dict(angle_bound="norm_abs")),
    "norm_abs": ({**LINEAR, "angle_bound": "norm_abs", "angle_init": "normal"}, dict(angle_bound="norm")),
    "values_fixed": ({**LINEAR, "v_angles": "fixed"}, dict(v_angles="same")),
    "values_fixed_content": ({**LINEAR, "v_angles": "fixed", "angle_base": "zero"}, dict(angle_base="rope")),
    "values_stop": ({**LINEAR, "v_angles": "stop"}, dict(v_angles="fixed")),
    "values_only": ({**LINEAR, "transport": "v"}, dict(transport="qkv"), dict(transport="qk")),
}


@pytest.mark.parametrize("case", zoo.some(ROTARY))
def test_rotary_options(case):
    options, *changes = ROTARY[case]
    model, params = model_and_params(options)
    wrong = [rotary(options | change, params) for change in changes]
    compare(logits(model, params), params, rotary(options, params), nope, *wrong)


@pytest.mark.slow
def test_op_by_op_equals_compiled():
    model, params = model_and_params(JO)
    compare(logits(model, params, compiled=False), params, rotary(JO, params), nope)


def test_no_gradient_flows_through_the_angles_of_values_that_stop():
    """In the values' frame alone, and not with 'same'."""
    ctx = encodings.Context(
        position=np.arange(5, dtype="float32")[None, :, None],
        restart=np.arange(5)[None] == 0,
        segment=np.zeros((1, 5), int),
        x=np.random.default_rng(0).normal(size=(1, 5, 20)).astype("float32"),
    )
    params = {"params": {"angle_out": {"kernel": np.ones((20, 6), "float32"), "bias": np.zeros(6, "float32")}}}

    @jax.jit
    def gradients(params):
        """Of the sums of angles, for queries and values."""
        found = {}
        for v_angles in ("same", "stop"):
            encoding = encodings.build({**LINEAR, "v_angles": v_angles}, zoo.lm_dims())(parent=None)
            for which in ("frame", "value_frame"):

                def total(params, encoding=encoding, which=which):
                    journey = encoding.apply(params, (None, None), None, ctx, method="journey")
                    return getattr(journey, which).angles.sum()

                found[v_angles, which] = jnp.abs(jax.grad(total)(params)["params"]["angle_out"]["kernel"]).max()
        return found

    found = gradients(params)
    assert found.pop(("stop", "value_frame")) == 0
    assert min(found.values()) > 0.1


# Absolute and accumulated


def test_sinusoidal():
    model, params = model_and_params({"name": "absolute", "base": 100.0})
    phase = T[:, None] * 100.0 ** (-np.arange(10) / 10)  # width 20

    def begin(x):
        return x * np.sqrt(20) + np.concatenate([np.sin(phase), np.cos(phase)], -1)

    compare(logits(model, params), params, nope, begin=begin)
    assert np.abs(logits(model, params) - formula(params, nope)).max() > 1e-3


def test_learned_table():
    model, params = model_and_params({"name": "absolute", "kind": "learned"})
    compare(logits(model, params), params, nope, begin=lambda x: x + params["encoding"]["table"][:L])
    assert np.abs(logits(model, params) - formula(params, nope)).max() > 1e-3


def draws(key, document, size):
    """a_t of one block, radians [L, G, D/2]: uniform, of the key folded with (document, position)."""
    keys = [jax.random.fold_in(jax.random.fold_in(key, document), t) for t in range(L)]
    return np.array([jax.random.uniform(k, (G, D // 2), "float64", -1, 1) for k in keys]) * size


def accumulated(steps, transport="qkv", pairing="half"):
    """Frames of the exclusive sums of each block's steps."""
    A = [reference.frames(np.cumsum(a, 0) - a, pairing) for a in steps]
    return lambda layer, p, h, x, before: (A[layer], A[layer] if "v" in transport else None, 0)


@pytest.mark.parametrize("unit", [False, True], ids=["omega", "unit"])
def test_accumulated_without_content(unit):
    """In evaluation without an rng all blocks draw from key 0."""
    encoding = dict(name="accumulated", transport="qkv", pairing="interleaved" if unit else "half") | (
        dict(steps="unit") if unit else dict(base=50.0)
    )
    model, params = model_and_params(encoding)
    with jax.enable_x64(True):
        steps, other = (
            [draws(jax.random.key(0), document, 1 if unit else reference.omega(D, 50.0))] * DEPTH for document in (9, 0)
        )
    got = logits(model, params, segment=jnp.full((1, L), 9))
    pairing = encoding["pairing"]
    wrong = accumulated(steps, "qk", pairing), accumulated(other, "qkv", pairing)
    compare(got, params, accumulated(steps, "qkv", pairing), nope, *wrong)


class Recorded(Accumulated):
    """Writes down what it draws."""

    log: ClassVar[list] = []

    def draws(self, ctx):
        turns = super().draws(ctx)
        if not isinstance(turns, jax.core.Tracer):  # a callback would round them to float32
            self.log.append(2 * np.pi * np.asarray(turns)[0])
        return turns


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
def test_every_block_draws_its_own_angles_or_all_share_one_draw(share):
    encoding = {"name": f"{__name__}.Recorded", "share_layers": share, "transport": "qk"}
    model, params = model_and_params(encoding)
    seen = []
    for seed, train in ((1, False), (1, False), (1, True), (2, True)):
        Recorded.log.clear()
        got = logits(model, params, compiled=False, train=train, rngs={"encoding": jax.random.key(seed)})
        steps = list(Recorded.log) * (DEPTH if share else 1)
        assert len(steps) == DEPTH
        assert share == (steps[0] == steps[1]).all()
        compare(got, params, accumulated(steps, "qk"), nope)
        assert (np.abs(steps) <= reference.omega(D)).all()
        seen.append(np.array(steps))
    np.testing.assert_array_equal(seen[0], seen[1])  # one key, one draw
    for a, b in ((0, 2), (2, 3)):  # another in training, and for another key
        assert (seen[a] != seen[b]).all()
