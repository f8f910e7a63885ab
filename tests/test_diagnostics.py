"""Numbers about attention against plain loops over pairs, and what a run keeps of them."""

import types

import jax
import numpy as np
import pytest

import reference
import runs
import zoo
from jojax import coherence, diagnostics, loop
from test_show import B, D, G, H, L, answered, journeys


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def job_of(causal=True, qk_norm="none"):
    spec = types.SimpleNamespace(dims=types.SimpleNamespace(causal=causal), qk_norm=qk_norm, eps=1e-6, window=0)
    return types.SimpleNamespace(model=types.SimpleNamespace(spec=spec))


def softmax(table):
    """[k][j] of logits, None where unseen"""
    out = np.zeros((L, L))
    for k, row in enumerate(table):
        w = np.exp(np.array(row) - max(row))
        out[k, : len(row)] = w / w.sum()
    return out


def plain(ctx, journey, b, h, bias=lambda b, h, k, j: 0.0, gains=None):
    """α [k, j] of one row and head, journeys as dense matrices."""
    g, q, key = h // (H // G), np.asarray(ctx.q)[b, :, h], np.asarray(ctx.k)[b, :, h // (H // G)]
    if gains is not None:  # norms keep their size under rotations, so before is after where gains are 1
        q, key = (
            t / np.sqrt((t**2).mean(-1, keepdims=True) + 1e-6) * gain for t, gain in zip((q, key), gains, strict=True)
        )
    P = journeys(journey, b, g) if journey.value_frame is not None else [[np.eye(D)] * L] * L
    return softmax([[q[k] @ P[k][j] @ key[j] / np.sqrt(D) + bias(b, h, k, j) for j in range(k + 1)] for k in range(L)])


def test_weights_are_the_softmax_of_journeys(rng):
    ctx, journey = answered("jo_random", rng)
    got = np.asarray(diagnostics.weights(job_of(), {}, 0, ctx, journey))
    want = [[plain(ctx, journey, b, h) for h in range(H)] for b in range(B)]
    np.testing.assert_allclose(got, want, atol=1e-10)
    assert np.abs(got - [[softmax([[0.0] * (k + 1) for k in range(L)])] * H] * B).max() > 0.1


def test_weights_with_norms_after_the_rotation_and_with_biases(rng):
    ctx, journey = answered("jo_random", rng)
    ones = np.ones((2, D))
    params = {"blocks": {"norm_q": {"scale": ones}, "norm_k": {"scale": 2 * ones}}}
    got = np.asarray(diagnostics.weights(job_of(qk_norm="after"), params, 1, ctx, journey))
    want = [[plain(ctx, journey, b, h, gains=(1.0, 2.0)) for h in range(H)] for b in range(B)]
    np.testing.assert_allclose(got, want, atol=1e-10)
    ctx, journey = answered("alibi", rng)
    got = np.asarray(diagnostics.weights(job_of(), {}, 0, ctx, journey))
    slope = reference.slopes(H)
    want = [[plain(ctx, journey, b, h, lambda b, h, k, j: -slope[h] * (k - j)) for h in range(H)] for b in range(B)]
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_numbers_of_a_block_are_means_over_queries(rng):
    ctx, journey = answered("jo_random", rng)
    got = diagnostics.block(job_of(), {}, 0, (ctx, journey), 4)
    alpha = np.array([[plain(ctx, journey, b, h) for h in range(H)] for b in range(B)])
    for h in range(H):
        rows = [alpha[b, h, k] for b in range(B) for k in range(1, L)]
        entropy = [-(a[a > 0] * np.log(a[a > 0])).sum() / np.log((a > 0).sum()) for a in rows]
        assert got["entropy"][h] == pytest.approx(np.mean(entropy), abs=1e-6)
        reach = [sum(alpha[b, h, k, j] * (k - j) for j in range(k)) for b in range(B) for k in range(1, L)]
        assert got["reach"][h] == pytest.approx(np.mean(reach), abs=1e-6)
        beyond = [alpha[b, h, k, : k - 3].sum() for b in range(B) for k in range(4, L)]
        assert got["beyond"][h] == pytest.approx(np.mean(beyond), abs=1e-6)
    angles = np.asarray(journey.frame.angles)  # [B, L, G, planes]
    turns = np.angle(np.exp(1j * (angles[:, 1:] - angles[:, :-1])))
    np.testing.assert_allclose(got["steps"]["mean"], turns.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(got["steps"]["std"], turns.std((0, 1)), atol=1e-6)
    d = coherence.distances(ctx, causal=True)
    want, _ = coherence.of_values(journey, ctx, d, got["values"]["distance"])
    np.testing.assert_allclose(got["values"]["alike"], want, atol=1e-5)
    assert want.shape[0] == G and want.max() - want.min() > 0.1
    uniform = diagnostics.block(job_of(), {}, 0, (ctx.replace(q=0 * ctx.q), journey), 4)
    np.testing.assert_allclose(uniform["entropy"], 1, atol=1e-6)
    assert "beyond" not in diagnostics.block(job_of(), {}, 0, (ctx, journey), L)  # nothing is that far


@pytest.mark.parametrize(
    ("spec", "given"),
    zoo.some(
        [
            (runs.LM, dict(encoding={"name": "jo_blocks"}, data__length=16)),
            (runs.LM, dict(encoding={"name": "grape_ap"}, model__qk_norm="after")),
            (runs.VIT + ",encoding=comrope_ap_qkv", {}),
            (runs.LM, dict(encoding={"name": "none"}, model__mixer="recurrence")),
        ],
        4,
    ),
)
def test_of_whole_models(spec, given):
    """Every kind of frame, of images and text; a model without attention has none."""
    small = (runs.lm if spec == runs.LM else runs.vit)(**given, eval__diagnostics=2)
    with jax.enable_x64(False):
        run = loop.Run(runs.config_of(spec, small), spec, "")
        params = jax.jit(run.job.init)(jax.random.key(0))
        found = diagnostics.measure(run.job, jax.device_get(params))
    blocks = found["blocks"]
    assert len(blocks) == (0 if "recurrence" in str(given) else run.config.model.depth)
    assert found["protocol"]["rows"] == 2
    for of_block in blocks:
        assert (of_block["entropy"] > 0).all() and (of_block["entropy"] <= 1).all()
        assert ("beyond" in of_block) == (run.job.unit == "tokens")
        assert ("values" in of_block) == ("grape" not in str(given))


def test_norms_before_or_after_no_rotation_are_the_same_attention():
    """With gates that read normed queries, which are not what the weights are made of where the norm comes after."""
    found, gains = {}, np.linspace(0.5, 3, 16, dtype="float32")
    for place in ("before", "after", "none"):
        given = runs.lm(encoding={"name": "grape_a"}, model__qk_norm=place, eval__diagnostics=2)
        with jax.enable_x64(False):
            run = loop.Run(runs.config_of(runs.LM, given), runs.LM, "")
            params = jax.device_get(jax.jit(run.job.init)(jax.random.key(0)))
            if place != "none":
                norm = params["blocks"]["norm_q"]
                norm["scale"] = gains * norm["scale"]
            found[place] = [of_block["reach"] for of_block in diagnostics.measure(run.job, params)["blocks"]]
    np.testing.assert_allclose(found["after"], found["before"], atol=1e-4)
    assert np.abs(np.subtract(found["before"], found["none"])).max() > 0.01


def test_the_rows_are_held_out_and_spread(rng):
    with jax.enable_x64(False):
        job = loop.Run(runs.config_of(runs.LM, runs.lm()), runs.LM, "").job
    batch = coherence.held_out_batch(job, 64, 3)
    assert batch["tokens"].shape == (3, 64) and len(set(batch["document"])) > 1


def test_documents_shorter_than_a_row_are_looked_at_whole():
    """Rows of training are packed: no document need be as long."""
    with jax.enable_x64(False):
        run = loop.Run(
            runs.config_of(runs.LM, runs.lm(data__length=4096, eval__lengths=(), eval__diagnostics=2)), "", ""
        )
        longest = run.job.corpus("valid").predictions().max()
        found = diagnostics.measure(run.job, jax.device_get(jax.jit(run.job.init)(jax.random.key(0))))
    assert longest < 2048 and found["protocol"] == {"rows": 1, "length": longest, "training_length": 4096}
    assert "beyond" not in found["blocks"][0]
