"""The training step: accumulation, devices, NaN guard, average, sums, keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jojax import losses, metrics, optim, shard, state, step

B, IN, HID, OUT = 24, 6, 64, 10
OPTIM = dict(lr=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.1, clip=1e-2, ema=0.8)
LAYOUTS = {
    "1": (1, dict(data=1)),
    "2 data": (2, dict(data=2)),
    "8 data": (8, dict(data=8)),
    "2 x 4": (8, dict(data=2, fsdp=4)),
}


def config(accumulate=1, seed=5, log_every=2):
    opt = OPTIM | dict(accumulate=accumulate)
    return ConfigDict(dict(seed=seed, steps=20, log=dict(every_steps=log_every), optim=opt))


def init_fn(key):
    rng = np.random.default_rng(0)
    return {
        "up": {"kernel": jnp.asarray(rng.normal(size=(IN, HID)), "float32"), "bias": jnp.zeros(HID)},
        "wide": {"kernel": jnp.asarray(rng.normal(size=(HID, 256)) / 8, "float32")},  # 2¹⁴: split by fsdp
        "head": {"kernel": jnp.asarray(rng.normal(size=(256, OUT)) / 16, "float32")},
    }


def loss_fn(params, batch, rngs, train):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    logits = jnp.tanh(hidden @ params["wide"]["kernel"]) @ params["head"]["kernel"]
    nll_sum, count = losses.sums(losses.cross_entropy(logits, batch["label"]), batch["weight"])
    return nll_sum, count, {"correct": ((logits.argmax(-1) == batch["label"]) * batch["weight"]).sum()}


def batches(rng, n, weights=True):
    for _ in range(n):
        weight = rng.integers(0, 4, B) if weights else np.ones(B)
        yield {
            "x": rng.normal(size=(B, IN)).astype(np.float32),
            "label": rng.integers(OUT, size=B),
            "weight": weight.astype(np.float32),
        }


@functools.cache
def program(kind="adamw", accumulate=1, layout="1"):
    """Initial state on the host, its shardings, the compiled step, the mesh: compiled once for all tests."""
    devices, sizes = LAYOUTS[layout]
    cfg = config(accumulate)
    mesh = shard.make_mesh(ConfigDict(sizes), jax.devices()[:devices])
    tx = optax.sgd(1.0) if kind == "sgd" else optim.make(cfg.optim, cfg.steps, jax.eval_shape(init_fn, 0))
    made = state.init_state(state.start(init_fn, tx, ema=True, aux=("correct",)), mesh, cfg.seed)
    where = jax.tree.map(lambda leaf: leaf.sharding, made)
    return jax.device_get(made), where, step.make_train_step(loss_fn, tx, cfg, where), mesh


def begin(*args, **kwargs):
    made, where, train_step, mesh = program(*args, **kwargs)
    return jax.device_put(jax.tree.map(np.copy, made), where), train_step, mesh


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


def test_accumulation_is_the_full_batch_with_uneven_weights(rng):
    """The gradient itself: SGD with rate 1, weights 0 … 3 a row."""
    batch = next(batches(rng, 1))
    batch["weight"][:6] = 0
    one, whole, _ = begin("sgd")
    many, parts, _ = begin("sgd", accumulate=3)
    params = jax.device_get(one.params)
    one, many = whole(one, batch), parts(many, batch)
    close(one.params, many.params, 1e-6)
    close(one.sums, many.sums, 1e-5)

    # the mean of the micro-batches' means is something else, so the weights matter in this test
    def mean(params, micro):
        nll_sum, count, _ = loss_fn(params, micro, {}, True)
        return nll_sum / count

    micros = step.micro_batches(batch, 3)
    wrong = jax.jit(jax.vmap(jax.grad(mean), (None, 0)))(params, micros)["head"]["kernel"].mean(0)
    assert np.abs(params["head"]["kernel"] - many.params["head"]["kernel"] - wrong).max() > 1e-4


def five_steps(**kwargs):
    now, train_step, mesh = begin(**kwargs)
    for batch in batches(np.random.default_rng(1), 5):
        now = train_step(now, shard.to_global(batch, mesh))
    return now, train_step


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_five_steps_are_equal_on_all_devices(layout):
    (one, _), (now, train_step) = five_steps(), five_steps(layout=layout)
    close(one.params, now.params, 2e-6)
    close(one.opt_state, now.opt_state, 2e-6)
    close(one.sums, now.sums, 1e-4)
    assert now.step == 5
    assert train_step._cache_size() == 1  # shardings are kept, so the step compiles once
    assert ("fsdp" in str(now.params["wide"]["kernel"].sharding.spec)) is (layout == "2 x 4")


def test_five_steps_accumulated_on_eight_devices():
    (one, _), (now, _) = five_steps(), five_steps(accumulate=3, layout="2 x 4")
    close(one.params, now.params, 2e-6)


def test_cutting_micro_batches_moves_no_rows_between_devices():
    mesh = shard.make_mesh(ConfigDict(dict(data=8)), jax.devices())
    rows = jax.ShapeDtypeStruct((B * 2, IN), jnp.float32, sharding=shard.batch_sharding(mesh))
    moves = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    good = jax.jit(lambda x: step.micro_batches(x, 3)).lower(rows).compile()
    assert not any(word in good.as_text() for word in moves)
    assert good.output_shardings.shard_shape((3, 2 * B // 3, IN)) == (3, 2 * B // 3 // 8, IN)
    # the other way round each micro-batch lives on a few devices only, and keeping all busy means moving rows
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    bad = jax.jit(lambda x: x.reshape(3, -1, IN), out_shardings=spread).lower(rows).compile()
    assert any(word in bad.as_text() for word in moves)


def test_no_scan_without_accumulation(rng):
    batch = next(batches(rng, 1))
    for accumulate, there in ((1, False), (3, True)):
        now, train_step, _ = begin("sgd", accumulate=accumulate)
        text = str(jax.make_jaxpr(train_step)(now, batch))
        assert ("scan[" in text) is there


def test_the_old_state_is_donated(rng):
    now, train_step, _ = begin()
    new = train_step(now, next(batches(rng, 1)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((now.params, now.opt_state[1].mu, now.ema)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize("program", [dict(), dict(kind="sgd", accumulate=3)])
def test_a_bad_step_leaves_everything_as_it_was(rng, program):
    good, bad, after = batches(rng, 3)
    bad["x"][3, 2] = np.nan
    bad["weight"][3] = 1
    now, train_step, _ = begin(**program)
    now = train_step(now, good)
    before = jax.device_get(now)
    now = train_step(now, bad)
    assert now.bad_step == 2  # counted from 1, like the log
    assert np.isnan(now.sums["loss"])
    held = jax.device_get(now)
    now = train_step(now, after)
    for later in (held, now):
        for name in ("step", "params", "opt_state", "ema"):
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(later, name))
    assert now.bad_step == 2
    jax.tree.map(np.testing.assert_array_equal, held.sums, now.sums)  # still those that show what went wrong


def test_a_bad_gradient_under_a_finite_loss(rng):
    def root(params, batch, rngs, train):  # d sqrt(x) at 0
        return jnp.sqrt(jnp.abs(params["w"])).sum(), jnp.ones(()), {}

    cfg = config()
    mesh = shard.make_mesh(ConfigDict(dict(data=1)), jax.devices()[:1])
    tx = optax.sgd(0.1)
    now = state.init_state(state.start(lambda key: {"w": jnp.zeros(3)}, tx), mesh, 0)
    now = step.make_train_step(root, tx, cfg)(now, jnp.zeros(1))
    assert now.bad_step == 1 and now.sums["loss"] == 0
    np.testing.assert_array_equal(now.params["w"], 0)


def test_a_batch_without_targets_changes_nothing_by_gradient(rng):
    batch = next(batches(rng, 1))
    batch["weight"][:] = 0
    now, train_step, _ = begin("sgd")
    before = jax.device_get(now.params)
    now = train_step(now, batch)
    assert now.bad_step == -1 and now.step == 1
    jax.tree.map(np.testing.assert_array_equal, before, now.params)


def test_average_of_parameters(rng):
    now, train_step, _ = begin()
    want = jax.device_get(now.params)
    for batch in batches(rng, 3):
        now = train_step(now, batch)
        want = jax.tree.map(lambda e, p: 0.8 * e + 0.2 * np.asarray(p), want, now.params)
    close(want, now.ema, 1e-6)
    assert not np.allclose(now.ema["head"]["kernel"], now.params["head"]["kernel"])


def test_sums_hold_the_steps_since_the_last_log_step(rng):
    now, train_step, _ = begin()
    rate = optim.schedule(config().optim, 20)
    losses_, counts, corrects = [], [], []
    for i, batch in enumerate(batches(rng, 5)):
        nll_sum, count, aux = jax.jit(loss_fn, static_argnums=3)(now.params, batch, {}, True)
        losses_.append(float(nll_sum))
        counts.append(float(count))
        corrects.append(float(aux["correct"]))
        now = train_step(now, batch)
        since = slice(i // 2 * 2, i + 1)
        got = metrics.averages(now.sums)
        np.testing.assert_allclose(got["loss"], sum(losses_[since]) / sum(counts[since]), rtol=1e-5)
        np.testing.assert_allclose(got["correct"], sum(corrects[since]) / sum(counts[since]), rtol=1e-5)
        np.testing.assert_allclose(got["lr"], rate(i), rtol=1e-6)
        assert now.sums["steps"] == len(range(5)[since])


def test_grad_norm_is_that_of_the_mean_before_clipping(rng):
    batch = next(batches(rng, 1))
    now, train_step, _ = begin()

    def mean(params):
        nll_sum, count, _ = loss_fn(params, batch, {}, True)
        return nll_sum / count

    want = optax.tree.norm(jax.jit(jax.grad(mean))(now.params))
    now = train_step(now, batch)
    np.testing.assert_allclose(now.sums["grad_norm"], want, rtol=1e-5)
    assert want > OPTIM["clip"]


def test_unnamed_sums_are_refused(rng):
    cfg = config()
    mesh = shard.make_mesh(ConfigDict(dict(data=1)), jax.devices()[:1])
    now = state.init_state(state.start(init_fn, optax.sgd(0.1)), mesh, 0)
    with pytest.raises(ValueError, match=r"sums \['correct'\]: create the state with aux=\['correct'\]"):
        step.make_train_step(loss_fn, optax.sgd(0.1), cfg)(now, next(batches(rng, 1)))


def test_keys_depend_on_seed_step_name_and_micro_batch():
    draws = {}

    def draw(params, batch, rngs, train):
        assert train is True
        noise = {name: jax.random.uniform(key) for name, key in rngs.items()}
        return noise["dropout"] + 0 * params["w"].sum(), jnp.ones(()), {"encoding": noise["encoding"]}

    mesh = shard.make_mesh(ConfigDict(dict(data=1)), jax.devices()[:1])
    for seed, accumulate in ((5, 1), (5, 2), (6, 1)):
        tx = optax.sgd(0.0)
        now = state.init_state(state.start(lambda key: {"w": jnp.zeros(3)}, tx, aux=("encoding",)), mesh, 0)
        train_step = step.make_train_step(draw, tx, config(accumulate, seed, log_every=1))
        for i in range(2):
            now = train_step(now, jnp.zeros((2, 1)))
            draws[seed, accumulate, i] = float(now.sums["loss"]), float(now.sums["encoding"])
    flat = [value for pair in draws.values() for value in pair]
    assert len({round(value, 6) for value in flat}) == len(flat) == 12
    # micro-batches draw apart: their sum is not twice the draw of one
    assert all(abs(draws[5, 2, i][0] - 2 * draws[5, 1, i][0]) > 1e-6 for i in (0, 1))
    again = step.step_rngs(5, jnp.asarray(1))
    assert float(jax.random.uniform(again["dropout"])) == pytest.approx(draws[5, 1, 1][0])
