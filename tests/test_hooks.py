"""Slips in an encoding of the user's own are told in one sentence, with its class, the hook, and both shapes."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import zoo
from jojax.encodings import Edge, Encoding, Journey, PlaneFrame
from jojax.errors import UserError
from jojax.models import lm

B, L, H, G, D = zoo.B, zoo.L, 6, 3, 4


class Faulty(Encoding):
    """The journey of `given(ctx)`."""

    def journey(self, shared, carry, ctx):
        return Journey(**self.given(ctx))


def zeros(*shape):
    return jnp.zeros(shape)


class Headless(Faulty):
    given = staticmethod(lambda ctx: {"frame": PlaneFrame(zeros(B, L, D // 2))})


class AllHeads(Faulty):
    given = staticmethod(lambda ctx: {"frame": PlaneFrame(zeros(B, L, H, D // 2))})


class HalfValue(Faulty):
    given = staticmethod(lambda ctx: {"value_frame": PlaneFrame(zeros(B, L, G, 1))})


class NoFrame(Faulty):
    given = staticmethod(lambda ctx: {"frame": zeros(B, L, G, D // 2)})


class WideKey(Faulty):
    given = staticmethod(lambda ctx: {"lift": (zeros(B, L, H, 2), zeros(B, L, H, 2))})


class Ranks(Faulty):
    given = staticmethod(lambda ctx: {"lift": (zeros(B, L, H, 2), zeros(B, L, G, 3))})


class OneSided(Faulty):
    given = staticmethod(lambda ctx: {"lift": zeros(B, L, H, 2)})


@dataclasses.dataclass(frozen=True)
class Step:
    answer: Any

    def __call__(self, state, query, key, visible, weights):
        return self.answer(state, visible)


def edge(key_heads=G, answer=lambda state, visible: (state[..., None] * visible[:, None], state)):
    return {"edge": Edge(zeros(1, L, 1, 2), zeros(B, L, key_heads, 5), Step(answer))}


class WideEdge(Faulty):
    given = staticmethod(lambda ctx: edge(H))


class WholeWeights(Faulty):
    given = staticmethod(lambda ctx: {"edge": edge()["edge"].replace(weights={"slopes": zeros(H), "all": zeros(5)})})


class FlatBias(Faulty):
    given = staticmethod(lambda ctx: edge(answer=lambda state, visible: (zeros(L, L), state)))


class Stateless(Faulty):
    given = staticmethod(lambda ctx: edge(answer=lambda state, visible: zeros(B, H, L, L)))


class LostState(Faulty):
    given = staticmethod(lambda ctx: edge(answer=lambda state, visible: (zeros(B, H, L, L), state[0])))


class Unhashable(Faulty):
    given = staticmethod(lambda ctx: {"edge": edge()["edge"].replace(step=Step([]))})


class NoJourney(Encoding):
    def journey(self, shared, carry, ctx):
        return PlaneFrame(zeros(B, L, G, D // 2))


class Forgets(Encoding):
    """Its prefix is of another shape from the second chunk on."""

    def journey(self, shared, carry, ctx):
        last = ctx.x[:, -1]
        return Journey(prefix=last if ctx.prefix is None else (ctx.prefix, last))


class Bare(Encoding):
    def begin(self, x, ctx):
        return x


class Narrow(Encoding):
    def begin(self, x, ctx):
        return x[..., 1:], None, None


class Advances(Encoding):
    @nn.compact
    def begin(self, x, ctx):
        return x, None, jnp.zeros((B, L, 2))

    @nn.compact
    def advance(self, shared, carry, hidden, ctx):
        return nn.Dense(2, name="flow")(hidden)


class Grows(Advances):
    @nn.compact
    def advance(self, shared, carry, hidden, ctx):
        return nn.Dense(3, name="advance")(hidden)


class Early(Encoding):
    @nn.compact
    def journey(self, shared, carry, ctx):
        nn.Dense(2, name="advance")(ctx.x)
        return Journey()


class Nameless(Encoding):
    @nn.compact
    def journey(self, shared, carry, ctx):
        nn.Dense(2)(ctx.x)
        return Journey()


class Loose(Encoding):
    def journey(self, shared, carry, ctx):
        nn.Dense(2, name="angle")(ctx.x)
        return Journey()


class LooseParam(Encoding):
    def begin(self, x, ctx):
        return x + self.param("table", nn.initializers.zeros, (1,)), None, None


class Twice(Encoding):
    @nn.compact
    def journey(self, shared, carry, ctx):
        nn.Dense(2, name="angle")(nn.Dense(2, name="angle")(ctx.x))
        return Journey()


ON_KEYS, ON_QUERIES = "[B, L, G, …] = [2, 11, 3, 4]", "[B, L, G, …] = [2, 11, 3, 2, 4]"
NONE = "gives no answer, needs the same shape; angles are [B or 1, L, G or 1, D/2] = [2, 11, 3, 2]"
SLIPS = {
    Headless: f"journey answers frame PlaneFrame(angles [2, 11, 2]), whose dual of {ON_QUERIES} {NONE}",
    AllHeads: f"journey answers frame PlaneFrame(angles [2, 11, 6, 2]), whose apply of {ON_KEYS} {NONE}",
    HalfValue: f"journey answers value_frame PlaneFrame(angles [2, 11, 3, 1]), whose apply of {ON_KEYS} {NONE}",
    NoFrame: "journey answers an array [2, 11, 3, 2] as frame, which has no apply, invert, dual, where",
    WideKey: "journey answers the lift's key of shape [2, 11, 6, 2], needs [B, L, G, r] = [2, 11, 3, 2]",
    Ranks: "journey answers the lift's key of shape [2, 11, 3, 3], needs [B, L, G, r] = [2, 11, 3, 2]",
    OneSided: "journey answers an array [2, 11, 6, 2] as lift, needs (query, key)",
    WideEdge: "journey answers the edge's key of shape [2, 11, 6, 5], needs [B or 1, L, G or 1, s] = [2, 11, 3, 5]",
    WholeWeights: "journey answers an edge with weights of shape [5], whose last axis must be H = 6, or 1",
    FlatBias: "journey answers an edge with a bias of shape [11, 11], needs [B or 1, H, Lq, Lk] = [2, 6, 11, 11]",
    Stateless: "journey answers an edge whose step gives an array [2, 6, 11, 11], needs (bias, state)",
    LostState: "journey answers an edge whose step gives the state float64[6, 11], needs that of its first, "
    "float64[2, 6, 11]",
    Unhashable: "journey answers an edge whose step has no hash: make it a frozen dataclass of numbers and strings",
    NoJourney: "journey answers a PlaneFrame, needs a Journey",
    Bare: "begin answers an array [2, 11, 20], needs (x, shared, carry)",
    Narrow: "begin answers x of shape [2, 11, 19], needs [B, L, C] = [2, 11, 20]",
    Advances: "advance makes the parameter 'flow': its names must start with 'advance'",
    Grows: "advance answers the carry float64[2, 11, 3], needs that of the block before, float64[2, 11, 2]",
    Early: "journey makes the parameter 'advance': such a name is for the hook advance, the last block lacks it",
    Nameless: "journey makes Dense_0 without a name: give it one, like name='angle'",
    Loose: "journey makes parameters or submodules: decorate it with @nn.compact",
    LooseParam: "begin makes parameters or submodules: decorate it with @nn.compact",
    Twice: 'journey gives one name to two things: Could not create submodule "angle" in Module Twice: Name in use.',
}


def made(slip):
    return zoo.lm_of({"name": f"{__name__}.{slip.__name__}"})


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("slip", SLIPS, ids=lambda c: c.__name__)
def test_a_slip_is_one_sentence(slip):
    with pytest.raises(UserError) as caught:
        jax.eval_shape(made(slip).init, jax.random.key(0), zoo.tokens())
    assert str(caught.value) == f"encoding {slip.__name__}: {SLIPS[slip]}"


def test_a_prefix_that_changes_between_chunks():
    model, toks = made(Forgets), zoo.tokens()

    def run(params, toks, past=None):
        return model.apply({"params": params}, toks, past=past, capacity=L)

    params = jax.eval_shape(model.init, jax.random.key(0), toks)["params"]
    _, past = jax.eval_shape(run, params, toks[:, :4])
    with pytest.raises(UserError) as caught:
        jax.eval_shape(run, params, toks[:, 4:6], past)
    kind = "float64[2, 20]"
    said = f"journey answers the prefix ({kind}, {kind}), needs that of the chunk before, {kind}"
    assert str(caught.value) == f"encoding Forgets: {said}"


def test_what_advances_within_another_is_for_the_hook_advance_too():
    model = zoo.lm("jo_projected+fox")
    shapes = jax.eval_shape(model.init, jax.random.key(0), zoo.tokens())["params"]["blocks"]["encoding"]
    assert {n: t["kernel"].shape[0] for n, t in shapes["of_rotation"].items()} == {"advance": 2}
    assert len(shapes["of_bias"])


def test_what_an_encoding_raises_itself_is_left_alone():
    class Own(Encoding):
        def begin(self, x, ctx):
            raise ValueError("mine")

    model = zoo.lm("none").clone(encoding=lambda **kw: Own(dims=zoo.lm_dims(), **kw))
    with pytest.raises(ValueError, match=r"^mine"):
        jax.eval_shape(model.init, jax.random.key(0), zoo.tokens())


def test_looking_over_leaves_nothing_in_the_program(monkeypatch):
    """The traced model is the same with the hooks called bare."""
    model = zoo.lm("grape_ap_strict")
    params, toks = zoo.lm_params("grape_ap_strict"), zoo.tokens()

    def program():
        return str(jax.make_jaxpr(lambda p: model.apply({"params": p}, toks))(params))

    looked_over = program()
    monkeypatch.setattr(lm.hooks, "begin", lambda e, *a: e.begin(*a))
    monkeypatch.setattr(lm.hooks, "journey", lambda e, *a: e.journey(*a))
    monkeypatch.setattr(lm.hooks, "advance", lambda e, *a: e.advance(*a))
    assert program() == looked_over
