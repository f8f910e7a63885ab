"""Text files, and the excerpt inside the package, as a sequence of whole documents."""

import functools
import gzip
import hashlib
import json
import logging
import lzma
import pathlib
import zlib

from jojax.errors import UserError

log = logging.getLogger(__name__)
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".txt")
EXCERPT = pathlib.Path(__file__).parent / "embedded" / "wikipedia_excerpt_2016.jsonl.xz"
LONG_BYTES = 20_000  # about 5,000 tokens of a small vocabulary: long enough for the extrapolation windows


class Documents:
    """Random access to the documents of a file or folder: len(), [i] -> str.

    jsonl files hold a document a row, in its field `text`; a .txt file is one document; a folder is all
    its files of these kinds, in the order of their paths. The text is kept to the byte. Everything is
    read into memory, at first use.

    Attributes:
      titles: list[str], the field `title` of each row, else file name and line.
      skipped: how many documents were left out because they hold nothing but white space.

    Raises:
      UserError: nothing to read at the path, a damaged file, a row without text, or no document at all.
    """

    def __init__(self, path, select=None, rule=""):
        """select(documents) -> documents keeps a part of the list of (title, text); rule names it in the
        digest."""
        self.path = pathlib.Path(path)
        self.files = _find_files(self.path)
        self._select = select
        self._rule = rule

    def __len__(self):
        return len(self._content[0])

    def __getitem__(self, index):
        return self._content[0][index][1]

    @property
    def titles(self):
        return [title for title, _ in self._content[0]]

    @property
    def skipped(self):
        return self._content[1]

    @functools.cached_property
    def _content(self):
        documents = [row for file in self.files for row in _read_file(file)]
        kept = [(title, text) for title, text in documents if text.strip()]
        skipped = len(documents) - len(kept)
        if not kept:
            raise UserError(f"{self.path} holds no document: {skipped} empty ones and no other")
        return (self._select(kept) if self._select else kept), skipped

    def digest(self):
        """A hash of the bytes of the files and of what is selected from them; reads them, but decodes
        nothing."""
        total = hashlib.sha256(self._rule.encode())
        for file in self.files:
            with file.open("rb") as stream:
                total.update(f"{_suffix(file)} ".encode() + hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()


def open_documents(data_cfg, split):
    """The documents of a text split.

    Args:
      data_cfg: mapping; source 'text' reads data.<split>_path, 'wikipedia_excerpt' the 106 articles in
        the package, of which every fifth long one is the split 'valid' and all others are 'train'.
      split: 'train', 'valid', or any S with a data.S_path.

    Raises:
      UserError: no path for that split, or nothing to read there.
    """
    if data_cfg["source"] == "wikipedia_excerpt":
        if split not in ("train", "valid"):
            raise UserError(f"the Wikipedia excerpt has the splits train and valid, not {split!r}")
        return Documents(EXCERPT, functools.partial(_held_out, valid=split == "valid"), f"every fifth long: {split}")
    if data_cfg["source"] != "text":
        raise UserError(f"data.source = {data_cfg['source']!r}: language models read text, wikipedia_excerpt or tokens")
    path = data_cfg.get(f"{split}_path")
    if not path:
        raise UserError(f"data.{split}_path is not set: give the file or folder of the {split} split")
    return Documents(path)


def _held_out(documents, valid):
    """Whole articles, never slices: every fifth of those of at least LONG_BYTES goes to the valid split."""
    long = [i for i, (_, text) in enumerate(documents) if len(text.encode()) >= LONG_BYTES]
    chosen = set(long[4::5])
    return [row for i, row in enumerate(documents) if (i in chosen) == valid]


def _suffix(path):
    return next((s for s in SUFFIXES if path.name.endswith(s)), None)


def _find_files(path):
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        files = [p for p in inside if _suffix(p)]
        if not files:
            raise UserError(f"{path} holds no file named {', '.join('*' + s for s in SUFFIXES)}")
        other = [p for p in inside if not _suffix(p) and p.name[0] != "."]
        if other:
            log.warning("%s: %d files that are not %s are left out: %s …", path, len(other), SUFFIXES, other[0].name)
        return files
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a file or folder of text")
    if not _suffix(path):
        raise UserError(f"{path} is no text this reads: its name must end in {', '.join(SUFFIXES)}")
    return [path]


def _read_file(path):
    """Yields (title, text) of every document, empty ones too."""
    line = 0
    try:
        if _suffix(path) == ".txt":
            yield path.stem, path.read_bytes().decode("utf-8")
            return
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
        with opener(path, "rb") as stream:
            for line, row in enumerate(stream, 1):
                if row.strip():
                    yield _parse_row(row, f"{path}:{line}")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} can't be read after line {line} ({error}): restore or convert it to UTF-8") from error


def _parse_row(row, place):
    try:
        fields = json.loads(row)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{place} is not a JSON object ({error}): mend or remove that line") from error
    text = fields.get("text") if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place} has no field `text` that is a string: every row of a jsonl file needs one")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place} holds half a surrogate pair, which is not text: mend or remove that line") from error
    return str(fields.get("title") or place), text
