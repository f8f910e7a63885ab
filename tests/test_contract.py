"""The laws that every encoding of a causal model gets for free, in float64: packing, chunking, causality, claims."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax.encodings.base import Context
from jojax.encodings.rope import Rope

B, L = zoo.B, zoo.L


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


# rows of two or three documents that start at odd places
SEGMENT = np.array([[4] * 5 + [9] * 6, [2] * 3 + [7] * 1 + [0] * 7])
POSITION = np.array([[*range(5), *range(6)], [*range(3), 0, *range(7)]])


def call(name, toks=None, position=POSITION, segment=SEGMENT, **options):
    params = zoo.lm_params(name, **options)
    toks = zoo.tokens() if toks is None else toks
    pos, seg = jnp.asarray(position), jnp.asarray(segment)
    return np.asarray(zoo.run(zoo.lm(name, **options), params, toks, position=pos, segment=seg))


@pytest.mark.parametrize("name", zoo.TEXT)
def test_packed_documents_equal_the_same_alone(name):
    packed = call(name)
    toks = np.asarray(zoo.tokens())
    for row in range(B):
        for document in np.unique(SEGMENT[row]):
            inside = SEGMENT[row] == document
            n = inside.sum()
            # alone: first in its row, another document as filler behind it (causal, so it cannot matter)
            alone_toks, position, segment = toks.copy(), POSITION.copy(), np.full((B, L), 50)
            alone_toks[row] = (toks[row] + 3) % zoo.V
            alone_toks[row, :n] = toks[row, inside]
            position[row, :n], segment[row, :n] = np.arange(n), document
            alone = call(name, jnp.asarray(alone_toks), position, segment)
            np.testing.assert_allclose(alone[row, :n], packed[row, inside], atol=1e-10)
    one = call(name, segment=np.full((B, L), 1))
    assert np.abs(one - packed).max() > 1e-3  # one document would see across


def in_chunks(model, params, cuts):
    past, outs = None, []
    for a, b in itertools.pairwise(cuts):
        args = {"position": jnp.asarray(POSITION[:, a:b]), "segment": jnp.asarray(SEGMENT[:, a:b])}
        out, past = zoo.run(model, params, zoo.tokens()[:, a:b], past=past, capacity=13, **args)
        outs.append(out)
    return np.concatenate(outs, 1)


@pytest.mark.parametrize("name", zoo.TEXT)
def test_any_chunking_equals_the_whole(name):
    chunked = in_chunks(zoo.lm(name), zoo.lm_params(name), (0, 4, 8, 11))
    np.testing.assert_allclose(chunked, call(name), atol=1e-10)


@pytest.mark.parametrize("attention", ["xla", "chunked"])
@pytest.mark.parametrize("name", ["jo_projected", "jo_random", "grape_ap_strict", "alibi"])
def test_site_by_site_equals_the_whole(name, attention):
    steps = in_chunks(zoo.lm(name, attention=attention), zoo.lm_params(name), range(L + 1))
    np.testing.assert_allclose(steps, call(name), atol=1e-10)


class Suffix(Rope):
    """Sums −ω over what is left of a chunk, as released code does."""

    def journey(self, shared, carry, ctx):
        past = jnp.arange(ctx.position.shape[1]) - float(ctx.position.shape[1])
        past = jnp.broadcast_to(past[:, None], ctx.position.shape)
        return super().journey(shared, carry, ctx.replace(position=past))


def test_suffix_sums_are_right_as_a_whole_and_cannot_be_handed_on():
    model, params = zoo.lm_of({"name": f"{__name__}.Suffix", "transport": "qkv"}), zoo.lm_params("jo_fixed")
    args = {"position": jnp.asarray(POSITION), "segment": jnp.asarray(SEGMENT)}
    np.testing.assert_allclose(zoo.run(model, params, zoo.tokens(), **args), call("jo_fixed"), atol=1e-10)
    assert np.abs(in_chunks(model, params, (0, 4, 8, 11)) - call("jo_fixed")).max() > 1e-3


class Away(Rope):
    """Values travel and do not come home."""

    def journey(self, shared, carry, ctx):
        return super().journey(shared, carry, ctx).replace(restore=False)


def test_values_that_do_not_come_home_belong_to_places():
    """Against its own shift by 5, which the way home would undo."""
    model, params = zoo.lm_of({"name": f"{__name__}.Away", "transport": "qkv"}), zoo.lm_params("jo_fixed")
    here, there = (zoo.run(model, params, zoo.tokens(), position=jnp.arange(L)[None] + s) for s in (0, 5))
    assert np.abs(here - there).max() > 1e-3


@pytest.mark.parametrize("name", zoo.TEXT)
def test_the_future_is_invisible_bit_for_bit(name):
    before = call(name)
    for t in (3, 8):
        changed = zoo.tokens().at[:, t].set((zoo.tokens()[:, t] + 1) % zoo.V)
        after = call(name, changed)
        assert (after[:, :t] == before[:, :t]).all()
        assert (after[:, t] != before[:, t]).any()


@pytest.mark.parametrize("name", zoo.TEXT)
def test_claim_relative(name):
    """Shifting all coordinates changes nothing, exactly where the encoding says so."""
    claims = zoo.lm(name).encoding(parent=None).RELATIVE
    change = np.abs(call(name, position=POSITION + 1000) - call(name)).max()
    assert change < 1e-9 if claims else change > 1e-4


@pytest.mark.parametrize("name", ["jo_projected", "grape_ap_strict"])
def test_unrolled_scanned_and_remat_are_equal(name):
    def loss(params, model):
        nll = model.apply({"params": params}, zoo.tokens(), segment=jnp.asarray(SEGMENT), targets=zoo.tokens(3))
        return nll.mean()

    params = zoo.lm_params(name)
    results = []
    for switches in ((("scan", True),), (("scan", False),), (("scan", True), ("remat", True))):
        value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        results.append(value(params, zoo.lm(name, model=switches)))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), results[0], other)
    largest = {
        jax.tree_util.keystr(p): float(jnp.abs(g).max()) for p, g in jax.tree_util.tree_leaves_with_path(results[0][1])
    }
    dead = {path for path, value in largest.items() if value < 1e-6 * max(largest.values())}
    # without a frame on the keys their bias adds the same to all logits of a row
    assert dead == (set() if name == "jo_projected" else {"['blocks']['key']['bias']"})


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_jo_projected_starts_as_jo_fixed(dtype):
    with jax.enable_x64(dtype == "float64"):
        toks = zoo.tokens()
        outs = []
        started = zoo.lm_params("jo_projected", 0)
        bare = {**started, "blocks": {k: v for k, v in started["blocks"].items() if k != "encoding"}}
        for name in ("jo_projected", "jo_fixed", "jo_projected_qk", "rope"):
            params = jax.tree.map(lambda t: t.astype(dtype), started if "projected" in name else bare)
            outs.append(np.asarray(zoo.run(zoo.lm(name, dtype), params, toks)))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[2], outs[3])
    assert np.abs(outs[0] - outs[2]).max() > 1e-4  # values do travel


@pytest.mark.parametrize("name", ["jo_projected_mlp", "jo_pemb"])
def test_other_sources_start_as_jo_fixed(name):
    params = zoo.lm_params(name, 0)
    bare = {**params, "blocks": {k: v for k, v in params["blocks"].items() if k != "encoding"}}
    started = zoo.run(zoo.lm(name), params, zoo.tokens())
    np.testing.assert_array_equal(started, zoo.run(zoo.lm("jo_fixed"), bare, zoo.tokens()))


def test_an_angle_base_left_out_is_another_model():
    params = zoo.lm_params("jo_projected", 0)
    model = zoo.lm("jo_projected")
    bare = model.clone(encoding=lambda **kw: model.encoding(angle_base="zero", **kw))
    difference = zoo.run(model, params, zoo.tokens()) - zoo.run(bare, params, zoo.tokens())
    assert np.abs(difference).max() > 1e-4


def test_body_parameters_do_not_depend_on_the_encoding():
    """One seed gives every encoding the same body: paired comparisons rest on it."""

    def body(tree):
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(p): np.asarray(t) for p, t in flat if "'encoding'" not in jax.tree_util.keystr(p)}

    names = ("none", "learned", "jo_learned", "jo_token", "jo_projected", "jo_projected_mlp", "grape_ap_strict")
    bodies = [body(zoo.lm_params(name, 0)) for name in names]
    for name, other in zip(names, bodies, strict=True):
        assert other.keys() == bodies[0].keys(), name
        for key in other:
            np.testing.assert_array_equal(other[key], bodies[0][key], err_msg=f"{name} {key}")
    other_seed = zoo.lm("rope").init(jax.random.key(2), zoo.tokens())["params"]
    assert (np.asarray(other_seed["head"]["kernel"]) != bodies[0]["['head']['kernel']"]).any()


def test_random_angles_are_drawn_anew_in_training_and_fixed_in_evaluation():
    params, model, toks = zoo.lm_params("jo_random"), zoo.lm("jo_random"), zoo.tokens()
    fixed = [zoo.run(model, params, toks) for _ in range(2)]
    drawn = [model.apply({"params": params}, toks, train=True, rngs={"encoding": jax.random.key(s)}) for s in (1, 2)]
    np.testing.assert_array_equal(*fixed)
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-4


def test_random_angles_of_packed_documents_are_drawn_apart():
    """In training also two documents of one row, at equal positions."""
    steps = {}
    for train in (True, False):
        ctx = Context(
            position=jnp.asarray(POSITION, float)[..., None],
            restart=None,
            segment=jnp.asarray(SEGMENT),
            train=train,
        )
        steps[train] = np.asarray(zoo.lm("jo_random").encoding(parent=None).apply({}, ctx, method="draws"))
    for drawn in steps.values():
        assert (drawn[0, :5] != drawn[0, 5:10]).all() and (drawn[0] != drawn[1]).all()
    assert (steps[True] != steps[False]).all()


def test_grouped_heads_equal_repeated_heads():
    """3 key heads for 6 query heads = 6 key heads with the weights repeated, values travelling."""
    params = zoo.lm_params("jo_fixed")
    full = (("kv_heads", 6),)
    repeated = jax.tree.map(lambda t: t, params)
    attention = repeated["blocks"]
    for n in ("key", "value"):
        attention[n] = {k: jnp.repeat(t, 2, axis=-2) for k, t in attention[n].items()}
    a = zoo.run(zoo.lm("jo_fixed"), params, zoo.tokens())
    b = zoo.run(zoo.lm("jo_fixed", dims=full), repeated, zoo.tokens())
    np.testing.assert_allclose(a, b, atol=1e-12)
