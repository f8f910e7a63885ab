"""Documents, tokenizers and the cached corpus: every byte kept, and what is said where one is broken."""

import gzip
import json
import logging
import lzma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jojax.data import corpus as corpora
from jojax.data.corpus import build_corpus, open_tokenizer
from jojax.data.documents import open_documents
from jojax.data.text import BPETokenizer, ByteTokenizer, load_tokenizer
from jojax.errors import UserError

TEXTS = [
    "The cat sat on the mat. " * 20,
    "",
    "Zwölf Boxkämpfer 🥊 jagen\r\nViktor <|endoftext|> über den Deich.",
    " \n",
]
TEXTS += ["and the dog and the log and the frog " * 9, "x"]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer.train(TEXTS, 300)


@pytest.fixture
def cfg(tmp_path):
    rows = "".join(json.dumps({"text": text, "title": f"T{i}"}) + "\n" for i, text in enumerate(TEXTS))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "valid.txt").write_bytes(TEXTS[2].encode())
    return {
        "source": "text",
        "train_path": str(tmp_path / "train.jsonl"),
        "valid_path": str(tmp_path / "valid.txt"),
        "tokenizer": "bytes",
        "cache": str(tmp_path / "cache"),
    }


# documents


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    texts = [t for t in TEXTS if t.strip()]
    rows = "".join(json.dumps({"text": t}) + "\n\n" for t in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(rows))
    (tmp_path / "d").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "d" / f"{i}.txt").write_bytes(text.encode())
    (tmp_path / "d" / "notes.md").write_text("no document")
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d"):
        docs = open_documents({"source": "text", "train_path": str(tmp_path / name)}, "train")
        assert [docs[i] for i in range(len(docs))] == texts


def test_empty_documents_are_counted_and_reported(cfg, caplog):
    docs = open_documents(cfg, "train")
    assert len(docs) == 4 and docs.skipped == 2 and docs.titles == ["T0", "T2", "T4", "T5"]
    for _ in range(2):  # built, and read from the cache
        caplog.clear()
        build_corpus(cfg, "train")
        assert "2 empty documents are left out" in caplog.text


def test_excerpt_holds_out_whole_long_articles():
    train, valid = (open_documents({"source": "wikipedia_excerpt"}, split) for split in ("train", "valid"))
    assert len(train) + len(valid) == 106 and len(valid) == 11
    assert not set(train.titles) & set(valid.titles) and "Algeria" in valid.titles
    assert min(len(valid[i].encode()) for i in range(11)) >= 20_000
    assert sum(len(d[i].encode()) for d in (train, valid) for i in range(len(d))) == 2_917_699
    assert train.digest() != valid.digest()


def test_document_errors_name_the_place(tmp_path):
    def message(name, content=None):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            len(open_documents({"source": "text", "train_path": str(tmp_path / name)}, "train"))
        return str(caught.value)

    assert "nowhere.txt does not exist" in message("nowhere.txt")
    assert "name must end in .jsonl" in message("a.csv", b"x")
    assert "holds no document: 1 empty ones" in message("b.jsonl", b'{"text": " "}\n')
    assert "holds no document" in message("c.jsonl", b"")
    assert "d.jsonl:2 has no field `text`" in message("d.jsonl", b'{"text": "x"}\n{"txt": "x"}\n')
    assert "e.jsonl:1 has no field `text`" in message("e.jsonl", b"[1]")
    assert "f.jsonl:2 is not a JSON object" in message("f.jsonl", b'{"text": "x"}\n{"text": \n')
    assert "g.jsonl:1 holds half a surrogate pair" in message("g.jsonl", b'{"text": "\\ud800"}')
    assert "h.txt can't be read" in message("h.txt", b"\xff\xfe")
    cut = lzma.compress(json.dumps({"text": "word " * 999}).encode())[:-20]
    assert "i.jsonl.xz can't be read" in message("i.jsonl.xz", cut)
    assert "j.jsonl.gz can't be read" in message("j.jsonl.gz", b"no gzip")
    with pytest.raises(UserError, match=r"data\.valid_path is not set"):
        open_documents({"source": "text"}, "valid")
    with pytest.raises(UserError, match="splits train and valid, not 'test'"):
        open_documents({"source": "wikipedia_excerpt"}, "test")


# tokenizers


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(UNICODE, min_size=1, max_size=4))
def test_tokenizers_keep_every_byte(bpe, texts):
    for tokenizer in (ByteTokenizer(), bpe):
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            assert ids.dtype == np.int32 and ids[-1] == tokenizer.eos
            assert (ids[:-1] != tokenizer.eos).all() and ids.max() < tokenizer.vocab_size
            assert tokenizer.to_bytes(ids).decode() == text
            assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_bpe_compresses_and_keeps_the_end_marker_as_text(bpe):
    assert bpe.vocab_size == 300 and bpe.token_bytes.shape == (300,)
    (ids,) = bpe.encode_documents([TEXTS[0]])
    assert len(ids) < len(TEXTS[0]) / 3
    (ids,) = bpe.encode_documents(["a<|endoftext|>b"])
    assert (ids == bpe.eos).sum() == 1 and bpe.to_bytes(ids).decode() == "a<|endoftext|>b"
    assert BPETokenizer.train(TEXTS, 300).json == bpe.json  # training is deterministic


def test_saved_tokenizers_load_equal(bpe, tmp_path):
    for tokenizer in (ByteTokenizer(), bpe):
        (tmp_path / "t.json").write_text(tokenizer.json, encoding="utf-8")
        again = open_tokenizer({"tokenizer": str(tmp_path / "t.json")})
        assert type(again) is type(tokenizer) and again.vocab_size == tokenizer.vocab_size
        assert all(map(np.array_equal, again.encode_documents(TEXTS), tokenizer.encode_documents(TEXTS)))


def test_tokenizer_errors(bpe, tmp_path, cfg):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    def message(tokenizer):
        tokenizer.save(str(tmp_path / "bad.json"))
        with pytest.raises(UserError) as caught:
            load_tokenizer(tmp_path / "bad.json").encode_documents(["Ein Wort"])
        return str(caught.value)

    assert "has no token <|endoftext|>" in message(Tokenizer(models.BPE({"a": 0}, [])))
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "wört—": 1}, unk_token="<|endoftext|>"))
    assert "not byte-level" in message(words)
    changed = Tokenizer.from_str(bpe.json)
    changed.normalizer = normalizers.Replace("Wort", "W")
    assert "does not keep the bytes" in message(changed)
    changed = Tokenizer.from_str(bpe.json)
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert "does not keep the bytes" in message(changed)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(UserError, match=r"data\.tokenizer wordpiece can't be read"):
        open_tokenizer(cfg | {"tokenizer": "wordpiece"})
    with pytest.raises(UserError, match=r"data\.vocab is not set"):
        open_tokenizer(cfg | {"tokenizer": "bpe"})
    with pytest.raises(UserError, match=r"data\.vocab is 256"):
        open_tokenizer(cfg | {"tokenizer": "bpe", "vocab": 256})
    with pytest.raises(UserError, match=r"has 257 ids, but data\.vocab is 200"):
        open_tokenizer(cfg | {"vocab": 200})


# corpus and cache


def test_corpus_is_the_documents_end_to_end(cfg):
    corpus = build_corpus(cfg, "train")
    texts = [t for t in TEXTS if t.strip()]
    assert corpus.tokens.dtype == np.int32 and corpus.starts.dtype == np.int64 and len(corpus) == 4
    for i, text in enumerate(texts):
        document = corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]]
        assert document[-1] == 256 and corpus.tokenizer.to_bytes(document).decode() == text
    assert corpus.predictions().tolist() == [len(t.encode()) for t in texts]


def test_many_documents_pass_the_chunk_border(tmp_path, monkeypatch, cfg):
    whole = build_corpus(cfg, "train")
    monkeypatch.setattr(corpora, "CHUNK", 50)
    assert len(list(corpora._chunks(open_documents(cfg, "train")))) == 4
    parts = build_corpus(cfg | {"cache": str(tmp_path / "other")}, "train")
    assert np.array_equal(whole.tokens, parts.tokens) and np.array_equal(whole.starts, parts.starts)


def test_cache_is_hit_until_text_or_tokenizer_change(cfg, tmp_path):
    bpe_cfg = cfg | {"tokenizer": "bpe", "vocab": 300}

    def entries():
        return {p.name for p in (tmp_path / "cache").iterdir()}

    first = build_corpus(bpe_cfg, "train")
    one = entries()
    assert len(one) == 2 and all(name.endswith(".npz") for name in one)
    stamp = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    again = build_corpus(bpe_cfg, "train")
    assert np.array_equal(first.tokens, again.tokens) and first.tokenizer.json == again.tokenizer.json
    assert stamp == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    assert build_corpus(bpe_cfg, "valid").tokenizer.json == first.tokenizer.json  # trained on train alone
    assert len(entries()) == 3
    build_corpus(bpe_cfg | {"vocab": 290}, "train")
    assert len(entries()) == 5
    with open(cfg["train_path"], "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert len(build_corpus(bpe_cfg, "train")) == 5 and len(entries()) == 7


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_cache_is_rebuilt_and_said(cfg, tmp_path, caplog, damage):
    before = build_corpus(cfg, "train")
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    bad = {
        "cut": good[: len(good) // 2],
        "empty": b"",
        "flip": good[:400] + bytes([good[400] ^ 1]) + good[401:],
    }
    entry.write_bytes(bad[damage])
    caplog.clear()
    assert np.array_equal(build_corpus(cfg, "train").tokens, before.tokens)
    assert "is damaged" in caplog.text and "built anew" in caplog.text
    assert entry.read_bytes() == good
    caplog.clear()
    build_corpus(cfg, "train")
    assert "built anew" not in caplog.text


def test_unwritable_cache_costs_one_warning(cfg, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    corpora._warn_once.cache_clear()
    blocked = cfg | {"cache": str(tmp_path / "file" / "cache"), "tokenizer": "bpe", "vocab": 300}
    for split in ("train", "valid"):
        assert len(build_corpus(blocked, split)) > 0
    lines = [r for r in caplog.records if "can't be written" in r.getMessage()]
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING


def test_cache_folder_order(monkeypatch):
    monkeypatch.setenv("JOJAX_CACHE", "/env")
    assert str(corpora.cache_folder({"cache": "/given"})) == "/given"
    assert str(corpora.cache_folder({})) == "/env"
    monkeypatch.delenv("JOJAX_CACHE")
    assert corpora.cache_folder({}).parts[-2:] == (".cache", "jojax")
