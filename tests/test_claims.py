"""What encodings claim of themselves, for every preset, on the encoding alone: what is claimed holds, what is not
claimed fails. The claims RELATIVE and STREAMS are in test_contract.py; the laws that can fail are in test_laws.py."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import zoo
from configs.encodings import PRESETS, preset
from jojax import encodings, laws
from jojax.errors import UserError
from jojax.laws import journeys


@pytest.mark.parametrize("law", ["norms", "flat", "order", "bounded", "odd"])
@pytest.mark.parametrize(("name", "kind"), zoo.spread(zoo.CASES))
def test_claims(name, kind, law):
    zoo.holds(law, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["bfloat16", "blocks"])
@pytest.mark.parametrize(("name", "kind"), zoo.families(zoo.CASES))
def test_kernels(name, kind, law):
    zoo.holds(law, name, kind)


def test_all_presets_are_among_the_cases():
    """But for their transport."""
    covered = [{**preset(name), "transport": None} for name, _ in zoo.CASES]
    assert [name for name in PRESETS if {**preset(name), "transport": None} not in covered] == []
    assert {"RELATIVE", "NORM_PRESERVING", "CAUSAL_ONLY", "BOUNDED_LENGTH", "STREAMS", "FLAT"} == {
        law.claim.removeprefix("not ") for law in laws.LAWS.values() if law.claim
    }


@pytest.mark.parametrize(("kind", "changes"), [("text", {"length": 10}), ("vision", {"grid": (2, 6)})])
def test_a_table_says_where_it_ends(kind, changes):
    s = zoo.subject("learned", kind)
    dims = dataclasses.replace(s.dims, **changes)
    sites = f"end at {10 if kind == 'text' else 12}, the input has {s.L}"
    with jax.enable_x64(True), pytest.raises(UserError, match=sites):
        journeys.shapes(encodings.build(s.config, dims, "float64")(parent=None), s.ctx)


def test_models_refuse_what_a_bounded_encoding_has_no_answer_for():
    """A cache beyond the table, for positions to come; a grid that is smaller, or as large in another shape."""
    toks = jnp.zeros((1, 3), int)
    for name, refused in (("learned", True), ("sinusoidal", False)):
        model = zoo.lm(name, "float32", dims=(("length", 8),))
        params = jax.eval_shape(model.init, jax.random.key(0), toks)["params"]

        def run(params, capacity, model=model):
            return jax.eval_shape(lambda p: model.apply({"params": p}, toks, capacity=capacity), params)

        run(params, 8)
        if refused:
            with pytest.raises(UserError, match="ends at 8 positions; a cache of 9 is beyond it"):
                run(params, 9)
        else:
            run(params, 9)
    model, key = zoo.vit("learned", "float32"), jax.random.key(0)
    for shape in ((1, 6, 15, 3), (1, 10, 12, 3)):
        with pytest.raises(UserError, match=r"a table of \(4, 5\) patches, the image has"):
            jax.eval_shape(lambda s=shape: model.init(key, jnp.zeros(s)))
