"""Losses and metrics as sums over counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jojax import losses, metrics


def reference(logits, labels, smoothing):
    """Σ_v target_v · (-log p_v), target = (1-ε)·onehot + ε/V, in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    classes = logits.shape[-1]
    target = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    return -(target * log_p).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_formula(rng, smoothing):
    logits, labels = rng.normal(size=(2, 5, 7)), rng.integers(7, size=(2, 5))
    with jax.enable_x64(True):
        nll = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(labels), smoothing)
        assert nll.dtype == jnp.float64
    np.testing.assert_allclose(nll, reference(logits, labels, smoothing), rtol=1e-12)


def test_cross_entropy_of_bfloat16_is_computed_in_float32(rng):
    logits = jnp.asarray(rng.normal(size=(3, 1000)) * 3, jnp.bfloat16)
    nll = losses.cross_entropy(logits, jnp.asarray([1, 2, 999]))
    assert nll.dtype == jnp.float32
    np.testing.assert_allclose(nll, reference(np.asarray(logits, np.float64), [1, 2, 999], 0.0), rtol=1e-6)


def test_a_wrong_label_is_loud_unless_masked():
    logits = jnp.zeros((4, 3))
    labels = jnp.asarray([0, -1, 3, 2])
    nll = losses.cross_entropy(logits, labels)
    np.testing.assert_array_equal(np.isnan(nll), [False, True, True, False])
    total, count = losses.sums(nll, jnp.asarray([1, 0, 0, 1]))
    np.testing.assert_allclose(total, 2 * np.log(3), rtol=1e-6)
    assert count == 2

    def masked(logits):
        return losses.sums(losses.cross_entropy(logits, labels), jnp.asarray([1, 0, 0, 1]))[0]

    grads = jax.grad(masked)(logits)
    assert np.isfinite(grads).all()
    np.testing.assert_array_equal(grads[1:3], 0)
    np.testing.assert_allclose(grads[0], [1 / 3 - 1, 1 / 3, 1 / 3], rtol=1e-6)


def test_sums_weigh(rng):
    nll, weight = rng.normal(size=(3, 4)), rng.uniform(size=(3, 1))
    total, count = losses.sums(jnp.asarray(nll, jnp.float32), jnp.asarray(weight))
    np.testing.assert_allclose(total, (nll * weight).sum(), rtol=1e-5)
    np.testing.assert_allclose(count, weight.sum() * 4, rtol=1e-6)
    total, _ = losses.sums(jnp.asarray([True, True, False]), jnp.asarray([0.5, 0.25, 4.0]))
    assert total == 0.75 and total.dtype == jnp.float32


def test_text_metrics_over_uneven_batches_are_those_of_all_tokens(rng):
    nll = rng.exponential(size=(5, 6))
    size = rng.integers(1, 5, size=(5, 6))
    mask = rng.integers(2, size=(5, 6))
    mask[3:] = [[1, 0, 0, 0, 0, 0]] * 2  # the last batch is nearly empty: a mean of means would show
    nll[mask == 0] = np.nan  # what a padded row computes is nobody's business
    total = None
    for rows in (slice(0, 3), slice(3, 5)):
        parts = {"nll": nll[rows], "bytes": size[rows], "mask": mask[rows]}
        make = jax.jit(lambda parts: metrics.Text.single_from_model_output(**parts))
        batch = metrics.host(make(jax.tree.map(jnp.asarray, parts)))
        total = batch if total is None else total.merge(batch)
    on = mask == 1
    values = metrics.values(total)
    np.testing.assert_allclose(values["loss"], nll[on].mean(), rtol=1e-6)
    np.testing.assert_allclose(values["perplexity"], np.exp(nll[on].mean()), rtol=1e-6)
    np.testing.assert_allclose(values["bits_per_byte"], nll[on].sum() / np.log(2) / size[on].sum(), rtol=1e-6)
    assert metrics.scored(total) == on.sum()


def test_image_metrics_and_counts_beyond_float32():
    one = metrics.host(
        metrics.Images.single_from_model_output(
            nll=jnp.asarray([1.0, 3.0]), correct=jnp.asarray([True, False]), mask=jnp.asarray([1, 1])
        )
    )
    assert metrics.values(one) == {"loss": 2.0, "accuracy": 0.5}
    many = one.replace(loss=one.loss.replace(count=np.float64(2**24)))
    odd = one.replace(loss=one.loss.replace(count=np.float64(1)))
    assert metrics.scored(many.merge(odd)) == 2**24 + 1  # in float32: 2**24


def test_averages_of_the_training_sums():
    sums = {"loss": 6.0, "count": 4.0, "correct": 1.0, "grad_norm": 9.0, "steps": 3.0, "lr": 0.5}
    assert metrics.averages(sums) == {"loss": 1.5, "correct": 0.25, "grad_norm": 3.0, "lr": 0.5}
    assert np.isnan(metrics.averages(sums | {"count": 0.0})["loss"])
