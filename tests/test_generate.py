"""Generated text against plain decoding: full forward passes, NumPy filters, bytes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
import zoo
from jojax import evaluate, generate, task
from jojax.data.text import ByteTokenizer
from jojax.errors import UserError
from jojax.generate import Sampling
from runs import lm, trained

GREEDY = Sampling(temperature=0)
SLOW = ("learned", "jo_random", "grape_ap_strict", "fox")
KEPT = jax.jit(generate.kept)
MESH = evaluate._mesh({"fsdp": 1})


@functools.cache
def writer(name="rope", **more):
    """Of a model with random parameters; call under x64."""
    more = lm(dtype="float64", data__length=110, **more)
    job = task.make(runs.config_of(f"configs/quickstart.py:smoke,encoding={name}", more))
    return generate.Writer(job, zoo.drawn(job.model, jnp.zeros((1, 2), int)), MESH)


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n)


@functools.cache
def whole(name):
    """[1, 110] ids -> their logits [110, 257] in one pass, without a cache."""
    w = writer(name)
    return jax.jit(lambda ids: w.job.apply(w.params, ids, rngs=task.evaluation_rngs())[0])


def full_passes(name, ids, count, choose):
    """`count` tokens more, each chosen (from logits, at its place) after a whole pass over what comes before it."""
    ids = list(ids)
    for at in range(len(ids), len(ids) + count):
        padded = np.pad(ids, (0, 110 - at))  # what comes later changes nothing before it
        ids.append(int(choose(whole(name)(padded[None])[at - 1], at)))
        if ids[-1] == 256:
            return ids[:-1]
    return ids


@pytest.mark.parametrize("name", ["jo_projected", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_text_equals_full_forward_passes(name):
    """Greedy, and drawn with the same keys."""
    drawn, key = Sampling(2.0, seed=1), jax.random.key(1)
    choices = {
        GREEDY: lambda logits, at: logits.argmax(),
        drawn: lambda logits, at: generate.sample(jax.random.fold_in(key, at), logits, *drawn.arguments()),
    }
    with jax.enable_x64(True):
        for n, sampling in ((70, GREEDY), (90, drawn)):
            got = [*prompt(n), *writer(name).tokens(prompt(n), 15, sampling)]
            assert got == full_passes(name, prompt(n), 15, choices[sampling]) and len(got) > n + 5
        assert len({*got[90:]}) > 3


def test_any_prompt_and_any_setting_compile_twice_in_all():
    with jax.enable_x64(True):
        for n, sampling in ((3, GREEDY), (64, Sampling(0.5, top_k=3)), (17, Sampling(top_p=0.4, seed=5))):
            assert len(list(writer().tokens(prompt(n), 5, sampling))) > 0
        assert writer()._step._cache_size() == 2


def test_one_seed_one_text():
    with jax.enable_x64(True):
        texts = [
            [*writer().tokens(prompt(5), n, Sampling(2.0, seed=seed))]
            for n, seed in ((20, 1), (20, 1), (20, 2), (7, 1))
        ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][:7] == texts[3]


# ------------------------------------------------------------------------------- the draw
def kept(logits, top_k, top_p):
    """The ids that stay, by sorting and adding up."""
    ids = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    p = np.exp([logits[i] for i in ids])
    p, stay, total = p / p.sum(), [], 0.0
    for i, share in zip(ids, p, strict=True):
        stay.append(i)
        total += share
        if total >= top_p:
            break
    return sorted(stay)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (5, 0.6), (1, 0.1), (50, 1e-6), (0, 0.97)])
def test_top_k_and_top_p(top_k, top_p, rng):
    with jax.enable_x64(True):
        for _ in range(5):
            logits = rng.normal(0, 2, 23)
            got = np.asarray(KEPT(logits, top_k, top_p))
            np.testing.assert_array_equal(np.flatnonzero(np.isfinite(got)), kept(logits, top_k, top_p))
            np.testing.assert_array_equal(got[np.isfinite(got)], logits[np.isfinite(got)])


def test_draws_have_the_probabilities_of_the_tempered_logits(rng):
    logits, n = rng.normal(0, 2, 9), 20_000
    draw = jax.jit(jax.vmap(lambda key: generate.sample(key, jnp.asarray(logits), *Sampling(0.7, 5, 0.95).arguments())))
    seen = np.bincount(draw(jax.random.split(jax.random.key(0), n)), minlength=9) / n
    p = np.zeros(9)
    stay = kept(logits / 0.7, 5, 0.95)
    p[stay] = np.exp(logits[stay] / 0.7) / np.exp(logits[stay] / 0.7).sum()
    assert 1 < len(stay) < 5 and (np.abs(seen - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


# ------------------------------------------------------------------------ where text begins and ends
def test_text_ends_with_its_document(monkeypatch):
    with jax.enable_x64(True):
        monkeypatch.setattr(writer(), "params", biased(writer(), np.arange(257) == 256))
        assert list(writer().tokens(prompt(5), 9)) == []


def test_ids_that_the_tokenizer_has_not_are_never_drawn(monkeypatch):
    with jax.enable_x64(True):
        w = writer(data__vocab=300)
        monkeypatch.setattr(w, "params", biased(w, np.arange(300) > 256))
        ids = list(w.tokens(prompt(5), 9))
    assert len(ids) > 0 and max(ids) < 256


def biased(w, ids):
    """The parameters with a head that wants those ids."""
    head = w.params["head"]
    return {**w.params, "head": {**head, "bias": head["bias"] + 1e3 * ids}}


def test_without_a_prompt_text_begins_as_documents_do():
    text = writer().job.corpus("train")
    first = text.tokens[text.starts[:-1]]
    assert len({*first}) > 1
    with jax.enable_x64(True):
        ids = list(writer().tokens([], 5, GREEDY))
        assert ids[0] == np.bincount(first).argmax()
        assert ids[1:] == list(writer().tokens(ids[:1], 4, GREEDY))
        assert {next(writer().tokens([], 1, Sampling(seed=seed))) for seed in range(9)} <= {*first}


def test_pieces_hold_whole_characters():
    text = "aé漢🙂b"
    ids = ByteTokenizer().encode_documents([text])[0]
    assert list(generate.pieces(ByteTokenizer(), ids)) == list("a") + ["", "é", "", "", "漢"] + [""] * 3 + [
        "🙂",
        "b",
        "",
        "",
    ]
    assert "".join(generate.pieces(ByteTokenizer(), [0xC3, 65, 0xE6])) == "\ufffdA\ufffd"


# ------------------------------------------------------------------------------- bad input
def test_a_table_of_positions_refuses_what_does_not_fit():
    with jax.enable_x64(True):
        assert len(list(writer("learned").tokens(prompt(100), 11, Sampling(seed=3)))) > 0
        for n, count in ((100, 12), (111, 1)):
            words = (
                rf"encoding learned is a table of 110 positions: a prompt of {n} tokens and --tokens={count} need 111"
            )
            with pytest.raises(UserError, match=words):
                next(writer("learned").tokens(prompt(n), count))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, r"--temperature=-1\.0 must be 0 \(greedy\) or above"),
        ({"temperature": float("nan")}, "--temperature=nan must be"),
        ({"top_k": -1}, r"--top_k=-1 must be 0 \(off\) or above"),
        ({"top_p": 0.0}, r"--top_p=0\.0 must be above 0, at most 1"),
        ({"top_p": 1.5}, r"--top_p=1\.5 must be above 0, at most 1"),
        ({"seed": -1}, r"--seed=-1 must be 0"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UserError, match=words):
        Sampling(**options)


def test_prompts_and_runs_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "good").write_bytes("é\r\n".encode())
    assert generate.read_prompt("", tmp_path / "good") == "é\r\n"
    for given, words in (
        (("a", "b"), "--prompt and --prompt_file are both given: choose one"),
        (("", str(tmp_path / "gone")), r"--prompt_file=.*gone can't be read \(No such file or directory\)"),
        (("", str(tmp_path / "latin")), r"--prompt_file=.*latin is not UTF-8"),
        (("caf\udce9", ""), "--prompt is not UTF-8"),
    ):
        with pytest.raises(UserError, match=words):
            generate.read_prompt(*given)
    with pytest.raises(UserError, match=r"has no result\.json: give the workdir of a run"):
        generate.load(tmp_path)
    vision = task.make(runs.config_of(runs.VIT, runs.vit()))
    monkeypatch.setattr(evaluate, "restore", lambda workdir: ({}, vision.config, vision, None, None))
    with pytest.raises(UserError, match="holds a vision model: text comes from a run of a language model"):
        generate.load(tmp_path)


def test_command():
    """One text, at once and again; the record is left alone."""
    before = runs.snapshot(trained())
    command = ["-m", "jojax.generate", "--workdir", str(trained()), "--tokens", "12", "--prompt", "The é"]
    out, err = runs.run(command, env=runs.environment(devices=1))
    assert out.startswith("The é") and out.endswith("\n")
    assert re.fullmatch(r"\d+ tokens(, [\d.]+ tokens/s)?(; the document ends here)?\n", err)
    w = generate.load(trained())
    ids = w.tokenizer.encode_documents(["The é"])[0][:-1]
    assert out == "The é" + "".join(generate.pieces(w.tokenizer, w.tokens(ids, 12))) + "\n"
    assert runs.snapshot(trained()) == before


def test_no_tokens():
    with pytest.raises(UserError, match="--tokens=0 must be 1 or above"):
        next(writer().tokens(prompt(5), 0))
