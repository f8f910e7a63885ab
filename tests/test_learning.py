"""Every preset learns what needs order, and what has none does not: a copy task for text, a direction for images.

- text: at each site, name the token of the site before
- images: two marks, red and blue; which quadrant of red does blue stand in? A bag of patches cannot tell
Both are trained for some seconds in float32, one seed; what `none` reaches without causality, or with patches in
random order, is the mark to beat.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from configs.encodings import PRESETS, preset
from jojax import encodings
from jojax.encodings.base import Dims
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT

TOKENS, LENGTH, STEPS, ROWS = 12, 14, 300, 32
TEXT = dict(heads=4, kv_heads=2, head_dim=16, width=64, depth=2, vocab=TOKENS, length=LENGTH)
IMAGE = dict(heads=4, kv_heads=2, head_dim=16, width=64, depth=2, axes=2, grid=(4, 5), causal=False)

pytestmark = pytest.mark.slow


def text(rng):
    tokens = rng.integers(0, TOKENS, (ROWS, LENGTH + 1))
    return tokens[:, 1:], tokens[:, :-1]


def image(rng, shuffled=False):
    """Images [B, 8, 15, 3] of patches 2 × 3, quadrants [B, 1]."""
    h, w = IMAGE["grid"]
    red = np.stack([rng.integers(0, h, 4 * ROWS), rng.integers(0, w, 4 * ROWS)], 1)
    blue = np.stack([rng.integers(0, h, 4 * ROWS), rng.integers(0, w, 4 * ROWS)], 1)
    kept = np.flatnonzero((red != blue).all(1))[:ROWS]
    patches, row = np.zeros((ROWS, h, w, 3)), np.arange(ROWS)
    for place, channel in ((red[kept], 0), (blue[kept], 2)):
        patches[row, place[:, 0], place[:, 1], channel] = 1
    if shuffled:
        patches = rng.permuted(patches.reshape(ROWS, h * w, 3), axis=1).reshape(patches.shape)
    down, right = (blue[kept] > red[kept]).T
    return patches.repeat(2, 1).repeat(3, 2).astype("float32"), (2 * down + right)[:, None]


def accuracy(model, draw, steps=STEPS, lr=3e-3):
    """Of the last batches, none of which it has seen before."""
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0, lr, 30, steps))
    rng = np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), draw(rng)[0])["params"]

    def loss(params, given, wanted, key):
        logits = model.apply({"params": params}, given, train=True, rngs={"encoding": key, "dropout": key})
        logits = logits.reshape(*wanted.shape, -1)[:, -wanted.shape[1] :]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean(), logits

    @jax.jit
    def step(params, opt, given, wanted, key):
        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params, given, wanted, key)
        change, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, change), opt, (logits.argmax(-1) == wanted)[:, min(1, wanted.shape[1] - 1) :]

    opt, right = tx.init(params), []
    for i in range(steps):
        params, opt, hit = step(params, opt, *draw(rng), jax.random.key(i))
        right.append(hit)
    return float(jnp.mean(jnp.stack(right[-20:])))


def lm(encoding, **changes):
    dims = Dims(**TEXT | changes)
    return LM(Spec(dims=dims, attention="xla"), encodings.build(encoding, dims))


def vit(encoding, **changes):
    dims = Dims(**IMAGE | changes)
    return ViT(Spec(dims=dims), encodings.build(encoding, dims), classes=4, patch=(2, 3), pool="mean")


@functools.cache
def floor(kind):
    """What order-blind models reach."""
    if kind == "text":
        return accuracy(lm({"name": "none"}, causal=False), text)
    return max(
        accuracy(vit({"name": "none"}), image),
        accuracy(vit(preset("rope_axial")), functools.partial(image, shuffled=True)),
    )


@pytest.mark.parametrize("name", zoo.TEXT)
def test_text(name):
    assert floor("text") < 0.5
    assert accuracy(lm(preset(name)), text) > 0.9


@pytest.mark.parametrize("name", [n for n in zoo.VISION if n != "none"])
def test_images(name):
    assert floor("images") < 0.5
    assert accuracy(vit(preset(name)), image) > 0.8


def test_every_preset_is_here():
    assert set(zoo.TEXT) | set(zoo.VISION) >= set(PRESETS) - {"rope", "rope_matched"}
