"""The recurrence as token mixer, in float64: its formula in loops, and the laws that attention keeps too."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import zoo
from configs.encodings import preset
from jojax import config, loop
from jojax.errors import UserError
from jojax.models.recurrence import TAU
from test_contract import POSITION, SEGMENT

B, L = zoo.B, zoo.L
QUICKSTART = f"{Path(__file__).resolve().parent.parent}/configs/quickstart.py:smoke,encoding="
OPTIONS = dict(mixer="recurrence", attention="auto", dims=(("kv_heads", 6),))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def call(toks=None, segment=SEGMENT):
    params, toks = zoo.lm_params("sinusoidal", **OPTIONS), zoo.tokens() if toks is None else toks
    return np.asarray(zoo.run(zoo.lm("sinusoidal", **OPTIONS), params, toks, position=POSITION, segment=segment))


def in_chunks(cuts):
    model, params, past, outs = zoo.lm("sinusoidal", **OPTIONS), zoo.lm_params("sinusoidal", **OPTIONS), None, []
    for a, b in itertools.pairwise(cuts):
        args = {"position": POSITION[:, a:b], "segment": SEGMENT[:, a:b], "past": past, "capacity": 13}
        out, past = zoo.run(model, params, zoo.tokens()[:, a:b], **args)
        outs.append(out)
    return np.concatenate(outs, 1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mix(x, p, forget=True):
    """out [L, C] of one document, site by site; forget = False: a sum of all values that never fades."""
    raw, v, gate = (np.einsum("lc,chd->lhd", x, p[n]["kernel"]) + p[n]["bias"] for n in ("decay", "value", "gate"))
    h, out = 0 * v[0], []
    for t in range(len(x)):
        a = sigmoid(raw[t])
        h = (a if forget else 1) * h + (1 - a) * v[t]
        out.append(np.einsum("hd,hdc->c", gate[t] * sigmoid(gate[t]) * h, p["out"]["kernel"]) + p["out"]["bias"])
    return np.array(out)


def formula(tokens, forget=True):
    """Logits [L, V] of one document from its first token."""
    params, depth, C = zoo.lm_params("sinusoidal", **OPTIONS), 3, 20
    phase = np.arange(len(tokens))[:, None] * 1e4 ** (-2 * np.arange(C // 2) / C)
    x = params["embed"]["embedding"][tokens] * C**0.5 + np.concatenate([np.sin(phase), np.cos(phase)], 1)
    for layer in range(depth):
        p = reference.pick(params["blocks"], layer, depth)
        x = x + mix(reference.layer_norm(x, p["norm_mixer"]), p["recurrence"], forget)
        g = reference.gelu(reference.dense(reference.layer_norm(x, p["norm_mlp"]), p["mlp_in"]))
        x = x + reference.dense(g, p["mlp_out"])
    return reference.dense(reference.layer_norm(x, params["norm"]), params["head"])


def test_packed_documents_are_the_formula_of_each_alone():
    packed = call()
    for row, document in ((0, 4), (0, 9), (1, 2), (1, 7), (1, 0)):
        inside = SEGMENT[row] == document
        toks = np.asarray(zoo.tokens())[row, inside]
        np.testing.assert_allclose(packed[row, inside], formula(toks), atol=1e-10)
        assert inside.sum() == 1 or np.abs(packed[row, inside] - formula(toks, forget=False)).max() > 1e-3
    assert np.abs(call(segment=np.ones((B, L), int)) - packed).max() > 1e-3  # one document remembers across


@pytest.mark.parametrize("cuts", [(0, 4, 8, 11), range(L + 1)], ids=["chunks", "sites"])
def test_chunks_equal_the_whole(cuts):
    np.testing.assert_allclose(in_chunks(cuts), call(), atol=1e-10)


def test_a_state_that_is_not_handed_on_is_missed():
    model, params = zoo.lm("sinusoidal", **OPTIONS), zoo.lm_params("sinusoidal", **OPTIONS)
    args = [{"position": POSITION[:, s], "segment": SEGMENT[:, s]} for s in (slice(4), slice(4, 8))]
    _, past = zoo.run(model, params, zoo.tokens()[:, :4], capacity=13, **args[0])
    forgetful = {**past, "blocks": jax.tree.map(jnp.zeros_like, past["blocks"])}
    out = zoo.run(model, params, zoo.tokens()[:, 4:8], past=forgetful, capacity=13, **args[1])[0]
    assert np.abs(out - call()[:, 4:8]).max() > 1e-3


def test_the_future_is_invisible_bit_for_bit():
    before = call()
    for t in (3, 8):
        after = call(zoo.tokens().at[:, t].set((zoo.tokens()[:, t] + 1) % zoo.V))
        assert (after[:, :t] == before[:, :t]).all() and (after[:, t] != before[:, t]).any()


def test_gates_and_states_are_float32_in_a_bfloat16_model():
    with jax.enable_x64(False):
        model = zoo.lm("none", "bfloat16", **OPTIONS)
        params = jax.eval_shape(model.init, jax.random.key(0), zoo.tokens())["params"]
        _, past = jax.eval_shape(lambda p: model.apply({"params": p}, zoo.tokens(), capacity=13), params)
    assert (past["blocks"].shape, past["blocks"].dtype) == ((3, B, 6, 4), jnp.float32)


def test_decays_start_log_spaced_over_a_head_and_parameters_are_as_many_as_attentions():
    params = zoo.lm_params("none", 0, **OPTIONS)
    c = params["blocks"]["recurrence"]["decay"]["bias"]
    np.testing.assert_allclose(-1 / np.log(sigmoid(c)), np.broadcast_to(np.geomspace(*TAU, 4), c.shape), rtol=1e-4)
    attention = zoo.lm_params("none", 0, dims=OPTIONS["dims"])
    assert len({sum(t.size for t in jax.tree.leaves(tree)) for tree in (params, attention)}) == 1


@pytest.mark.parametrize("name", ["jo_projected", "alibi", "fox"])
def test_encodings_of_attention_are_refused(name):
    model = zoo.lm_of(preset(name), **OPTIONS)
    with pytest.raises(UserError, match=r"acts on attention, which model\.mixer = 'recurrence' has not: use none"):
        jax.eval_shape(model.init, jax.random.key(0), zoo.tokens())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.mixer": "ssm"}, r"model\.mixer = 'ssm': choose from attention, recurrence"),
        ({"model.kv_heads": 2}, r"model\.kv_heads does nothing beside model\.mixer = 'recurrence': leave its default"),
        ({"model.window": 7}, r"model\.window does nothing beside"),
        ({"model.qk_norm": "before"}, r"model\.qk_norm does nothing beside"),
        ({"model.kv_shift": True}, r"model\.kv_shift does nothing beside"),
        ({"attention": "chunked"}, r"attention does nothing beside"),
    ],
)
def test_options_of_attention_are_refused(changes, message):
    settings = config.apply_overrides(config.load(f"{QUICKSTART}none"), {"model.mixer": "recurrence"} | changes)
    with pytest.raises(UserError, match=message):
        loop.Run(settings, "quickstart", "")


def test_an_encoder_is_refused():
    with pytest.raises(UserError, match="needs an order: use it in a causal model"):
        zoo.vit_of({"name": "none"}, mixer="recurrence")


def test_the_training_step_takes_it():
    settings = config.apply_overrides(config.load(f"{QUICKSTART}sinusoidal"), {"model.mixer": "recurrence"})
    run = loop.Run(settings, "quickstart", "")
    after = jax.eval_shape(run.step_fn, run.like, run.abstract_batch())
    assert jax.tree.structure(after) == jax.tree.structure(run.like)
