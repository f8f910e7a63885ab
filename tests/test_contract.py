"""The laws that every encoding gets for free in a model, in float64: packing, chunking, causality, coordinates,
gradients; and what models with them share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from jojax import laws
from jojax.encodings.base import Context

B, L = zoo.B, zoo.L


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


POSITION, SEGMENT = (t[:, :L] for t in (laws.models.POSITION, laws.models.SEGMENT))


@pytest.mark.parametrize("law", zoo.some(["chunks", "packed", "causal", "sites"], 2))
@pytest.mark.parametrize(("name", "kind"), zoo.spread([(n, "text") for n in zoo.TEXT]))
def test_laws_of_sequences(name, kind, law):
    zoo.holds(law, name, kind)


@pytest.mark.parametrize(("name", "kind"), zoo.spread(zoo.MODELS))
def test_claim_relative(name, kind):
    """Shifting all coordinates changes nothing, exactly where the encoding says so."""
    zoo.holds("relative", name, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), zoo.families(zoo.MODELS))
def test_gradients(name, kind):
    zoo.holds("gradients", name, kind)


@pytest.mark.parametrize("name", zoo.some(["jo_projected", "jo_random", "grape_ap_strict", "alibi"]))
def test_site_by_site_in_chunked_attention_equals_the_whole(name):
    assert laws.models.site_by_site(zoo.subject(name, "text"), "chunked") < 1e-10


@pytest.mark.parametrize(
    ("name", "kind"), zoo.some([case for case in zoo.MODELS if laws.LAWS["start"].applies(zoo.subject(*case))])
)
def test_starts(name, kind):
    """Bit for bit, but where matrices multiply or speeds are exponentials of what is learned."""
    residual = laws.LAWS["start"].check(zoo.subject(name, kind)).residual
    assert residual < 1e-10 if name in ("jo_blocks", "grape_m_freq") else residual == 0


@pytest.mark.parametrize("name", zoo.some(["jo_projected", "grape_ap_strict"]))
def test_unrolled_scanned_and_remat_are_equal(name):
    def loss(params, model):
        nll = model.apply({"params": params}, zoo.tokens(), segment=jnp.asarray(SEGMENT), targets=zoo.tokens(3))
        return nll.mean()

    dims = (("depth", 2),)
    params = zoo.lm_params(name, dims=dims)
    results = []
    for switches in ((("scan", True),), (("scan", False),), (("scan", True), ("remat", True))):
        value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        results.append(value(params, zoo.lm(name, dims=dims, model=switches)))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), results[0], other)
    largest = {
        jax.tree_util.keystr(p): float(jnp.abs(g).max()) for p, g in jax.tree_util.tree_leaves_with_path(results[0][1])
    }
    dead = {path for path, value in largest.items() if value < 1e-6 * max(largest.values())}
    # without a frame on the keys their bias adds the same to all logits of a row
    assert dead == (set() if name == "jo_projected" else {"['blocks']['key']['bias']"})


@pytest.mark.parametrize("dtype", zoo.some(["float64", "float32"]))
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


def test_an_angle_base_left_out_is_another_model():
    params = zoo.lm_params("jo_projected", 0)
    model = zoo.lm("jo_projected")
    bare = model.clone(encoding=lambda **kw: model.encoding(angle_base="zero", **kw))
    difference = zoo.run(model, params, zoo.tokens()) - zoo.run(bare, params, zoo.tokens())
    assert np.abs(difference).max() > 1e-4


@pytest.mark.parametrize(
    "names",
    zoo.some([(("learned", "jo_projected", "grape_ap_strict"),), (("jo_learned", "jo_token", "jo_projected_mlp"),)], 2),
)
def test_body_parameters_do_not_depend_on_the_encoding(names):
    """One seed gives every encoding the same body: paired comparisons rest on it."""

    def body(tree):
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(p): np.asarray(t) for p, t in flat if "'encoding'" not in jax.tree_util.keystr(p)}

    plain = body(zoo.lm_params("none", 0))
    for name in names:
        other = body(zoo.lm_params(name, 0))
        assert other.keys() == plain.keys(), name
        for key in other:
            np.testing.assert_array_equal(other[key], plain[key], err_msg=f"{name} {key}")
    other_seed = jax.jit(zoo.lm("rope").init)(jax.random.key(2), zoo.tokens())["params"]
    assert (np.asarray(other_seed["head"]["kernel"]) != plain["['head']['kernel']"]).any()


def test_random_angles_are_drawn_anew_in_training_and_fixed_in_evaluation():
    params, model, toks = zoo.lm_params("jo_random"), zoo.lm("jo_random"), zoo.tokens()
    fixed = [zoo.run(model, params, toks) for _ in range(2)]
    drawn = [zoo.run(model, params, toks, train=True, rngs={"encoding": jax.random.key(s)}) for s in (1, 2)]
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
