"""Small models and plain formulas shared by the tests of encodings and models. Sizes all differ."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.encodings import PRESETS, preset
from jojax import encodings, laws
from jojax.encodings.base import Dims
from jojax.errors import UserError
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT

B, L, V = 2, 11, 17


def lm_dims(**changes):
    return Dims(**(dict(heads=6, kv_heads=3, head_dim=4, width=20, depth=3, vocab=V, length=64) | changes))


def vit_dims(**changes):
    base = dict(heads=6, kv_heads=3, head_dim=16, width=20, depth=3, axes=2, grid=(4, 5), causal=False)
    return Dims(**(base | changes))


@functools.cache
def subject(name, kind):
    """A preset for the laws."""
    return laws.models.Subject(preset(name), kind)


def holds(law, name, kind):
    finding = laws.LAWS[law].check(subject(name, kind))
    assert finding.good, finding


def _fitting(kind, key=lambda encoding: encoding):
    """Presets that models of this kind take, each mapping once."""
    found = {}
    for name in sorted(PRESETS):
        with contextlib.suppress(UserError):
            encodings.build(preset(name), laws.journeys.DIMS[kind])
            found.setdefault(str(sorted(key(preset(name)).items())), name)
    return list(found.values())


# text under one transport: that decides nothing about what is handed on; forms of grids are others' there
GRIDS = ("rope_axial", "alibi_2d", "jo_projected_2d", "grape_m_2d")
TEXT = [n for n in _fitting("text", lambda e: e | {"transport": None}) if not n.startswith(GRIDS)]
VISION = [n for n in _fitting("vision") if n != "grape_m_basis"]  # as grape_m_2d
CASES = [(n, "text") for n in TEXT] + [(n, "vision") for n in VISION if n not in TEXT]
MODELS = [(n, "text") for n in TEXT] + [(n, "vision") for n in VISION]


CLAIMS = ("RELATIVE", "NORM_PRESERVING", "CAUSAL_ONLY", "BOUNDED_LENGTH", "STREAMS", "FLAT")
MAIN = ("jo_projected", "jo_fixed", "grape_ap_strict", "rope_mixed", "comrope_ld", "jo_random")


def some(cases, every=3):
    """All cases; of each `every` that follow one another only the first by default, the others are slow tests."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.slow if i % every else ()) for i, case in enumerate(cases)]


def spread(cases):
    """All cases; of those that have class, kind and claims in common, all but one are slow tests."""
    seen, out = set(), []
    for name, kind in sorted(cases, key=lambda case: case[0] not in MAIN):
        encoding = subject(name, kind).encoding
        key = (type(encoding), kind, *(getattr(encoding, claim) for claim in CLAIMS))
        out.append(pytest.param(name, kind, marks=pytest.mark.slow if key in seen else ()))
        seen.add(key)
    return out


def families(cases):
    """One case of those that have the same class and the same parameters, for laws that compile for seconds; of each
    class the one with most parameters (with and without `advance`), the others are slow tests."""
    found = {}
    with jax.enable_x64(True):
        for name, kind in cases:
            s = subject(name, kind)
            parameters = jax.tree.structure(laws.journeys.shapes(s.encoding, s.ctx))
            found.setdefault((type(s.encoding), kind, "advance" in str(parameters), parameters), (name, kind))
    order = sorted(found, key=lambda key: -key[-1].num_leaves)
    first = {key[:-1]: key for key in reversed(order)}.values()
    return [pytest.param(*found[key], marks=() if key in first else pytest.mark.slow) for key in order]


def lm_of(encoding, dtype="float64", dims=(), model=(), **spec):
    """A language model with the encoding of a config."""
    d = lm_dims(**dict(dims))
    s = Spec(dims=d, dtype=dtype, **({"attention": "xla"} | spec))
    return LM(s, encodings.build(encoding, d, dtype), **dict(model))


def vit_of(encoding, dtype="float64", dims=(), model=(), **spec):
    d = vit_dims(**dict(dims))
    s = Spec(dims=d, dtype=dtype, **spec)
    return ViT(s, encodings.build(encoding, d, dtype), classes=7, **({"patch": (2, 3)} | dict(model)))


@functools.cache
def lm(name, *args, **options):
    return lm_of(preset(name), *args, **options)


@functools.cache
def vit(name, *args, **options):
    return vit_of(preset(name), *args, **options)


def tokens(seed=0, shape=(B, L)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape))


def noisy(params, scale=0.3, seed=5):
    """Parameters away from their start (zeros included), so that nothing is equal by accident."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda t: np.asarray(t) + scale * rng.normal(size=t.shape), params)


@functools.cache
def lm_params(name, noise=0.3, **options):
    """float64 parameters of a model of the zoo: random ones by shape (initialising compiles for seconds), or with
    noise = 0 the model's own start."""
    model = lm(name, **options)
    with jax.enable_x64(True):
        if not noise:
            params = jax.jit(model.init)(jax.random.key(1), tokens())["params"]
            return jax.tree.map(lambda t: np.asarray(t, "float64"), params)
        shapes = jax.eval_shape(model.init, jax.random.key(1), tokens())["params"]
        ones = jax.tree_util.tree_map_with_path(lambda p, t: np.full(t.shape, float(p[-1].key == "scale")), shapes)
        return noisy(ones, noise)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capacity", "train"))
def run(model, params, toks, **kw):
    return model.apply({"params": params}, toks, **kw)


def drawn(model, *inputs, **options):
    """Random float64 parameters by shape alone, so that nothing is compiled; gains near one. Call under x64."""
    return laws.models.random_params(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"], **options)
