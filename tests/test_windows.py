"""Packing and windows: nothing lost, nothing twice, nothing across documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jojax.data import windows
from jojax.data.corpus import Corpus, build_corpus
from jojax.data.text import ByteTokenizer
from jojax.errors import UserError


def make_corpus(lengths, seed=0):
    """Documents of these lengths, the end included; all tokens differ, so that a mix-up shows."""
    assert sum(lengths) < 70_000
    tokens = np.random.default_rng(seed).permutation(70_000)[: sum(lengths)].astype(np.int32)
    return Corpus(tokens, np.concatenate([[0], np.cumsum(lengths)]), ByteTokenizer())


LENGTHS = st.lists(st.integers(2, 23), min_size=1, max_size=8)
DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "weight": np.float32,
    "position": np.int32,
    "segment": np.int32,
}


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 12))
def test_packed_rows_against_a_loop(lengths, length):
    corpus = make_corpus(lengths)
    rows = windows.PackedRows(corpus, length)
    total = len(corpus.tokens)
    assert len(rows) == -(-(total - 1) // length)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    scored = []
    for i in range(len(rows)):
        row = rows[i]
        assert {k: v.dtype.type for k, v in row.items()} == DTYPES and all(v.shape == (length,) for v in row.values())
        for t in range(length):
            at = i * length + t
            if at >= total - 1:
                assert (row["segment"][t], row["weight"][t]) == (-1, 0)
                continue
            d = document_of[at]
            assert row["tokens"][t] == corpus.tokens[at] and row["targets"][t] == corpus.tokens[at + 1]
            assert row["segment"][t] == d
            assert row["position"][t] == at - max(i * length, corpus.starts[d])
            assert row["weight"][t] == (document_of[at + 1] == d)
            scored += [at + 1] * int(row["weight"][t])
    first = set(corpus.starts[:-1])
    assert scored == [i for i in range(total) if i not in first]  # every prediction once
    with pytest.raises(IndexError):
        rows[len(rows)]


def scored_predictions(source, length):
    """(document, index of the prediction in it) of all that counts; checks each row against its corpus."""
    out = []
    for i in range(len(source)):
        row = source[i]
        assert {k: v.dtype.type for k, v in row.items()} == DTYPES | {
            "document": np.int32,
            "offset": np.int32,
        }
        real = row["segment"] >= 0
        n = int(real.sum())
        assert real[:n].all() and (row["segment"][:n] == row["document"]).all() and not row["weight"][n:].any()
        assert row["tokens"].shape == (length,) and np.array_equal(row["position"][:n], np.arange(n))
        start = source._corpus.starts[row["document"]] + row["offset"]
        assert start + n < source._corpus.starts[row["document"] + 1]
        assert np.array_equal(row["tokens"][:n], source._corpus.tokens[start : start + n])
        assert np.array_equal(row["targets"][:n], source._corpus.tokens[start + 1 : start + 1 + n])
        out += [(int(row["document"]), int(row["offset"] + t)) for t in np.flatnonzero(row["weight"])]
    assert len(out) == source.protocol["predictions"]
    return out


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 12))
def test_split_windows_hold_every_prediction_once(lengths, length):
    source = windows.split_windows(make_corpus(lengths), length)
    every = [(d, t) for d, n in enumerate(lengths) for t in range(n - 1)]
    assert scored_predictions(source, length) == every
    assert all((source[i]["weight"] == (source[i]["segment"] >= 0)).all() for i in range(len(source)))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 12), data=st.data())
def test_sliding_windows_score_each_prediction_once_with_context(lengths, length, data):
    stride = data.draw(st.integers(1, length))
    source = windows.sliding_windows(make_corpus(lengths), length, stride)
    every = [(d, t) for d, n in enumerate(lengths) for t in range(n - 1)]
    assert scored_predictions(source, length) == every
    for i in range(len(source)):
        scored = np.flatnonzero(source[i]["weight"])
        assert source[i]["offset"] == 0 or scored[0] >= length - stride
    if stride == length:
        assert len(source) == len(windows.split_windows(make_corpus(lengths), length))


def test_common_windows_score_the_same_tokens_at_every_length():
    corpus = make_corpus([25, 7, 13, 14, 50])  # 24, 6, 12, 13, 49 predictions; of them 24, 0, 12, 12, 48 kept
    sources = windows.common_windows(corpus, (4, 12, 6, 12))
    assert list(sources) == [4, 6, 12]
    expected = [(d, t) for d, kept in ((0, 24), (2, 12), (3, 12), (4, 48)) for t in range(kept)]
    for length, source in sources.items():
        assert scored_predictions(source, length) == expected
        assert len(source) == 96 // length and all(source[i]["weight"].all() for i in range(len(source)))
        assert source.protocol == {
            "kind": "common",
            "longest": 12,
            "length": length,
            "documents": 4,
            "windows": 96 // length,
            "predictions": 96,
        }


def test_window_errors():
    corpus = make_corpus([9, 5])
    with pytest.raises(UserError, match=r"eval\.lengths: 3 does not divide 8"):
        windows.common_windows(corpus, (3, 8))
    with pytest.raises(UserError, match=r"no document has 16 predictions \(the longest has 8\)"):
        windows.common_windows(corpus, (8, 16))
    with pytest.raises(UserError, match="stride 5 must lie between 1 and the window length 4"):
        windows.sliding_windows(corpus, 4, 5)
    with pytest.raises(UserError, match=r"data\.length is 0"):
        windows.PackedRows(corpus, 0)


def test_the_excerpt_packs_and_fits_the_extrapolation_windows(tmp_path):
    cfg = {"source": "wikipedia_excerpt", "tokenizer": "bpe", "vocab": 2048, "cache": str(tmp_path)}
    valid = build_corpus(cfg, "valid")
    assert 2.6 < valid.tokenizer.token_bytes[valid.tokens].mean() < 3.1  # bytes a token
    sources = windows.common_windows(valid, (512, 1024, 4096))
    assert sources[4096].protocol["documents"] == 11 and len(sources[4096]) >= 40
