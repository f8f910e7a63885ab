"""Every kind of encoding learns what needs order, and what is blind to it does not: seconds in float32, one seed.

- text: at each site, name the token of the site before
- images: half of the patches are light, half dark; a board of squares, or two halves? A bag of patches cannot tell
What `none` reaches without causality, or with patches in random order, is the mark to beat.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import zoo
from configs.encodings import preset
from jojax import encodings
from jojax.encodings.base import Dims
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT

TOKENS, LENGTH, ROWS = 12, 14, 16
PART = 50  # steps between two looks at what it has learned
TEXT = dict(heads=4, kv_heads=2, head_dim=16, width=64, depth=2, vocab=TOKENS, length=LENGTH)
IMAGE = dict(heads=4, kv_heads=2, head_dim=16, width=64, depth=2, axes=2, grid=(4, 6), causal=False)
# the tests compile without optimisation; a loop of hundreds of steps is worth it
OPTIONS = {"xla_backend_optimization_level": 1}

pytestmark = pytest.mark.slow


def before(rng):
    tokens = rng.integers(0, TOKENS, (ROWS, LENGTH + 1))
    return tokens[:, 1:], tokens[:, :-1]


def board(rng, shuffled=False):
    """Images [B, 8, 18, 3] of patches 2 × 3; is each a board [B, 1]?"""
    y, x = np.indices(IMAGE["grid"])
    kind = rng.integers(0, 2, ROWS)
    light = np.stack([x // 3, (x + y) % 2])[kind]
    if shuffled:
        light = rng.permuted(light.reshape(ROWS, -1), axis=1).reshape(light.shape)
    patches = (2.0 * light - 1)[..., None].repeat(3, -1)
    return patches.repeat(2, 1).repeat(3, 2).astype("float32"), kind[:, None]


def accuracy(model, draw, steps, enough=1.0, lr=3e-3):
    """Of the last twenty of `steps` batches, none seen before, or of earlier ones that are `enough`; the first site of
    a text has none before it."""
    rng, tx = np.random.default_rng(0), optax.adam(optax.warmup_cosine_decay_schedule(0, lr, 30, steps))
    given, wanted = map(np.stack, zip(*(draw(rng) for _ in range(steps)), strict=True))
    # one vector of all parameters: half of the time to compile
    params, tree = ravel_pytree(jax.jit(model.init)(jax.random.key(0), given[0])["params"])

    def loss(params, given, wanted, key):
        rngs = {"encoding": key, "dropout": key}
        logits = model.apply({"params": tree(params)}, given, train=True, rngs=rngs).reshape(*wanted.shape, -1)
        right = (logits.argmax(-1) == wanted)[:, min(1, wanted.shape[1] - 1) :].mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean(), right

    def step(carry, batch):
        params, opt = carry
        (_, right), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        change, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, change), opt), right

    carry, train = (params, tx.init(params)), jax.jit(functools.partial(jax.lax.scan, step))
    batches = [t.reshape(-1, PART, *t.shape[1:]) for t in (given, wanted, jax.random.split(jax.random.key(1), steps))]
    train = train.lower(carry, [t[0] for t in batches]).compile(OPTIONS)
    for part in zip(*batches, strict=True):
        carry, right = train(carry, list(part))
        found = float(jnp.mean(right[-20:]))
        if found > enough:
            break
    return found


def lm(encoding, **changes):
    dims = Dims(**TEXT | changes)
    return LM(Spec(dims=dims, attention="xla"), encodings.build(encoding, dims))


def vit(encoding):
    dims = Dims(**IMAGE)
    return ViT(Spec(dims=dims), encodings.build(encoding, dims), classes=2, patch=(2, 3), pool="mean")


def one_a_class(kind):
    """The preset with most parameters."""
    return [case.values[0] for case in zoo.families(case for case in zoo.MODELS if case[1] == kind) if not case.marks]


def test_models_blind_to_order_do_not_learn():
    assert accuracy(lm({"name": "none"}, causal=False), before, 250) < 0.4
    assert accuracy(vit({"name": "none"}), board, 200) < 0.7
    assert accuracy(vit(preset("rope_axial")), functools.partial(board, shuffled=True), 200) < 0.7


@pytest.mark.parametrize("name", one_a_class("text"))
def test_text(name):
    assert accuracy(lm(preset(name)), before, 250, 0.9) > 0.85


@pytest.mark.parametrize("name", [n for n in one_a_class("vision") if n != "none"])
def test_images(name):
    assert accuracy(vit(preset(name)), board, 600, 0.9) > 0.9  # frequencies that start near zero take longest
