"""A split as one flat array of tokens, tokenised once and kept on disk."""

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import tempfile
import zipfile
from typing import Any

import numpy as np

from jojax.data.documents import open_documents
from jojax.data.text import BPETokenizer, ByteTokenizer, load_tokenizer
from jojax.data.tokens import TokenShards, stored_tokenizer
from jojax.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1  # part of every key: raise it when the content of an entry changes
CHUNK = 4_000_000  # characters tokenised at a time; the library's records take about 50 bytes for each


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a split, end to end.

    Attributes:
      tokens: int32 [N], or TokenShards; every document ends with tokenizer.eos.
      starts: int64 [D + 1]; document d is tokens[starts[d] : starts[d + 1]].
      tokenizer: see jojax.data.text.
      digest: of the text and the tokenizer.
    """

    tokens: np.ndarray | TokenShards
    starts: np.ndarray
    tokenizer: Any
    digest: str = ""

    def __len__(self):
        return len(self.starts) - 1

    def predictions(self):
        """int64 [D]: how many next-token predictions each document offers, its length less one."""
        return np.diff(self.starts) - 1


def open_tokenizer(data_cfg):
    """The tokenizer of a data config; 'bpe' is trained on the train split, or read from the cache.
    Token shards bring their own.

    Args:
      data_cfg: mapping with tokenizer ('bytes', 'bpe' or the path of a json), vocab (size of the model's
        vocabulary; needed for bpe, else optional), cache, and for bpe the keys of the train split.

    Raises:
      UserError: unreadable or unfit tokenizer, or one with more ids than data.vocab.
    """
    kind, vocab = data_cfg["tokenizer"], data_cfg.get("vocab")
    name = f"data.tokenizer {kind}"
    if data_cfg.get("source") == "tokens":
        tokenizer = stored_tokenizer(data_cfg)
        if kind and kind != "bpe" and open_tokenizer({"tokenizer": kind}).json != tokenizer.json:
            raise UserError(f"{name} is not the one that made the shards in {data_cfg['path']}: unset it")
        name = f"the tokenizer in {data_cfg['path']}"
    elif not kind:
        raise UserError("data.tokenizer is not set: bytes, bpe, or the path of a tokenizer's json")
    elif kind == "bytes":
        tokenizer = ByteTokenizer()
    elif kind == "bpe":
        if not vocab:
            raise UserError("data.vocab is not set: data.tokenizer = 'bpe' needs the number of tokens, such as 8192")
        tokenizer = _cached_bpe(data_cfg, int(vocab))
    else:
        tokenizer = load_tokenizer(kind)
    if vocab and tokenizer.vocab_size > vocab:
        raise UserError(f"{name} has {tokenizer.vocab_size} ids, but data.vocab is {vocab}: raise it")
    return tokenizer


def build_corpus(data_cfg, split):
    """The tokenised split, from the cache where the same text and tokenizer were seen before.

    Args:
      data_cfg: mapping with source ('text', 'wikipedia_excerpt', 'tokens'), the paths, tokenizer, vocab, and cache:
        the folder of the cache; unset, the environment's JOJAX_CACHE, else ~/.cache/jojax.
      split: 'train', 'valid', …

    Returns:
      Corpus. Memory: the text while it is tokenised, then 4 bytes a token.
    """
    if data_cfg["source"] == "tokens":
        shards = TokenShards(data_cfg, split)
        return Corpus(shards, shards.starts, open_tokenizer(data_cfg), shards.digest)
    documents = open_documents(data_cfg, split)
    tokenizer = open_tokenizer(data_cfg)

    def build():
        ids = [row for chunk in _chunks(documents) for row in tokenizer.encode_documents(chunk)]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)])
        return {"tokens": np.concatenate(ids), "starts": starts, "skipped": np.int64(documents.skipped)}

    key = _key("corpus", documents.digest(), tokenizer.json)
    entry = cached(cache_folder(data_cfg), f"corpus-{key}", build)
    if entry["skipped"]:
        log.warning("%s: %d empty documents are left out", documents.path, entry["skipped"])
    return Corpus(entry["tokens"], entry["starts"], tokenizer, key)


def _chunks(documents):
    """Lists of consecutive documents that reach CHUNK characters."""
    chunk, size = [], 0
    for i in range(len(documents)):
        chunk.append(documents[i])
        size += len(documents[i])
        if size >= CHUNK or i == len(documents) - 1:
            yield chunk
            chunk, size = [], 0


def cache_folder(data_cfg):
    return pathlib.Path(data_cfg.get("cache") or os.environ.get("JOJAX_CACHE") or "~/.cache/jojax").expanduser()


def cached(folder, name, build):
    """The arrays of build(), a dict, kept in folder/name.npz; npz files carry a checksum of each array.

    Written under another name and renamed, so that no reader meets half a file. A damaged entry is built
    anew, and a folder that can't be written only costs the time of building: either is said in one warning.
    """
    path = folder / f"{name}.npz"
    try:
        with path.open("rb") as file, np.load(file) as entry:
            return dict(entry)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        log.warning("the cache entry %s is damaged (%s): it is built anew", path, error)
    arrays = build()
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name}-", suffix=".tmp", delete=False) as file:
            temporary = pathlib.Path(file.name)
            np.savez(file, **arrays)
        temporary.replace(path)
    except OSError as error:
        _warn_once(f"the cache folder {folder} can't be written ({error}): the text is tokenised anew in every run")
        if temporary:
            temporary.unlink(missing_ok=True)
    return arrays


@functools.cache
def _warn_once(message):
    log.warning("%s", message)


def _key(*parts):
    return hashlib.sha256("\0".join((str(FORMAT), *parts)).encode()).hexdigest()[:24]


def _cached_bpe(data_cfg, vocab):
    """A BPE of the train split; the library's version is part of the key, since its training may change."""
    import tokenizers

    documents = open_documents(data_cfg, "train")

    def build():
        tokenizer = BPETokenizer.train((documents[i] for i in range(len(documents))), vocab)
        return {"json": np.frombuffer(tokenizer.json.encode(), np.uint8)}

    key = _key("bpe", documents.digest(), str(vocab), tokenizers.__version__)
    entry = cached(cache_folder(data_cfg), f"bpe-{key}", build)
    return BPETokenizer(entry["json"].tobytes().decode(), "the trained tokenizer")
