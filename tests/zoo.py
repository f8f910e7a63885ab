"""Small models and plain formulas shared by the tests of encodings and models. Sizes all differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs.encodings import PRESETS, preset
from jojax import encodings
from jojax.encodings.base import Dims
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT

B, L, V = 2, 11, 17

TEXT = sorted(n for n, p in PRESETS.items() if p.get("form", "1d") == "1d" and p.get("kind") != "sincos2d")
VISION = sorted(
    n for n, p in PRESETS.items() if p.get("form") in ("axial", "mixed") or n in ("none", "learned", "sincos2d")
)


def lm_dims(**changes):
    return Dims(**(dict(heads=6, kv_heads=3, head_dim=4, width=20, depth=3, vocab=V, length=64) | changes))


@functools.cache
def lm(name, dtype="float64", dims=(), model=(), **spec):
    d = lm_dims(**dict(dims))
    s = Spec(dims=d, dtype=dtype, **({"attention": "xla"} | spec))
    return LM(s, encodings.build(preset(name), d, dtype), **dict(model))


@functools.cache
def vit(name, dtype="float64", dims=(), model=(), **spec):
    base = dict(heads=6, kv_heads=3, head_dim=8, width=20, depth=3, axes=2, grid=(4, 5), causal=False)
    d = Dims(**(base | dict(dims)))
    s = Spec(dims=d, dtype=dtype, **spec)
    return ViT(s, encodings.build(preset(name), d, dtype), classes=7, patch=(2, 3), **dict(model))


def tokens(seed=0, shape=(B, L)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape))


def noisy(params, scale=0.3, seed=5):
    """Parameters away from their start (zeros included), so that nothing is equal by accident."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [t + scale * jax.random.normal(k, t.shape, t.dtype) for t, k in zip(leaves, keys, strict=True)]
    )


@functools.cache
def lm_params(name, noise=0.3, **options):
    model = lm(name, **options)
    with jax.enable_x64(True):
        params = jax.jit(model.init)(jax.random.key(1), tokens())["params"]
        params = jax.tree.map(lambda t: t.astype("float64"), params)
        return noisy(params, noise) if noise else params


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capacity", "train"))
def run(model, params, toks, **kw):
    return model.apply({"params": params}, toks, **kw)
