"""AdamW against plain NumPy, parameter groups, clipping, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jojax import optim
from jojax.errors import UserError

BASE = dict(lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.3, clip=0.0, b1=0.8, b2=0.95, eps=1e-3)


def tree(rng):
    return {
        "embed": {"embedding": rng.normal(size=(11, 6))},
        "blocks": {
            "norm": {"scale": rng.normal(size=(2, 6))},
            "qkv": {"kernel": rng.normal(size=(2, 6, 3, 5)), "bias": rng.normal(size=(2, 3, 5))},
            "layer_scale": rng.normal(size=(2, 6)),
            "encoding": {"angle": {"kernel": rng.normal(size=(2, 6, 4)), "bias": rng.normal(size=(2, 4))}},
        },
        "encoding": {"table": {"embedding": rng.normal(size=(11, 3))}},
        "cls": rng.normal(size=(1, 1, 6)),
        "head": {"kernel": rng.normal(size=(6, 1)), "bias": rng.normal(size=(1,))},
    }


GROUPS = {
    "embed": {"embedding": "body"},
    "blocks": {
        "norm": {"scale": "no_decay"},
        "qkv": {"kernel": "body", "bias": "no_decay"},
        "layer_scale": "no_decay",
        "encoding": {"angle": {"kernel": "encoding", "bias": "encoding"}},
    },
    "encoding": {"table": {"embedding": "encoding"}},
    "cls": "no_decay",
    "head": {"kernel": "body", "bias": "no_decay"},
}


def numpy_adamw(params, all_grads, cfg, rates, decaying):
    """Loshchilov & Hutter 2019, algorithm 2, with bias correction; a dict of leaves by group."""
    leaves, treedef = jax.tree.flatten(params)
    groups = jax.tree.leaves(GROUPS)
    first, second = [0 * p for p in leaves], [0 * p for p in leaves]
    for t, grads in enumerate(all_grads, 1):
        grads = jax.tree.leaves(grads)
        if cfg["clip"]:
            norm = np.sqrt(sum((g**2).sum() for g in grads))
            grads = [g * min(1, cfg["clip"] / norm) for g in grads]
        for i, (g, group) in enumerate(zip(grads, groups, strict=True)):
            first[i] = cfg["b1"] * first[i] + (1 - cfg["b1"]) * g
            second[i] = cfg["b2"] * second[i] + (1 - cfg["b2"]) * g**2
            m, v = first[i] / (1 - cfg["b1"] ** t), second[i] / (1 - cfg["b2"] ** t)
            rate = rates[t - 1] * (cfg.get("encoding_lr", 1.0) if group == "encoding" else 1.0)
            decay = cfg["weight_decay"] if group in decaying else 0
            leaves[i] = leaves[i] - rate * (m / (np.sqrt(v) + cfg["eps"]) + decay * leaves[i])
    return treedef.unflatten(leaves)


def run(cfg, params, all_grads, steps=10, start=0):
    tx = optim.make(ConfigDict(cfg), steps, params, start)

    @jax.jit
    def update(params, state, grads, step):
        updates, state = tx.update(grads, state, params, step=step)
        return jax.tree.map(jnp.add, params, updates), state

    state = tx.init(params)
    for step, grads in enumerate(all_grads, start):
        params, state = update(params, state, grads, step)
    return params, state


@pytest.mark.parametrize(
    ("changes", "decaying"),
    [
        ({}, {"body"}),
        ({"encoding_lr": 0.1}, {"body"}),
        ({"encoding_decay": True, "encoding_lr": 3.0}, {"body", "encoding"}),
        ({"decay_norm_bias": True, "encoding_decay": True}, {"body", "no_decay", "encoding"}),
        ({"clip": 0.5}, {"body"}),
        ({"clip": 1e6}, {"body"}),
        ({"schedule": "linear", "warmup_steps": 2}, {"body"}),
    ],
)
def test_three_steps_are_numpy_adamw(rng, changes, decaying):
    cfg = BASE | changes
    rates = [0.0, 0.05, 0.1] if cfg["warmup_steps"] else [0.1] * 3
    with jax.enable_x64(True):
        params, grads = tree(rng), [tree(rng) for _ in range(3)]
        got, state = run(cfg, jax.tree.map(jnp.asarray, params), grads)
        want = numpy_adamw(params, grads, cfg, rates, decaying)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-8), got, want)
    np.testing.assert_allclose(state[-1].learning_rate, rates[-1], rtol=1e-6)


def test_lamb_is_optax_s_a_block_at_a_time(rng):
    """Equal to optax.lamb on a tree where every block stands alone and only what decays is adapted."""
    cfg = BASE | {"name": "lamb", "weight_decay": 0.3}
    apart = lambda t: {f"{k}{i}": v[i] for k, v in t.items() for i in range(len(v))}  # noqa: E731
    with jax.enable_x64(True):
        kernels = {"kernel": rng.normal(size=(3, 4, 5)), "wide": rng.normal(size=(3, 2, 4, 5))}
        params = {"blocks": {**kernels, "scale": rng.normal(size=(3, 4))}}
        grads = [jax.tree.map(lambda t: rng.normal(size=t.shape), params) for _ in range(3)]
        got, _ = run(cfg, jax.tree.map(jnp.asarray, params), grads)
        tx = optax.lamb(0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3)
        want = {k: v for k, v in apart(params["blocks"]).items() if "scale" not in k}
        state = tx.init(want)
        for g in grads:
            g = {k: v for k, v in apart(g["blocks"]).items() if k in want}
            updates, state = tx.update(g, state, want)
            want = optax.apply_updates(want, updates)
        found = apart(got["blocks"])
        for key, leaf in want.items():
            np.testing.assert_allclose(found[key], leaf, rtol=1e-6)
        plain, _ = run(BASE, jax.tree.map(jnp.asarray, params), grads)
    np.testing.assert_array_equal(got["blocks"]["scale"], plain["blocks"]["scale"])  # what does not decay: Adam's
    assert not np.allclose(got["blocks"]["kernel"], plain["blocks"]["kernel"], atol=1e-3)


def test_labels(rng):
    assert optim.labels(tree(rng)) == GROUPS
    # the name must be the whole component
    other = {"encodings": {"kernel": np.zeros((2, 3))}, "blocks_x": {"gain": np.zeros((2, 3))}}
    assert optim.labels(other) == {"encodings": {"kernel": "body"}, "blocks_x": {"gain": "body"}}


def test_labels_of_one_stacked_layer():
    one = {"blocks": {"mlp": {"kernel": np.zeros((1, 4, 8)), "gain": np.zeros((1, 8))}}}
    assert optim.labels(one) == {"blocks": {"mlp": {"kernel": "body", "gain": "no_decay"}}}


def test_clipping_sees_all_groups_together():
    """Scaling the encoding's gradient changes the body's step, because the norm is global."""
    params = {"head": {"kernel": jnp.ones((2, 3))}, "encoding": {"angle": jnp.ones(4)}}
    quiet = jax.tree.map(jnp.ones_like, params)
    loud = quiet | {"encoding": {"angle": 100 * jnp.ones(4)}}
    for clip, same in ((0.0, True), (0.5, False)):
        steps = [run(BASE | {"clip": clip}, params, [grads])[0]["head"]["kernel"] for grads in (quiet, loud)]
        assert np.allclose(*steps, atol=1e-5) is same


def test_the_schedule_follows_the_given_step_not_a_counter():
    cfg = BASE | {"schedule": "cosine", "warmup_steps": 4}
    params = {"w": jnp.ones(3)}
    tx = optim.make(ConfigDict(cfg), 20, params)
    for step, rate in ((0, 0.0), (2, 0.05), (12, 0.05)):  # on the way up, half-way down
        _, state = tx.update(params, tx.init(params), params, step=step)
        np.testing.assert_allclose(state[-1].learning_rate, rate, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "points"),
    [
        (
            "cosine",
            {0: 0, 5: 1.0, 10: 2.0, 35: 0.2 + 1.8 * (1 + np.cos(np.pi * 25 / 40)) / 2, 50: 0.2, 60: 0.2},
        ),
        ("linear", {0: 0, 5: 1.0, 10: 2.0, 30: 1.1, 50: 0.2, 60: 0.2}),
        ("constant", {0: 0, 5: 1.0, 10: 2.0, 50: 2.0}),
    ],
)
def test_schedules(name, points):
    cfg = ConfigDict(dict(lr=2.0, schedule=name, warmup_steps=10, end_lr_fraction=0.1 * (name != "constant")))
    for start in (0, 100):
        rate = optim.schedule(cfg, 50, start)
        np.testing.assert_allclose([rate(start + t) for t in points], list(points.values()), rtol=1e-5)
    assert optim.schedule(ConfigDict(dict(lr=2.0)), 50)(0) == 2.0  # no warm-up: the first step counts


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (dict(lr=1, name="lion"), "optim.name='lion' is unknown; choose one of adamw, lamb"),
        (dict(lr=1, schedule="step"), "optim.schedule='step' .* cosine, constant, linear"),
        (dict(lr=1, momentum=0.9), "optim.momentum is not .* b1, b2"),
        (dict(schedule="cosine"), "optim.lr is missing"),
        (dict(lr=1, schedule="constant", end_lr_fraction=0.1), "end_lr_fraction=0.1 does nothing beside .*'constant'"),
        (dict(lr=1, warmup_steps=50), "optim.warmup_steps=50 must be smaller than the 50 steps"),
    ],
)
def test_errors(cfg, words):
    with pytest.raises(UserError, match=words):
        optim.make(ConfigDict(cfg), 50, {"w": jnp.zeros(3)})
