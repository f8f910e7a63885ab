"""Small models and plain formulas shared by the tests of encodings and models. Sizes all differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs.encodings import PRESETS, preset
from jojax import encodings
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


def _fitting(dims, *but):
    """Presets that models of these sizes take."""

    def fits(name):
        try:
            return bool(encodings.build(preset(name), dims))
        except UserError:
            return False

    return [name for name in sorted(PRESETS) if not name.startswith(but) and fits(name)]


# presets that are shown by another one as well: rope by jo_fixed
TEXT = [n for n in _fitting(lm_dims(), "rope_matched", "rope_axial", "alibi_2d") if n != "rope"]
VISION = _fitting(vit_dims(), "grape_m_basis")


def lm_of(encoding, dtype="float64", dims=(), model=(), **spec):
    """A language model with the encoding of a config."""
    d = lm_dims(**dict(dims))
    s = Spec(dims=d, dtype=dtype, **({"attention": "xla"} | spec))
    return LM(s, encodings.build(encoding, d, dtype), **dict(model))


def vit_of(encoding, dtype="float64", dims=(), model=(), **spec):
    d = vit_dims(**dict(dims))
    s = Spec(dims=d, dtype=dtype, **spec)
    return ViT(s, encodings.build(encoding, d, dtype), classes=7, patch=(2, 3), **dict(model))


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


def drawn(model, *inputs, scale=0.3, seed=7):
    """Random float64 parameters by shape alone, so that nothing is compiled; gains near one. Call under x64."""
    like = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(seed)

    def leaf(path, t):
        return (path[-1].key == "scale") + rng.normal(0, scale, t.shape)

    return jax.tree_util.tree_map_with_path(leaf, like)
