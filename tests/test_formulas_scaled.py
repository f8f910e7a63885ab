"""RoPE at other lengths and in part: frequencies against spelled-out loops, whole models against the plain formulas in
float64, the temperature that touches neither biases nor values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import zoo
from jojax import encodings
from jojax.encodings.grape_ap import LogSigmoidStep
from jojax.encodings.rope import Rope
from jojax.errors import UserError
from test_formulas import EYE, D, G, H, L, T, compare, logits, model_and_params, nope

LENGTH = 64  # trained with, in tests/zoo.py


def slowed(method, s, D, length=LENGTH, base=1e4):
    """ω plane by plane."""
    out = []
    for b in range(D // 2):
        w = base ** (-2 * b / D)
        if method == "pi":
            w = w / s
        if method == "ntk":
            w = (base * s ** (D / (D - 2))) ** (-2 * b / D)
        if method == "yarn":
            turns = length / (2 * math.pi / w)
            ramp = 0 if turns < 1 else 1 if turns > 32 else (turns - 1) / 31
            w = (1 - ramp) * w / s + ramp * w
        out.append(w)
    return np.array(out)


def frequencies(options, dims=None, params=()):
    """[A, G or 1, D/2] of an encoding alone: its angles one unit along each axis."""
    with jax.enable_x64(True):
        dims = dims or zoo.lm_dims(head_dim=64)
        encoding = encodings.build({"name": "rope", **options}, dims, "float64")(parent=None)
        ctx = encodings.Context(position=jnp.eye(dims.axes)[None], restart=None, segment=None)
        params = {"params": dict(params)}
        return np.asarray(encoding.apply(params, None, None, ctx, method="journey").frame.angles[0])


@pytest.mark.parametrize(("method", "s"), [("pi", 4.0), ("ntk", 8), ("yarn", 8), ("yarn", 2.5)])
@pytest.mark.parametrize("length", [0, 4096])
def test_frequencies_are_slowed_by_plane(method, s, length):
    options = {"scale_method": method, "scale_factor": s} | ({"trained_length": length} if method == "yarn" else {})
    got = frequencies(options)[0, 0]
    np.testing.assert_allclose(got, slowed(method, s, 64, length or LENGTH), rtol=1e-12)
    published = reference.omega(64)
    if method == "ntk" or (method == "yarn" and length):  # 64 / 2π = 10 turns are on the ramp
        assert got[0] == published[0]
    np.testing.assert_allclose(got[-1], published[-1] / s, rtol=1e-12)


def test_yarn_slows_what_a_learned_plane_turns_by():
    """By turns, not by number: here the last plane is the fastest, and the first turns backwards."""
    omega = np.array([-0.001, 0.5, 20.0])
    options = {"learned": True, "scale_method": "yarn", "scale_factor": 4.0, "angle_share_heads": True}
    got = frequencies(options, zoo.lm_dims(head_dim=6), {"freq": jnp.asarray(omega)[None, None]})[0, 0]
    ramp = (0.5 * LENGTH / (2 * np.pi) - 1) / 31
    np.testing.assert_allclose(got, [-0.001 / 4, 0.5 * (ramp + (1 - ramp) / 4), 20.0], rtol=1e-6)


def encode(omega, values=False):
    A = reference.frames(np.broadcast_to(T[:, None, None] * omega, (L, G, D // 2)))
    return lambda layer, p, h, x, before: (A, A if values else None, 0)


def sharpened(params, factor):
    """Logits times `factor`, through the projection of queries."""
    query = jax.tree.map(lambda t: factor * np.asarray(t), params["blocks"]["query"])
    return params | {"blocks": params["blocks"] | {"query": query}}


@pytest.mark.parametrize("transport", zoo.some(["qkv", "qk", "v"]))
def test_yarn_in_a_model(transport):
    """The temperature is for q·k: values travel through the same frames and keep their size."""
    options = {"scale_method": "yarn", "scale_factor": 8.0, "base": 50.0, "transport": transport}
    model, params = model_and_params({"name": "rope", **options})
    omega = slowed("yarn", 8, D, base=50.0)
    A = encode(omega, values=True)(0, None, None, None, None)[0]

    def right(*_):
        return A if "qk" in transport else EYE, A if "v" in transport else None, 0

    got, factor = logits(model, params), (0.1 * math.log(8) + 1) ** 2 if "qk" in transport else 1.0
    wrong = [
        encode(reference.omega(D, 50.0), "v" in transport),
        encode(slowed("pi", 8, D, base=50.0), "v" in transport),
    ]
    compare(got, sharpened(params, factor), right, nope, *wrong)
    if factor > 1:
        assert abs(factor - 1.4591) < 1e-4
        for other in (params, sharpened(params, factor**0.5)):
            with pytest.raises(AssertionError):
                compare(got, other, right)


@pytest.mark.parametrize(("method", "s"), [("pi", 3.0), ("ntk", 16.0)])
def test_interpolation_in_a_model(method, s):
    model, params = model_and_params({"name": "rope", "scale_method": method, "scale_factor": s, "transport": "qkv"})
    other = {"pi": "ntk", "ntk": "pi"}[method]
    wrong = encode(reference.omega(D), True), encode(slowed(other, s, D), True)
    compare(logits(model, params), params, encode(slowed(method, s, D), True), nope, *wrong)


def test_content_angles_keep_their_size_and_the_base_slows_down():
    options = {"name": "joformer", "angle_source": "linear", "angle_bound": "none", "accumulate": "none"}
    model, params = model_and_params(options | {"scale_method": "pi", "scale_factor": 4.0})

    def right(omega):
        def of_block(layer, p, h, x, before):
            delta = reference.dense(h, p["angle_out"]).reshape(L, -1, D // 2)
            A = reference.frames(np.broadcast_to(delta + T[:, None, None] * omega, (L, G, D // 2)))
            return A, A, 0

        return of_block

    compare(logits(model, params), params, right(reference.omega(D) / 4), nope, right(reference.omega(D)))


class Biased(Rope):
    """With ALiBi as a lift and a path sum as an edge, which no temperature may touch."""

    edge: bool = False

    def journey(self, shared, carry, ctx):
        query = jnp.ones((*ctx.x.shape[:2], H, 8)) * jnp.asarray(SLOPES)[:, None]
        at = jnp.broadcast_to(ctx.position[..., None], (*ctx.x.shape[:2], G, 1))
        journey = super().journey(shared, carry, ctx)
        if not self.edge:
            return journey.replace(lift=(query[..., :1], at))
        return journey.replace(
            edge=encodings.Edge(query, jnp.ones_like(query[:, :, :G]), LogSigmoidStep(), jnp.asarray(SLOPES))
        )


SLOPES = reference.slopes(H)


@pytest.mark.parametrize("edge", [False, True])
def test_a_temperature_leaves_biases_alone(edge):
    options = {"name": f"{__name__}.Biased", "edge": edge, "scale_method": "yarn", "scale_factor": 8.0}
    model, params = model_and_params(options)
    step = np.log1p(np.exp(-SLOPES)) if edge else 1  # alike at all sites
    bias = -(SLOPES * step)[:, None, None] * (T[:, None] - T)

    def right(*_):
        return encode(slowed("yarn", 8, D))(*_)[0], None, bias

    factor = (0.1 * math.log(8) + 1) ** 2
    wrong = lambda *_: (right(*_)[0], None, factor * bias)  # noqa: E731
    compare(logits(model, params), sharpened(params, factor), right, encode(slowed("yarn", 8, D)), wrong)


# In part


def test_part_of_the_planes_turn():
    """The fastest ones, at the frequencies they have among all; of each axis; learned ones too."""
    published = reference.omega(64)
    np.testing.assert_allclose(frequencies({"fraction": 0.25})[0, 0], [*published[:8], *np.zeros(24)], rtol=1e-12)
    model, params = model_and_params({"name": "rope", "fraction": 0.75, "transport": "qkv"})  # of 2 planes one
    wrong = encode(np.array([0, 0.01]), True), encode(reference.omega(D), True), encode(np.array([1.0, 0]))
    compare(logits(model, params), params, encode(np.array([1.0, 0]), True), nope, *wrong)
    axial = frequencies({"form": "axial", "fraction": 0.5, "base": 16.0}, zoo.vit_dims())
    one = [1, 0.5, 0, 0]
    np.testing.assert_allclose(axial[:, 0], [[*one, 0, 0, 0, 0], [0, 0, 0, 0, *one]], rtol=1e-12)
    freq = np.arange(1.0, 17).reshape(2, 1, 8)
    mixed = {"form": "mixed", "learned": True, "angle_share_heads": True, "fraction": 0.25}
    got = frequencies(mixed, zoo.vit_dims(), {"freq": jnp.asarray(freq)})
    np.testing.assert_allclose(got[:, 0], [[1, 0, 0, 0, 5, 0, 0, 0], [9, 0, 0, 0, 13, 0, 0, 0]], rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 1.5}, r"encoding\.fraction = 1\.5: needs a part of the 2 planes, up to 1"),
        ({"fraction": 0.4}, r"encoding\.fraction = 0\.4: needs a part of the 2 planes"),
        ({"scale_method": "yarn"}, r"'yarn': set encoding\.scale_factor to the number of training lengths, above 1"),
        (
            {"scale_factor": 2.0},
            r"scale_factor = 2\.0 does nothing here: it is for scale_method = 'pi', 'ntk' or 'yarn'",
        ),
        ({"scale_method": "pi", "scale_factor": 2.0, "trained_length": 9}, r"trained_length = 9 does nothing here"),
        ({"scale_method": "ntk", "scale_factor": 2.0, "freq": "integer"}, r"'ntk' is for geometric frequencies"),
        ({"name": "joformer", "angle_base": "zero", "fraction": 0.5}, r"nothing here: it is for angle_base = 'rope'"),
    ],
)
def test_refused(options, words):
    with pytest.raises(UserError, match=words):
        encodings.build({"name": "rope"} | options, zoo.lm_dims())


def test_scaling_is_for_text_of_a_known_length():
    scaled = {"name": "rope", "scale_method": "yarn", "scale_factor": 2.0}
    with pytest.raises(UserError, match=r"scale_method = 'yarn' does nothing here: it is for text \(form = '1d'\)"):
        encodings.build(scaled | {"form": "axial"}, zoo.vit_dims())
    with pytest.raises(UserError, match=r"'yarn' needs the training length: set encoding\.trained_length"):
        encodings.build(scaled, zoo.lm_dims(length=0))
