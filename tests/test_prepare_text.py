"""Text in every format gives the same documents and tokens; token shards train like the text they were made from."""

import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import runs
from jojax.data.corpus import build_corpus, open_tokenizer
from jojax.data.documents import open_documents
from jojax.data.stream import train_batches
from jojax.data.text import BPETokenizer
from jojax.data.tokens import TokenShards
from jojax.data.windows import PackedRows, common_windows
from jojax.errors import UserError
from scripts import prepare_data
from scripts.prepare import eltec, shards, texts, wikipedia, work

DUMP = runs.ROOT / "tests" / "fixtures" / "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def articles(count, size=700):
    """Real text, cut short: [(title, text)]"""
    source = open_documents({"source": "wikipedia_excerpt"}, "train")
    return [(source.titles[i], source[i][:size].strip()) for i in range(count)]


ARTICLES = articles(40)


def prepare(name, source, out, *more, code=0):
    jobs = [] if name in prepare_data.FILES else ["--jobs", "1"]
    assert prepare_data.main([name, str(source), "--out", str(out), *jobs, *more]) == code


def cfg(path, **more):
    return {"source": "tokens", "path": str(path), "tokenizer": "bpe"} | more


def documents(path, split):
    corpus = build_corpus(cfg(path), split)
    cuts = zip(corpus.starts[:-1], corpus.starts[1:], strict=True)
    return [corpus.tokenizer.to_bytes(corpus.tokens[np.arange(a, b)]).decode() for a, b in cuts]


def lines(texts):
    return "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()


def write(path, kind, texts):
    path.mkdir()
    half = len(texts) // 2
    for name, part in (("a-0", texts[:half]), ("a-1", texts[half:])):
        if kind == "parquet":
            pq.write_table(pa.table({"text": part}), path / f"{name}.parquet", row_group_size=7)
        else:
            pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}[kind]
            (path / f"{name}.jsonl{kind}").write_bytes(pack(lines(part)))
    return path


@pytest.mark.parametrize("kind", ["", ".gz", ".xz", ".zst", "parquet"])
def test_rows_of_every_kind(tmp_path, kind):
    wanted = [t for _, t in ARTICLES] + ["naïve 🥊 <|endoftext|> \r\n"]
    source = write(tmp_path / "in", kind, [*wanted[:3], " ", *wanted[3:]])
    more = ("--tokenizer", "bytes", "--valid", "0.2", "--shard-mb", "0.01")
    prepare("openwebtext", source, tmp_path / "out", *more)
    train, valid = (documents(tmp_path / "out", split) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(wanted) and 0 < len(valid) < len(train)
    assert [t for t in wanted if t in train] == train  # in order, over several shards
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert len(index["splits"]["train"]["shards"]) > 1 and index["empty"] == {"all": 1}
    assert sum(s["text_bytes"] for s in index["splits"].values()) == sum(len(t.encode()) for t in wanted)


def test_equal_documents_stay_on_one_side(tmp_path):
    source = write(tmp_path / "in", "", [t for _, t in ARTICLES] * 2)
    prepare("fineweb_edu", source, tmp_path / "out", "--tokenizer", "bytes", "--valid", "0.3")
    train, valid = (documents(tmp_path / "out", split) for split in ("train", "valid"))
    assert not set(train) & set(valid) and len(train) + len(valid) == 80


def test_wikitext(tmp_path):
    """Raw file, token file and the hub's lines; headings count between blank lines only."""
    rows = [
        " ",
        " = First = ",
        " ",
        " A paragraph . ",
        " = No heading = ",
        " since no blank line is around . ",
        " ",
        " = = A section = = ",
    ]
    rows += [
        " ",
        " More of it . ",
        " ",
        " = Neither = ",
        " for text follows . ",
        " ",
        " = Second = ",
        " ",
        " Its text é . ",
        " ",
    ]
    raw = "".join(row + "\n" for row in rows)
    first, second = "\n".join(rows[1:14]) + "\n", "\n".join(rows[14:]) + "\n"
    for kind in ("raw", "tokens", "hub"):
        (tmp_path / kind).mkdir()
        for split, hub in (("train", "train"), ("valid", "validation"), ("test", "test")):
            if kind == "hub":
                table = pa.table({"text": ["" if not row.strip() else row + "\n" for row in rows]})
                pq.write_table(table, tmp_path / kind / f"{hub}-00000-of-00001.parquet")
            else:
                (tmp_path / kind / f"wiki.{split}.{kind}").write_text(raw)
        prepare("wikitext2", tmp_path / kind, tmp_path / f"{kind}-out", "--tokenizer", "bytes")
        for split in ("train", "valid", "test"):
            assert documents(tmp_path / f"{kind}-out", split) == [first, second]
    wrong = [line for line in raw.split("\n") if texts.HEADING.fullmatch(line)]
    assert len(wrong) == 4  # what the lines alone would take for articles


def test_the_dump_gives_its_articles():
    pages = dict(wikipedia.dump([DUMP]))
    excerpt = (
        open_documents({"source": "wikipedia_excerpt"}, "train"),
        open_documents({"source": "wikipedia_excerpt"}, "valid"),
    )
    assert len(pages) == 106 and set(pages) == set(excerpt[0].titles) | set(excerpt[1].titles)
    short = sorted(pages, key=lambda title: len(pages[title]))[:6]
    known = {title: e[i] for e in excerpt for i, title in enumerate(e.titles)}
    for title in short:  # made by other rules: most words are the same
        a, b = (set(t.split()) for t in (wikipedia.plain(pages[title]), known[title]))
        assert len(a & b) / len(a | b) > 0.9, title


def test_markup_becomes_text():
    markup = (
        "{{Infobox|a=[[x]]}}\n'''Bold''' and [[Target|a ''link'']], [[plain]]s."
        "<ref name=a>gone [[x]]</ref><ref name=a/>\n"
        "[[File:A.jpg|thumb|of a [[cat]]]]\n{|\n| a table\n|}\n== A heading ==\n"
        "* one &amp; two<br/>three <!-- gone -->\n"
        "[http://a.b a site] [[Category:Cats]] [[:Category:Cats]]"
    )
    assert wikipedia.plain(markup).split("\n") == [
        "Bold and a link, plains.", "", "A heading", " one & two", "three", "a site  :Category:Cats"
    ]  # fmt: skip


def test_dump_plain_multistream_and_cut(tmp_path):
    import bz2

    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.{}/">'
    page = (
        "<page><title>{0}</title><ns>{1}</ns><id>1</id>{2}<revision><id>2</id><text>{0} text</text></revision></page>"
    )
    pages = [
        page.format(*a) for a in (("A", 0, ""), ("T:B", 1, ""), ("C", 0, '<redirect title="A"/>'), ("D &amp; E", 0, ""))
    ]
    for version in (10, 11):
        parts = [head.format(version), *pages, "</mediawiki>"]
        whole, streams = "".join(parts).encode(), b"".join(bz2.compress(p.encode()) for p in parts)
        (tmp_path / "d.xml").write_bytes(whole)
        (tmp_path / "d.xml.bz2").write_bytes(streams)
        for name in ("d.xml", "d.xml.bz2"):
            assert list(wikipedia.dump([tmp_path / name])) == [("A", "A text"), ("D & E", "D & E text")]
    (tmp_path / "d.xml").write_bytes(whole[:-60])
    (tmp_path / "d.xml.bz2").write_bytes(streams[:-20])
    for name in ("d.xml", "d.xml.bz2"):
        with pytest.raises(UserError, match=rf"{name} .*get that file again"):
            list(wikipedia.dump([tmp_path / name]))


def test_wikiextractor_and_tfds(tmp_path):
    """<doc …>, --json and a prepared data set hold the same documents."""
    import tensorflow_datasets as tfds

    for kind in ("doc", "json"):
        for folder, part in (("AA", ARTICLES[:20]), ("AB", ARTICLES[20:])):
            (tmp_path / kind / folder).mkdir(parents=True)
            rows = [
                json.dumps({"id": "1", "title": title, "text": text})
                if kind == "json"
                else f'<doc id="1" url="u" title="{title}">\n{title}\n\n{text}\n\n</doc>'
                for title, text in part
            ]
            (tmp_path / kind / folder / "wiki_00").write_text("\n".join(rows) + "\n")
    with tfds.core.registered.skip_registration():

        class Wikipedia(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                kinds = {"title": tfds.features.Text(), "text": tfds.features.Text()}
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(kinds))

            def _split_generators(self, dl_manager):
                return {"train": ((i, {"title": a, "text": b}) for i, (a, b) in enumerate(ARTICLES))}

            def _generate_examples(self):
                raise NotImplementedError

    Wikipedia(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()
    for kind in ("doc", "json", "tfds/wikipedia/1.0.0"):
        found = list(wikipedia.source(tmp_path / kind).splits["all"]())
        assert sorted(text for _, text in found) == sorted(text for _, text in ARTICLES)
    assert texts._wiki40b("\n_START_ARTICLE_\nA\n_START_PARAGRAPH_\nb_NEWLINE_c") == "A\nb\nc"


def test_novels(tmp_path, capsys):
    tei = (
        '<TEI xmlns="http://www.tei-c.org/ns/1.0"><text><front><p>gone</p></front><body><pb n="1"/><div><head>CHAPTER '
        'I.</head><head>{}</head><p>indeed,\n   <pb n="15"/>so <hi>very</hi>\n  one</p><p>\n<pb n="16"/></p>'
        '<p>\n<pb n="16"/>However</p>'
        "<quote>Esq.</quote><quote><l> ‘How doth </l><l>And pour</l></quote><milestone/></div></body></text></TEI>"
    )
    for title in ("ENG18400_Old", *eltec.VALID, "ENG19130_New"):
        (tmp_path / f"{title}.xml").write_text(tei.format(title))
    prepare("eltec_eng", tmp_path, tmp_path / "out")
    assert (
        "left out, since neither older than ENG19020_Nesbit nor in the valid split: ENG19130_New"
        in capsys.readouterr().out
    )
    with lzma.open(tmp_path / "out" / "eltec_eng_train.jsonl.xz") as file:
        rows = [json.loads(r) for r in file]
    text = "CHAPTER I.\nENG18400_Old\nindeed, so very one\n\nHowever\nEsq.\n‘How doth\nAnd pour"
    assert rows == [{"title": "ENG18400_Old", "text": text}]
    with lzma.open(tmp_path / "out" / "eltec_eng_valid.jsonl.xz") as file:
        assert [json.loads(r)["title"] for r in file] == eltec.VALID
    prepare("eltec_eng", tmp_path, tmp_path / "out")
    assert capsys.readouterr().out.count("all done, nothing to do") == 2


def test_bad_lines_and_too_many(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(
        lines([t for _, t in ARTICLES]) + b'{"text": \n{"txt": "x"}\n{"text": "\\ud800"}\n'
    )
    more = ("--tokenizer", "bytes", "--valid", "0.2")
    prepare("openwebtext", tmp_path, tmp_path / "out", *more, code=2)
    told = capsys.readouterr().err
    for line in ("41 is left out: it is no JSON", "42 is left out: it has no text", "43 is left out: it holds half"):
        assert f"a.jsonl:{line}" in told
    with pytest.raises(UserError, match="is not prepared to the end: start that command again"):
        build_corpus(cfg(tmp_path / "out"), "train")
    prepare("openwebtext", tmp_path / "a.jsonl", tmp_path / "out", *more, "--max-bad", "0.1")
    assert len(documents(tmp_path / "out", "train") + documents(tmp_path / "out", "valid")) == 40


def test_optional_packages_are_named(tmp_path, monkeypatch, capsys):
    import sys

    write(tmp_path / "in", ".zst", ["a", "b"])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    prepare("openwebtext", tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes", code=2)
    assert "needs the package zstandard: python3 -m pip install zstandard" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    prepare("wikipedia", DUMP, tmp_path / "out", "--tokenizer", "bytes", code=2)
    assert "needs the package mwparserfromhell" in capsys.readouterr().err


def test_gpt2_files(tmp_path):
    trained = BPETokenizer.train([t for _, t in ARTICLES], 400)
    model = json.loads(trained.json)["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "encoder.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    again = shards.gpt2(tmp_path)
    ids = [t.encode_documents([ARTICLES[0][1]])[0].tolist() for t in (trained, again)]
    assert ids[0] == ids[1] and again.eos == trained.eos
    with pytest.raises(UserError, match=r"has no encoder\.json"):
        shards.gpt2(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """40 articles as jsonl for data.source = text and as shards of several files, with one trained tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    write(folder / "in", "", [t for _, t in ARTICLES])
    prepare("wikipedia", folder / "in", folder / "out", "--vocab", "300", "--valid", "0.2", "--shard-mb", "0.01")
    for split in ("train", "valid"):
        (folder / f"{split}.jsonl").write_bytes(lines(documents(folder / "out", split)))
    return folder


def text_cfg(made):
    given = {"source": "text", "tokenizer": str(made / "out" / "tokenizer.json"), "cache": str(made / "cache")}
    return given | {f"{s}_path": str(made / f"{s}.jsonl") for s in ("train", "valid")}


def test_shards_are_the_corpus_of_the_same_text(made):
    given = text_cfg(made)
    for split in ("train", "valid"):
        a, b = build_corpus(given, split), build_corpus(cfg(made / "out"), split)
        assert np.array_equal(a.starts, b.starts) and np.array_equal(a.tokens, b.tokens[np.arange(len(b.tokens))])
        assert len(a.tokens) == len(b.tokens) and a.tokenizer.json == b.tokenizer.json
        assert isinstance(b.tokens, TokenShards) and b.tokens[np.array([[0, 1]])].shape == (1, 2)
    assert len(list((made / "out").glob("train-*.tokens"))) > 1


def test_batches_of_shards_are_those_of_the_text(made):
    """Rows of training and of evaluation, at any step and for any host."""
    given = text_cfg(made)
    for rows in (lambda c: PackedRows(c, 32), lambda c: common_windows(c, (16, 32))[32]):
        a, b = (
            train_batches(rows(build_corpus(c, "train")), 4, 7, start_step=step, process_count=2, process_index=1)
            for c, step in ((given, 0), (cfg(made / "out"), 3))
        )
        for step in range(3, 30, 9):
            runs.same(a[step], b[step])
        a.close(), b.close()


@pytest.mark.slow
def test_training_on_shards_is_training_on_the_text(made, tmp_path):
    given = runs.lm(data__vocab=300, steps=6, eval__every_steps=3, eval__lengths=(16, 32))
    text = {f"data.{s}_path": str(made / f"{s}.jsonl") for s in ("train", "valid")}
    text |= {"data.tokenizer": str(made / "out" / "tokenizer.json")}
    shard = {"data.source": "tokens", "data.path": str(made / "out"), "data.tokenizer": "bpe"}
    for name, more in (("text", text), ("tokens", shard)):
        runs.train_here(runs.LM, given | more, tmp_path / name)
    assert runs.told(tmp_path / "text") == runs.told(tmp_path / "tokens")
    a, b = (runs.result(tmp_path / name) for name in ("text", "tokens"))
    assert a["metrics"] == b["metrics"] and a["scored"] == b["scored"]


def test_processes_give_the_same_shards(made, tmp_path):
    out, more = tmp_path / "out", ["--vocab", "300", "--valid", "0.2", "--shard-mb", "0.01"]
    assert prepare_data.main(["wikipedia", str(made / "in"), "--out", str(out), "--jobs", "2", *more]) == 0
    a, b = (json.loads((folder / "index.json").read_text())["files"] for folder in (out, made / "out"))
    assert a == b


def test_killed_goes_on(made, tmp_path, monkeypatch, capsys):
    more = ("--vocab", "300", "--valid", "0.2", "--shard-mb", "0.002")
    prepare("wikipedia", made / "in", tmp_path / "whole", *more)
    real = work.write_whole

    def dies(path, data):
        if path.name == "all-00002.json":
            raise KeyboardInterrupt
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(work, "write_whole", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare("wikipedia", made / "in", tmp_path / "out", *more)
    prepare("wikipedia", made / "in", tmp_path / "out", *more)
    assert "in 2 finished parts" in capsys.readouterr().err
    a, b = (json.loads((tmp_path / name / "index.json").read_text()) for name in ("out", "whole"))
    assert a == b and len(a["splits"]["train"]["shards"]) > 3
    assert not list((tmp_path / "out").glob("*.part")) and not list((tmp_path / "out").glob("all-*"))
    prepare("wikipedia", made / "in", tmp_path / "out", *more, "--verify")
    assert "all done, nothing to do" in capsys.readouterr().out
    prepare("wikipedia", made / "in", tmp_path / "out", *more[:2], code=2)
    assert "was begun with valid = 0.2, not 0.005" in capsys.readouterr().err


def test_damaged_shards_say_so(made, tmp_path):
    import shutil

    def message(spoil, **more):
        shutil.copytree(made / "out", tmp_path / "copy")
        spoil(tmp_path / "copy")
        with pytest.raises(UserError) as caught:
            build_corpus(cfg(tmp_path / "copy", **more), "train")
        shutil.rmtree(tmp_path / "copy")
        return str(caught.value)

    def cut(name):
        return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])

    assert "bytes instead of" in message(cut("train-00001.tokens"))
    assert "train-00000.starts.npy can't be read" in message(cut("train-00000.starts.npy"))
    assert "train-00000.tokens can't be read" in message(lambda folder: (folder / "train-00000.tokens").unlink())
    assert "index.json is damaged" in message(cut("index.json"))
    assert "holds no index.json" in message(lambda folder: (folder / "index.json").unlink())
    other = BPETokenizer.train(["other text " * 9], 260).json
    assert "is not the one that made the shards" in message(
        lambda folder: (folder / "tokenizer.json").write_text(other)
    )
    assert "data.tokenizer bytes is not the one" in message(lambda folder: None, tokenizer="bytes")
    assert "has 300 ids, but data.vocab is 299" in message(lambda folder: None, vocab=299)
    with pytest.raises(UserError, match=r"data\.path is not set"):
        open_tokenizer({"source": "tokens", "tokenizer": "bpe"})
    with pytest.raises(UserError, match="has no split 'test': it has train, valid"):
        build_corpus(cfg(made / "out"), "test")


@pytest.mark.slow
def test_the_whole_dump_by_two_processes(tmp_path, capsys):
    more = ["--out", str(tmp_path / "out"), "--jobs", "2", "--vocab", "2048", "--valid", "0.1"]
    assert prepare_data.main(["wikipedia", str(DUMP), *more]) == 0
    train, valid = (documents(tmp_path / "out", split) for split in ("train", "valid"))
    assert len(train) + len(valid) == 106
    assert 2_800_000 < sum(len(t.encode()) for t in train + valid) < 3_000_000
