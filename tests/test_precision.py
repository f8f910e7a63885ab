"""Angles and sums stay in float32 under bfloat16; long float32 sums stay near float64; chunks agree in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax import encodings
from jojax.encodings import Context

NAMES = ["rope", "jo_projected", "jo_random", "alibi", "grape_ap_strict"]  # of each kind one


@pytest.mark.parametrize("name", zoo.some(NAMES, 2))
def test_chunks_agree_with_the_whole_in_float32(name):
    params = jax.tree.map(lambda t: t.astype("float32"), zoo.lm_params(name, dtype="float32"))
    model, toks = zoo.lm(name, "float32"), zoo.tokens()
    whole = zoo.run(model, params, toks)
    a, past = zoo.run(model, params, toks[:, :4], capacity=11)
    b, _ = zoo.run(model, params, toks[:, 4:], past=past, capacity=11)
    np.testing.assert_allclose(np.concatenate([a, b], 1), whole, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "start"),
    zoo.some([("jo_projected", 60_000), ("rope", 60_000), ("alibi", 60_000), ("xpos", 4_000)], 2),  # more: an overflow
)
def test_bfloat16_follows_float32_at_far_positions(name, start):
    """Logits of the bfloat16 model stay as near to the float32 model's at position 60,000 as at 0."""
    params = jax.tree.map(lambda t: t.astype("float32"), zoo.lm_params(name, 0.1, dtype="float32"))
    position = jnp.broadcast_to(jnp.arange(zoo.L), (zoo.B, zoo.L))

    def error(at):
        wide, narrow = (
            zoo.run(zoo.lm(name, dtype), params, zoo.tokens(), position=position + at)
            for dtype in ("float32", "bfloat16")
        )
        assert wide.dtype == narrow.dtype == jnp.float32
        return float(jnp.abs(wide - narrow).max())

    assert error(start) < 3 * error(0) + 0.02


def test_long_accumulated_angles_stay_near_float64():
    """jo_projected's angles in float32 after 16,384 steps of content, beside t·ω: within 2e-3 rad of float64, most of
    which is t·ω itself (a plain float32 sum of a_t would be off by 0.1)."""
    L, dims = 16_384, zoo.lm_dims(vocab=5)
    table = np.random.default_rng(0).normal(0, 0.3, (5, 6))
    toks = jnp.asarray(np.random.default_rng(1).integers(0, 5, (1, L)))

    def angles(dtype):
        encoding = encodings.build(zoo.preset("jo_projected"), dims, dtype)(name=None, parent=None)
        position = jnp.arange(L, dtype=dtype)[None, :, None]
        ctx = Context(position=position, restart=jnp.arange(L)[None] == 0, segment=jnp.zeros((1, L), int), tokens=toks)
        params = {"angle_table": {"embedding": jnp.asarray(table, dtype)}}

        def run(params, ctx):
            _, shared, carry = encoding.apply({"params": params}, jnp.zeros((1, L, 4)), ctx, method="begin")
            return encoding.apply({"params": params}, shared, carry, ctx, method="journey").frame.angles

        return np.asarray(jax.jit(run)(params, ctx), float)

    narrow = angles("float32")
    with jax.enable_x64(True):
        wide = angles("float64")
    difference = (narrow - wide + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(difference).max() < 2e-3
    assert np.abs(wide).max() > 1e4  # the base part went round many times
