"""Readers of text: each yields (name, text) or Bad, in bounded memory. WikiText, jsonl, parquet, TFDS, TEI novels."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from typing import Any

from jojax.errors import UserError
from scripts.prepare.files import files_of, opened, parquet_files, parquet_rows
from scripts.prepare.work import Bad, fingerprint

JSONL = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".json", ".json.gz")
HEADING = re.compile(r" = [^=].* = ")
TEI = "{http://www.tei-c.org/ns/1.0}"
EMPTY = "\0"  # stands for a paragraph without text


@dataclasses.dataclass
class TextSource:
    """splits: {split: function that yields members}; `all` is divided by whole documents. convert: 'wiki' where the
    payload is wiki markup that the workers turn into text."""

    plan: dict
    splits: dict[str, Callable[[], Iterator[Any]]]
    convert: str = ""


# ------------------------------------------------------------------------------------------------ jsonl, parquet
def rows(name, root, where):
    """A folder or file of parquet or jsonl with `text`, a document a row; files in the order of their paths."""
    if not root.exists():
        raise UserError(f"{root} does not exist. {where}")
    files = files_of(root)
    for read, endings in ((_parquet, (".parquet",)), (jsonl, JSONL)):
        if chosen := [p for p in files if p.name.endswith(endings)]:
            plan = {"dataset": name, "source": fingerprint(chosen)}
            return TextSource(plan, {"all": lambda read=read: read(chosen)})
    raise UserError(f"{root} holds no *.parquet and none of {', '.join('*' + e for e in JSONL)}. {where}")


def _parquet(files):
    for name, row in parquet_rows(files, ("text",)):
        yield _checked(name, row["text"])


def jsonl(files):
    for path in files:
        with opened(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield json_row(line, f"{path.name}:{number}")


def json_row(line, place):
    try:
        fields = json.loads(line)
    except ValueError as error:
        return Bad(place, f"it is no JSON ({error})")
    return _checked(place, fields.get("text") if isinstance(fields, dict) else None)


def _checked(name, text):
    if not isinstance(text, str):
        return Bad(name, "it has no text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Bad(name, "it holds half a surrogate pair")
    return name, text


# ------------------------------------------------------------------------------------------------ WikiText
def wikitext(name, root, where):
    """wiki.{train,valid,test}.{tokens,raw}, or parquet with a line a row, which gives the same articles."""
    splits = {}
    for split, hub in (("train", "train"), ("valid", "validation"), ("test", "test")):
        found = [p for ending in ("raw", "tokens") for p in sorted(root.rglob(f"wiki.{split}.{ending}"))]
        if len(found) > 1:
            raise UserError(f"{root} holds {found[0]} and {found[1]}: give the folder of one of them")
        if found:
            splits[split] = (found, _file_lines)
        elif root.is_dir() and (files := parquet_files(root).get(hub)):
            splits[split] = (files, _row_lines)
    if gone := {"train", "valid"} - set(splits):
        raise UserError(f"{root} has no wiki.{min(gone)}.raw, .tokens or parquet of it. {where}")
    plan = {"dataset": name, "source": fingerprint([p for files, _ in splits.values() for p in files])}
    return TextSource(
        plan,
        {s: lambda s=s, files=files, lines=lines: articles(lines(files), s) for s, (files, lines) in splits.items()},
    )


def _file_lines(files):
    with opened(files[0]) as stream:
        for line in stream:
            yield line.decode(errors="surrogateescape").removesuffix("\n")


def _row_lines(files):
    """The hub drops the space of a blank line; the original files have it."""
    for _, row in parquet_rows(files, ("text",)):
        yield (row["text"] or "").removesuffix("\n") or " "


def articles(lines, split):
    """(split:number, text) of each article: it begins at ` = Title = ` with a blank line before and after."""
    article, before, line, number = [], "", next(lines, None), 0
    while line is not None:
        after = next(lines, None)
        begins = HEADING.fullmatch(line) and not before.strip() and not (after or "").strip()
        if begins and article:
            yield _article(article, f"{split}:{number}")
            article, number = [], number + 1
        if article or line.strip():  # blank lines before the first heading belong to nothing
            article.append(line)
        before, line = line, after
    if article:
        yield _article(article, f"{split}:{number}")


def _article(lines, name):
    text = "\n".join(lines) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        return Bad(name, f"{lines[0].strip()!r} is no UTF-8")
    return name, text


# ------------------------------------------------------------------------------------------------ TFDS
def tfds_rows(name, root, where):
    """A prepared wikipedia or wiki40b in ArrayRecord files; its splits joined in the order train, validation, test."""
    import tensorflow_datasets as tfds

    from jojax.data.source import find_prepared

    folder = find_prepared(root, None)
    builder: Any = tfds.builder_from_directory(str(folder))
    if "text" not in builder.info.features:
        raise UserError(f"{folder} has no feature `text`. {where}")
    order = [s for s in ("train", "validation", "test") if s in builder.info.splits] or list(builder.info.splits)
    try:
        sources = {s: builder.as_data_source(s) for s in order}
    except NotImplementedError as error:
        raise UserError(f"{folder} is not in ArrayRecord files: prepare it with file_format='array_record'") from error

    def members():
        for split, records in sources.items():
            for i in range(len(records)):
                try:
                    text = records[i]["text"]
                except (RuntimeError, ValueError) as error:
                    yield Bad(f"{split}:{i}", str(error))
                    continue
                yield _checked(f"{split}:{i}", _wiki40b(text.decode() if isinstance(text, bytes) else text))

    plan = {"dataset": name, "source": fingerprint(sorted(folder.glob("*array_record*")))}
    return TextSource(plan, {"all": members})


def _wiki40b(text):
    """wiki40b marks its parts by words: _START_ARTICLE_, _START_SECTION_, _START_PARAGRAPH_, _NEWLINE_."""
    if "_START_" not in text:
        return text
    return re.sub(r"\n?_START_(ARTICLE|SECTION|PARAGRAPH)_\n", "\n", text).replace("_NEWLINE_", "\n").strip("\n")


# ------------------------------------------------------------------------------------------------ TEI
def tei_text(path):
    """Paragraphs, headings and lines of verse of the body of a TEI file, one a line, white space collapsed; notes
    and page breaks leave nothing behind, a paragraph that holds nothing else a blank line."""
    try:
        body = ET.parse(path).getroot().find(f"{TEI}text/{TEI}body")
    except ET.ParseError as error:
        raise UserError(f"{path} is no whole XML ({error}): get that file again") from error
    if body is None:
        raise UserError(f"{path} is no TEI text: it has no text/body")
    blocks = [[]]
    _blocks(body, blocks)
    lines = (" ".join("".join(block).split()) for block in blocks)
    return "\n".join(line.strip(EMPTY) for line in lines if line).strip("\n")


def _blocks(element, blocks):
    """Text in the order of the document; what is not inside a line begins and ends a block."""
    first = len(blocks)
    inline = element.tag in (f"{TEI}{name}" for name in ("hi", "emph", "foreign", "title", "ref", "corr", "pb", "gap"))
    skip = element.tag == f"{TEI}note"
    if not inline and not skip:
        blocks.append([])
    if not skip:
        blocks[-1].append(element.text or "")
        for child in element:
            _blocks(child, blocks)
            blocks[-1].append(child.tail or "")
    if not inline and not skip:
        if element.tag == f"{TEI}p" and not "".join("".join(b) for b in blocks[first:]).strip():
            blocks[-1].append(EMPTY)
        blocks.append([])
