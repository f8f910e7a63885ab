"""Every preset as it stands in a whole model, against its plain formula in float64, and beside it what the comparison
with a public library gave where there is one (public.py): one table, without a gap.

python3 -m pytest -m slow tests/test_reference_table.py -s
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import public
import reference
import reference_rotary
import test_formulas as text
import test_formulas_axes as axes
import test_formulas_comrope as comrope
import test_formulas_grape as grape
import test_formulas_kin as kin
import test_formulas_relative as relative
import test_formulas_scaled as scaled
import test_formulas_vit as images
import zoo
from configs.encodings import PRESETS, preset

pytestmark = pytest.mark.slow

DOCUMENT = 9  # random angles belong to documents


def of_draws(options, params):
    """jo_random: uniform steps of (document, position), alike in all blocks where there is no rng."""
    with jax.enable_x64(True):
        steps = text.draws(jax.random.key(0), DOCUMENT, reference.omega(text.D))
    return text.accumulated([steps] * text.DEPTH)


def of_signs(options, params):
    with jax.enable_x64(True):
        model = zoo.lm_of(options)
        ctx = text.encodings.Context(position=None, restart=None, segment=None, tokens=np.arange(zoo.V)[None])
        turns = np.asarray(model.encoding(parent=None).draws(ctx))[0]
    return text.accumulated([2 * np.pi * turns[np.asarray(text.TOKS)[0]]] * text.DEPTH)


def of_rotary(options, params):
    if not options.get("angle_noise"):
        return text.rotary(options, params)
    with jax.enable_x64(True):
        noise = text.draws(jax.random.key(0), DOCUMENT, 1)
    return reference_rotary.encode(options, params, text.T[:, None], text.G, text.D, kin.TOKENS, noise=noise)


def of_rope(options, params):
    if options.get("fraction"):
        return scaled.encode(np.array([1.0, 0]))
    if options.get("scale_method"):
        return scaled.encode(scaled.slowed("yarn", options["scale_factor"], text.D))
    return of_rotary(options, params)


def of_pairs(options, params):
    shared = params.get("encoding")
    return relative.encode(
        {"t5": relative.t5, "kerple": relative.kerple_log, "fire": relative.fire}[options["kind"]], shared
    )


def of_two(options, params):
    rotation, bias = (FORMULAS[options[part]["name"]](options[part], params) for part in ("rotation", "bias"))

    def encode(layer, p, *given):
        A, V, _ = rotation(layer, p["of_rotation"], *given)
        return A, V, bias(layer, p["of_bias"], *given)[2]

    return encode


def of_slopes(options, params):
    if options["gate"] == "alibi":
        return text.encode_alibi(params)
    return grape.encode_gated(params, options["gate"])


def but_name(options):
    return {k: v for k, v in options.items() if k != "name"}


# module -> (options, params) -> `encode` of tests/reference.py, for text
FORMULAS = {
    "none": lambda o, p: text.nope,
    "absolute": lambda o, p: text.nope,
    "grape_a": of_slopes,
    "fox": lambda o, p: grape.encode_fox(p),
    "grape_ap": lambda o, p: grape.encode_grape_ap(p, **but_name(o)),
    "grape_m": lambda o, p: grape.encode_grape_m(o),
    "relative": of_pairs,
    "rope": of_rope,
    "xpos": lambda o, p: text.encode_xpos(p),
    "joformer": of_rotary,
    "accumulated": lambda o, p: (of_signs if o.get("steps") == "token" else of_draws)(o, p),
    "jo_blocks": kin.encode_blocks,
    "householder": lambda o, p: kin.encode_householder(text.D),
    "joint": of_two,
}


def begin_text(options, params):
    if options.get("kind") == "sinusoidal":
        phase = text.T[:, None] * 1e4 ** (-np.arange(10) / 10)
        return lambda x: x * np.sqrt(20) + np.concatenate([np.sin(phase), np.cos(phase)], -1)
    if options.get("kind") == "learned" and options["name"] == "absolute":
        return lambda x: x + params["encoding"]["table"][: text.L]
    return lambda x: x


def text_error(name):
    options = preset(name)
    model, params = text.model_and_params(options)
    params = jax.tree.map(np.asarray, params)
    position = relative.FAR if options["name"] == "relative" else text.T
    where = dict(position=jnp.asarray(position)[None], segment=jnp.full((1, text.L), DOCUMENT))
    got = text.logits(model, params, **where)
    if options.get("scale_method") == "yarn":
        params = scaled.sharpened(params, (0.1 * np.log(options["scale_factor"]) + 1) ** 2)
    encode = FORMULAS[options["name"]](options, params)
    return np.abs(got - text.formula(params, encode, begin_text(options, params))).max()


def image_formula(options, params, pool):
    """(encode, begin)"""
    name, same = options["name"], lambda x: x
    if name in ("absolute", "ape_grid"):
        return images.nope, begin_image(options, params, pool)
    if name == "relative":
        of_pair = relative.table_entry(images.GRIDS[pool])
        if options["kind"] == "alibi":
            of_pair = lambda p, far: -relative.SLOPES * np.abs(far).sum()  # noqa: E731
        return relative.encode_grid(pool, of_pair), same
    if name in ("comrope", "liere") or options.get("coord"):
        return comrope.encode(options, params, pool, images.GRIDS[pool]), same
    if name == "grape_m":
        return axes.encode_image(options, pool), same
    return images.rotary(options, params, pool), same


def begin_image(options, params, pool):
    if options["name"] == "ape_grid":
        u = comrope.coordinates({"coord": "unit_center"}, pool, images.GRIDS[pool], (0, 0), None)
        added = np.array([comrope.read(params["encoding"]["table"], site) for site in u])
    elif options["kind"] == "learned":
        added = params["encoding"]["table"]
    else:
        added = np.concatenate([*map(images.sincos, images.places(pool))], -1)
    return lambda x: x + np.concatenate([np.zeros((len(x) - len(added), images.C)), added])


def image_error(name, pool="cls"):
    options = preset(name)
    model, params = images.model_and_params(options, pool)
    params = jax.tree.map(np.asarray, params)
    encode, begin = image_formula(options, params, pool)
    return np.abs(images.logits(model, params) - images.formula(params, encode, begin)).max()


def test_every_preset_equals_its_formula(capsys):
    rows = [(n, "text", text_error(n)) for n in sorted(PRESETS) if (n, "text") in zoo.MODELS or n == "rope"]
    rows += [(n, "images", image_error(n)) for n in sorted(PRESETS) if (n, "vision") in zoo.MODELS and n != "none"]
    beside = public.public_errors()
    with capsys.disabled():
        print("\n| encoding | model | max error of the logits | to a library, relative | library |")
        print("| --- | --- | --- | --- | --- |")
        for name, kind, error in rows:
            library, apart = beside.get(name, ("", None))
            print(f"| {name} | {kind} | {error:.1e} | {'' if apart is None else f'{apart:.1e}'} | {library} |")
    assert beside.keys() <= {name for name, *_ in rows}
    assert {name for name, *_ in rows} | {"rope_matched"} >= set(PRESETS)
    assert all(error < 1e-10 for *_, error in rows)
