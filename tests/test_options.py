"""Options of encodings: what is refused, in which words; encodings of the user's own, by a dotted path."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import zoo
from configs.encodings import PRESETS
from jojax import encodings
from jojax.encodings.base import Context, Encoding
from jojax.encodings.build import options
from jojax.errors import UserError

README = Path(__file__).resolve().parent.parent / "README.md"
FAMILIES = sorted({preset["name"] for preset in PRESETS.values()})
TEXT, VISION = zoo.lm_dims(), zoo.vit_dims()
CONTENT = {"name": "joformer", "angle_source": "linear"}
POSITION = {"name": "joformer", "angle_source": "position"}


def refusal(encoding, dims=TEXT):
    with pytest.raises(UserError) as caught:
        encodings.build(encoding, dims)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "option"), [(f, o) for f in FAMILIES for o in encodings.load(f).CHOICES], ids=lambda v: v
)
def test_an_unknown_choice_lists_the_valid_ones(family, option):
    valid = ", ".join(map(str, encodings.load(family).CHOICES[option]))
    assert refusal({"name": family, option: "bent"}) == f"encoding.{option} = 'bent': choose from {valid}"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_option_lists_the_valid_ones(family):
    valid = ", ".join(options(encodings.load(family)))
    said = refusal({"name": family, "rotates": True})
    assert said == f"encoding.rotates is not an option of {family!r}; it has: {valid}"
    assert "dims" not in valid and "name" not in valid.split(", ")


REFUSED = [
    # sizes that do not fit
    ({"name": "rope"}, zoo.lm_dims(head_dim=5), "model.head_dim = 5: rotary encodings pair dimensions, make it even"),
    (
        {"name": "rope", "form": "mixed"},
        TEXT,
        "encoding.form = 'mixed' does not fit the model's coordinates, which have 1 axes",
    ),
    ({"name": "rope"}, VISION, "encoding.form = '1d' does not fit the model's coordinates, which have 2 axes"),
    (
        {"name": "rope", "form": "axial"},
        zoo.vit_dims(head_dim=6),
        "encoding.form = 'axial' splits the planes of a head: make model.head_dim = 6 divisible by 4",
    ),
    (
        {"name": "rope", "form": "mixed"},
        zoo.vit_dims(head_dim=6),
        "encoding.form = 'mixed' splits the planes of a head: make model.head_dim = 6 divisible by 4",
    ),
    ({"name": "absolute"}, VISION, "encoding.kind = 'sinusoidal' does not fit coordinates with 2 axes"),
    (
        {"name": "absolute", "kind": "sincos2d"},
        TEXT,
        "encoding.kind = 'sincos2d' does not fit coordinates with 1 axes",
    ),
    ({"name": "absolute"}, zoo.lm_dims(width=21), "model.width = 21: sinusoidal needs a multiple of 2"),
    (
        {"name": "absolute", "kind": "sincos2d"},
        zoo.vit_dims(width=18),
        "model.width = 18: sincos2d needs a multiple of 4",
    ),
    (
        {"name": "absolute", "kind": "learned"},
        zoo.lm_dims(length=0),
        "encoding.kind = 'learned' needs the training length: set data.length",
    ),
    ({"name": "grape_ap", "rank": 3}, TEXT, "encoding.rank = 3: planes are turned, make it even"),
    ({"name": "grape_ap", "rank": 0}, TEXT, "encoding.rank = 0: planes are turned, make it even"),
    # an order where there is none
    *(
        ({"name": name, **more}, zoo.vit_dims(axes=1), f"encoding {cls} needs an order: use it in a causal model")
        for name, cls, more in (
            ("xpos", "XPos", {}),
            ("grape_a", "GrapeA", {}),
            ("grape_ap", "GrapeAP", {}),
            ("accumulated", "Accumulated", {}),
            ("joformer", "JoFormer", {"angle_source": "linear"}),
            ("jo_blocks", "JoBlocks", {"angle_source": "linear"}),
            ("householder", "Householder", {}),
        )
    ),
    # what does not fit together
    *(
        (
            {"name": "joformer", "angle_source": source, "accumulate": "none", "form": "axial"},
            VISION,
            f"encoding.angle_source = '{source}' reads tokens, which this model has not: "
            "choose position, own_mlp or linear",
        )
        for source in ("token_table", "ffn_flow", "token_mlp", "templates")
    ),
    (
        {"name": "householder", "source": "token_table"},
        zoo.lm_dims(vocab=0),
        "encoding.source = 'token_table' reads tokens, which this model has not: choose linear",
    ),
    (
        {"name": "accumulated", "steps": "token"},
        zoo.lm_dims(vocab=0),
        "encoding.steps = 'token' reads tokens, which this model has not",
    ),
    (
        CONTENT | {"accumulate": "raster"},
        TEXT,
        "encoding.accumulate = 'raster' reads a grid row by row: for text it is 'prefix'",
    ),
    (
        {"name": "joformer", "angle_source": "templates", "angle_templates": 1},
        TEXT,
        "encoding.angle_templates = 1: needs 2 or more to choose from",
    ),
    ({"name": "jo_blocks", "block": 3}, TEXT, "encoding.block = 3 must divide model.head_dim = 4"),
    *(
        (
            {"name": "householder", "block": block},
            TEXT,
            f"encoding.block = {block}: needs 0 (all) or blocks of 2 or more that divide 4",
        )
        for block in (-2, 1, 3)
    ),
    (
        CONTENT | {"transport": "none"},
        TEXT,
        "encoding.angle_source = 'linear' moves nothing with transport = 'none'",
    ),
    (
        POSITION | {"angle_base": "zero"},
        TEXT,
        "encoding.angle_source = 'position' with angle_base = 'zero' has no angles at all",
    ),
    *(
        (
            CONTENT | {"angle_bound": bound},
            TEXT,
            f"encoding.angle_bound = '{bound}' with angle_init = 'zero' divides by nothing: set angle_init = 'normal'",
        )
        for bound in ("norm", "norm_abs", "norm_freq")
    ),
    # names
    ({"transport": "qk"}, TEXT, "config.encoding has no name: give a module of jojax.encodings or a dotted path"),
    *(
        (
            {"name": name},
            TEXT,
            f"encoding.name = '{name}': no module {path}; name a file in jojax/encodings, or a dotted path to a "
            "module that Python finds (PYTHONPATH)",
        )
        for name, path in (
            ("ropes", "jojax.encodings.ropes"),
            ("nowhere.decay", "nowhere.decay"),
            (".decay", ".decay"),
            ("my-package.decay", "my-package.decay"),
            ("json.decoder.Rope", "json.decoder.Rope"),
            ("json.decoder.JSONDecoder", "json.decoder.JSONDecoder"),
        )
    ),
]


@pytest.mark.parametrize(("encoding", "dims", "sentence"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit_or_does_nothing_is_refused(encoding, dims, sentence):
    assert refusal(encoding, dims) == sentence


LEARNED_FORM = "published frequencies of form = '1d'"
IDLE = [
    ({"name": "rope", "form": "axial"}, "freq", "integer", LEARNED_FORM),
    ({"name": "rope", "learned": True, "freq_init": "normal"}, "freq", "integer", LEARNED_FORM),
    ({"name": "rope"}, "freq_init", "normal", "learned frequencies (learned = True)"),
    ({"name": "rope"}, "angle_share_layers", True, "parameters that blocks can share, and there are none"),
    (CONTENT, "angle_share_layers", True, "parameters that blocks can share, and there are none"),
    ({"name": "joformer"}, "angle_share_layers", True, "parameters that blocks can share, and there are none"),
    ({"name": "rope", "freq": "integer"}, "base", 100.0, "geometric frequencies"),
    ({"name": "rope", "learned": True, "freq_init": "normal"}, "base", 100.0, "geometric frequencies"),
    (CONTENT | {"angle_base": "zero"}, "base", 100.0, "geometric frequencies"),
    (CONTENT | {"angle_base": "zero"}, "learned", True, "angle_base = 'rope'"),
    *(
        (CONTENT | {"angle_base": "zero", "accumulate": "none", "form": "axial"}, option, value, "angle_base = 'rope'")
        for option, value in (("coord", "unit_center"), ("cls_pos", "center"), ("perturb_sigma", 1.0))
    ),
    (POSITION, "angle_bound", "none", "content angles (angle_source)"),
    (POSITION, "angle_init", "normal", "content angles (angle_source)"),
    (POSITION, "accumulate", "none", "content angles (angle_source)"),
    (POSITION, "step_convention", "query", "accumulated content angles"),
    (CONTENT | {"accumulate": "none"}, "step_convention", "query", "accumulated content angles"),
    ({"name": "joformer"}, "angle_ln", False, "angle_source = 'own_mlp' or 'linear' or 'token_mlp' or 'templates'"),
    (CONTENT, "angle_hidden_mult", 2.0, "angle_source = 'own_mlp' or 'token_mlp'"),
    (CONTENT, "angle_templates", 3, "angle_source = 'templates'"),
    (CONTENT | {"accumulate": "none"}, "angle_noise", True, "content angles with accumulate = 'prefix'"),
    (POSITION, "angle_noise", True, "content angles with accumulate = 'prefix'"),
    (CONTENT | {"transport": "qk"}, "v_angles", "fixed", "transport = 'qkv'"),
    (CONTENT | {"transport": "v"}, "v_angles", "stop", "transport = 'qkv'"),
    ({"name": "accumulated", "steps": "unit"}, "base", 100.0, "steps up to ω (steps = 'omega' or 'token')"),
    (
        {"name": "accumulated", "steps": "token"},
        "share_layers",
        True,
        "draws of a block's own (steps = 'omega' or 'unit')",
    ),
    ({"name": "grape_m", "kind": "plane"}, "base", 100.0, "kind = 'freq' or 'basis' or 'mix' or 'ctx'"),
    ({"name": "grape_m", "kind": "mix"}, "per_head", True, "kind = 'freq' or 'basis' or 'ctx'"),
    ({"name": "grape_m", "kind": "ctx", "phase_fn": "one"}, "per_head", True, "phases of content"),
    ({"name": "absolute", "kind": "learned"}, "base", 100.0, "waves (kind = 'sinusoidal' or 'sincos2d')"),
]


@pytest.mark.parametrize(("encoding", "option", "value", "use"), IDLE, ids=lambda v: v if isinstance(v, str) else "")
def test_an_option_that_does_nothing_beside_the_others_is_refused(encoding, option, value, use):
    dims = VISION if encoding.get("form") == "axial" else TEXT
    said = refusal(encoding | {option: value}, dims)
    assert said == f"encoding.{option} = {value!r} does nothing here: it is for {use}"
    encodings.build(
        encoding | {option: getattr(encodings.load(encoding["name"]), option)}, dims
    )  # its default may stand


@pytest.mark.parametrize(
    ("encoding", "option", "value"),
    [
        (CONTENT | {"angle_base": "zero", "angle_bound": "tanh_freq"}, "base", 100.0),
        (CONTENT | {"angle_base": "zero", "v_angles": "fixed"}, "learned", True),
        ({"name": "grape_m", "kind": "ctx"}, "per_head", True),
        ({"name": "grape_m", "kind": "ctx", "phase_fn": "one"}, "base", 100.0),
        ({"name": "rope", "learned": True}, "base", 100.0),
        ({"name": "joformer", "angle_source": "token_table"}, "angle_share_layers", True),
    ],
)
def test_an_option_that_something_reads_is_taken(encoding, option, value):
    assert getattr(encodings.build(encoding | {option: value}, TEXT)(parent=None), option) == value


def test_key_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(UserError, match=r"model\.kv_heads = 4 must divide model.heads = 6"):
        zoo.lm_dims(kv_heads=4)


# Starts of learned frequencies


@pytest.mark.parametrize("form", ["1d", "axial", "mixed"])
@pytest.mark.parametrize("shared", [False, True])
def test_learned_frequencies_start_at_the_published_ones(form, shared):
    """One set for all heads too; directions of the mixed form are drawn, the second half of planes at right angles."""
    dims, base = (TEXT, 1e4) if form == "1d" else (VISION, 10.0)
    position = np.eye(dims.axes, dtype="float32")[None]  # one unit along each axis: the angles are the frequencies
    ctx = Context(position=position, restart=None, segment=None)
    given = {"name": "rope", "form": form, "base": base, "angle_share_heads": shared}

    def omega(**more):
        encoding = encodings.build(given | more, dims)(parent=None)
        frame = encoding.init_with_output(jax.random.key(3), None, None, ctx, method="journey")[0].frame
        return np.asarray(frame.angles[0])  # [A, G or 1, D/2]

    start = omega(learned=True)
    assert start.shape == (dims.axes, 1 if shared else 3, dims.head_dim // 2)
    fixed = np.broadcast_to(omega(), start.shape)
    if form != "mixed":
        np.testing.assert_allclose(start, fixed, rtol=1e-6)
        return
    np.testing.assert_allclose(np.linalg.norm(start, axis=0), np.linalg.norm(fixed, axis=0), rtol=1e-5)
    y, x = start
    np.testing.assert_allclose(y[:, 4:], -x[:, :4], atol=1e-6)
    np.testing.assert_allclose(x[:, 4:], y[:, :4], atol=1e-6)
    assert np.abs(start - fixed).max() > 1e-2


# The user's own


def test_the_encoding_of_the_readme(package):
    """As printed there: its angles, its claim, its options; a model with it streams."""
    section = README.read_text().split("## Add an encoding")[1]
    package("decay", re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    given = {"name": "mypackage.decay", "rate": 0.02}
    assert "rate" in refusal(given | {"rte": 1}) and not encodings.load("mypackage.decay").RELATIVE
    with jax.enable_x64(True):
        toks, model, learned = zoo.tokens(), zoo.lm_of(given), zoo.lm_of(given | {"learned": True})
        assert "freq" in zoo.drawn(learned, toks)["blocks"]["encoding"]  # inherited options work
        position = np.arange(zoo.L, dtype=float)[None, :, None]
        ctx = Context(position=position, restart=None, segment=None)
        frame = encodings.build(given, TEXT, "float64")(parent=None).apply({}, None, None, ctx, method="journey").frame
        want = np.log(1 + 0.02 * position) / 0.02 * np.array([1, 0.01])
        np.testing.assert_allclose(frame.angles[0, :, 0], want[0], atol=1e-12)

        params = zoo.drawn(model, toks)
        whole, past, outs = zoo.run(model, params, toks), None, []
        for part in (toks[:, :7], toks[:, 7:]):
            out, past = zoo.run(model, params, part, past=past, capacity=zoo.L)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=1e-10)


TWO = """
from jojax.encodings import Encoding
from jojax.encodings.rope import Rope

class One(Encoding):
    pass

class Two(Encoding):
    size: int = 3
"""


def test_a_module_with_two_encodings_asks_for_the_class(package):
    package("two", TWO)
    package("empty", "from jojax.encodings.rope import Rope\n")
    for name, count in (("two", 2), ("empty", 0)):
        said = refusal({"name": f"mypackage.{name}"})
        path = f"mypackage.{name}"
        assert said == f"encoding.name = {path!r}: {path} defines {count} encodings; name one as {path}.Class"
    made = encodings.build({"name": "mypackage.two.Two", "size": 4}, TEXT)(parent=None)
    assert type(made).__name__ == "Two" and made.size == 4 and isinstance(made, Encoding)
    assert encodings.load("mypackage.two.Rope") is encodings.load("rope")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("import no_such_thing", ModuleNotFoundError, "No module named 'no_such_thing'"),
        ("from mypackage import absent", ImportError, "cannot import name 'absent' from 'mypackage'"),
        ("import mypackage.absent", ModuleNotFoundError, "No module named 'mypackage.absent'"),
    ],
)
@pytest.mark.parametrize("name", ["mypackage.broken", "mypackage.broken.Mine"])
def test_a_module_that_fails_on_its_own_import_shows_why(package, name, line, error, message):
    package("broken", f"{line}\nfrom jojax.encodings import Encoding\n\nclass Mine(Encoding):\n    pass\n")
    with pytest.raises(error, match=re.escape(message)):
        encodings.load(name)


def test_a_preset_is_a_label_and_no_option():
    assert encodings.build({"preset": "jo_fixed", "name": "rope"}, TEXT)(parent=None).transport == "qk"
