"""Fused attention against xla in float64: splash in Pallas' interpret mode, cudnn's arguments through JAX's own plain
implementation of them; what is chosen where, what is refused, and that all of it lowers for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
import zoo
from jojax import task
from jojax.encodings.base import Edge
from jojax.errors import UserError
from jojax.models import attention, kernels
from jojax.models.attention import Sites, compiled_for

B, L, G, R, D, E = 2, 300, 2, 3, 20, 12  # three blocks of splash
SPLASH = functools.partial(kernels.splash, interpret=True)
CUDNN = functools.partial(kernels.cudnn, implementation="xla")
# logits up to 20, whose float32 products and their sums are off by up to 1e-6 each, a factor in every weight;
# gradients add up to L such terms
VALUES, GRADIENTS = 2e-6, 1e-5

CASES = {
    "causal": dict(causal=True),
    "causal, window": dict(causal=True, window=70),
    "causal, documents, window": dict(causal=True, documents=True, window=30),
    "all": dict(causal=False),
    "all, documents": dict(causal=False, documents=True),
    "all, window": dict(causal=False, window=140),
    "causal, odd": dict(causal=True, window=70, odd=True),
    "all, odd": dict(causal=False, odd=True),
    "later queries": dict(causal=True, queries=140),
    "later queries, documents": dict(causal=True, documents=True, queries=140, window=40),
    "later queries, all, window": dict(causal=False, queries=140, window=40),
}


def inputs(rng, queries):
    """q, k with a lift, v in float32."""
    shapes = ((B, queries, G, R, D), (B, L, G, D), (B, L, G, E), (B, queries, G * R, 2), (B, L, G, 2))
    q, k, v, *lift = (jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes)
    return *attention.with_lift(q, k, lift, D**-0.5), v


def sites(rng, queries, documents):
    """The last sites are the queries; with documents, padding and empty slots, and a query that sees no key."""
    index = jnp.arange(L)
    if not documents:
        return Sites(index[L - queries :], None), Sites(index, None)
    segment = np.sort(rng.integers(-1, 3, (B, L)), 1)
    own = segment[:, L - queries :].copy()
    own[0, 5] = 77
    segment[1, -9:] = attention.EMPTY
    return Sites(index[L - queries :], jnp.asarray(own)), Sites(index, jnp.asarray(segment))


@functools.cache
def results(function, case, dtype, longer=0, given="float32"):
    """Output and the gradients of one number of it, in float64; `longer` by so much is the window. Inputs are rounded
    to `given` beforehand."""
    options = dict(documents=False, queries=L, window=0) | CASES[case]
    rng, documents, queries = np.random.default_rng(0), options.pop("documents"), options.pop("queries")
    args, (query, key) = inputs(rng, queries), sites(rng, queries, documents)
    options["window"] += longer
    if options.pop("odd", False):
        args, query, key = (t[:, 1:] for t in args), *(Sites(t.index[1:], None) for t in (query, key))

    @jax.jit
    def run(args, query, key):
        def number(args):
            out = function(*args, query, key, scale=0.7, **options)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.value_and_grad(number, has_aux=True)(args)

    with jax.enable_x64(dtype == "float64"):
        (_, out), grads = run(tuple(jnp.asarray(np.asarray(t.astype(given)), dtype) for t in args), query, key)
    return [np.asarray(t, float) for t in (out, *grads)]


def equals_xla(function, case):
    (got, *grads), (want, *exact) = results(function, case, "float32"), results(attention.xla, case, "float64")
    if CASES[case].get("documents"):
        assert not got[0, 5].any() and not want[0, 5].any()  # the query without keys
    far = [np.abs(a - b).max() for a, b in zip((got, *grads), (want, *exact), strict=True)]
    assert far[0] < VALUES and max(far[1:]) < GRADIENTS, far


FAST = ("all, window", "later queries, documents")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_splash_equals_xla(case):
    equals_xla(SPLASH, case)


@pytest.mark.parametrize(
    "case",
    [
        "causal, window",
        "causal, documents, window",
        "all, documents",
        "all, window",
        "all, odd",
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in ("causal", "all", "later queries, all, window", "causal, odd")
        ),
    ],
)
def test_cudnn_equals_xla(case):
    equals_xla(CUDNN, case)


@pytest.mark.parametrize(("function", "case"), [(SPLASH, FAST[0]), (SPLASH, FAST[1]), (CUDNN, FAST[0])])
def test_a_window_of_one_site_more_is_told_apart(function, case):
    more = results(attention.xla, case, "float64", longer=1)[0]
    assert np.abs(results(function, case, "float32")[0] - more).max() > 100 * VALUES


# ------------------------------------------------------------------------------- which one, and where
def ask(implementation, on, *, dtype="bfloat16", queries=2048, keys=2048, width=64, **options):
    """The name of what is chosen, by shapes alone; `documents` and `edge`: are there."""
    documents, edge = options.pop("documents", False), options.pop("edge", False)
    q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((B, queries, G, R, width), (B, keys, G, width)))
    at = Sites(None, documents or None)
    options = dict(causal=True, edge=Edge(None, None, None) if edge else None) | options
    with compiled_for(on):
        return attention.choose(implementation, q, k, k, at, at, scale=1.0, edge_key=None, **options).__name__


@pytest.mark.parametrize(
    ("on", "case", "expected"),
    [
        ("cpu", {}, "chunked"),
        ("cpu", {"keys": 300}, "xla"),
        ("rocm", {}, "chunked"),
        ("tpu", {}, "splash"),
        ("tpu", {"dtype": "float32", "documents": True, "window": 9, "width": 300}, "splash"),
        ("tpu", {"dtype": "float64"}, "chunked"),
        ("tpu", {"queries": 1}, "chunked"),
        ("tpu", {"edge": True}, "chunked"),
        ("tpu", {"edge": True, "keys": 300}, "xla"),
        ("gpu", {"window": 9}, "cudnn"),
        ("gpu", {"dtype": "float32"}, "chunked"),
        ("gpu", {"width": 129}, "chunked"),
        ("gpu", {"edge": True}, "chunked"),
        ("gpu", {"documents": True}, "chunked"),
        ("gpu", {"documents": True, "queries": 300, "keys": 300}, "cudnn"),
        ("gpu", {"causal": False, "window": 9}, "chunked"),
        ("gpu", {"queries": 300}, "chunked"),
        ("gpu", {"queries": 300, "causal": False}, "cudnn"),
    ],
)
def test_auto(on, case, expected):
    assert ask("auto", on, **case) == expected


@pytest.mark.parametrize(
    ("name", "on", "case", "why"),
    [
        ("splash", "cpu", {}, "is for TPUs, this is compiled for cpu"),
        ("cudnn", "rocm", {}, "is for NVIDIA GPUs, this is compiled for rocm"),
        ("splash", "tpu", {"edge": True}, "cannot add this encoding's bias, which is no product of features"),
        ("splash", "tpu", {"dtype": "float64"}, "needs dtype = bfloat16 or float32"),
        ("cudnn", "gpu", {"dtype": "float32"}, "needs dtype = bfloat16"),
        ("cudnn", "gpu", {"width": 130}, "takes heads up to 128 wide, here they are 130 with the bias's features"),
        ("cudnn", "gpu", {"queries": 9}, "is for whole causal sequences, not for 9 queries among 2048 keys"),
    ],
)
def test_refusals(name, on, case, why):
    with pytest.raises(UserError) as caught:
        ask(name, on, **case)
    assert str(caught.value) == f"attention = {name!r} {why}: set attention = 'auto'"


def test_what_was_compiled_for_one_platform_is_not_used_for_another():
    seen = []
    run = jax.jit(lambda x: seen.append(kernels.platform()) or x)
    for name in (None, "tpu", "gpu", "tpu"):
        with compiled_for(name):
            run(1.0)
    assert seen == ["cpu", "tpu", "gpu"]


# ------------------------------------------------------------------------------- chips that are not here
def lowered(name, on, documents, dtype="bfloat16", **spec):
    """The program of a model's gradients, for another platform."""
    model = zoo.lm_of(zoo.preset(name), dtype, dims=(("head_dim", 16), ("depth", 1)), attention="auto", **spec)
    tokens = jax.ShapeDtypeStruct((B, 300), jnp.int32)
    segment = tokens if documents else None

    def loss(params, tokens, segment):
        return model.apply({"params": params}, tokens, segment=segment, targets=tokens).mean()

    with compiled_for(on):
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        traced = jax.jit(jax.grad(loss)).trace(params, tokens, segment)
        return traced.lower(lowering_platforms=("tpu" if on == "tpu" else "cuda",)).as_text()


@pytest.mark.parametrize(
    ("name", "dtype", "spec"),
    [
        ("fox", "bfloat16", {}),
        ("grape_ap", "float32", {}),
        pytest.param("rope", "float32", {"window": 40}, marks=pytest.mark.slow),
    ],
)
def test_gradients_lower_for_tpus(name, dtype, spec):
    text = lowered(name, "tpu", True, dtype, **spec)
    assert [f"splash_mha_{part}" in text for part in ("fwd", "dq", "dkv")] == [name != "grape_ap"] * 3


@pytest.mark.parametrize("documents", [True, False])
def test_gradients_lower_for_nvidia(monkeypatch, documents):
    """JAX asks for cuDNN's version, which is not here."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    text = lowered("alibi", "gpu", documents, window=0 if documents else 40)
    assert f"__cudnn$fmha{'ScaleBias' * documents}SoftmaxBackward" in text
    assert documents or '"sliding_window_length": 40' in text.replace("\\22", '"')


@pytest.mark.parametrize("causal", [True, False])
def test_odd_lengths_lower_for_nvidia(monkeypatch, causal):
    """A grid of patches and a class token: JAX refuses odd lengths in training, whether there is a bias or not."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    q, k = (jax.ShapeDtypeStruct((B, 197, *heads, 16), "bfloat16") for heads in ((G, R), (G,)))
    at = Sites(jnp.arange(197), None)

    def number(q, k, v):
        return kernels.cudnn(q, k, v, at, at, causal=causal, scale=1.0).astype("float32").sum()

    text = jax.jit(jax.grad(number, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text


def test_wide_heads_do_not_lower_where_no_gpu_is(monkeypatch):
    """JAX's own limit, else `widest` could say what the chip takes."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    q, k = (jax.ShapeDtypeStruct((B, 256, *heads, 136), "bfloat16") for heads in ((G, R), (G,)))
    at = Sites(jnp.arange(256), None)
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        jax.eval_shape(lambda q, k: kernels.cudnn(q, k, k, at, at, causal=True, scale=1.0), q, k)


def test_the_exact_model_does_without_the_kernel():
    job = task.make(runs.config_of(runs.LM, runs.lm(dtype="bfloat16", attention="cudnn")))
    assert job.model.spec.attention == "cudnn" and job.exact.spec.attention == "auto"
