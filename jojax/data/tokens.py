"""Token shards, made once by scripts/prepare_data.py and mapped into memory: text that is tokenised already.

Their folder: index.json, tokenizer.json, and for each shard SPLIT-NNNNN.tokens (raw uint16 or uint32, whole documents
end to end, each closed by the end-of-document id) and SPLIT-NNNNN.starts.npy (int64: where its documents start, and
its length).
"""

import hashlib
import json
import pathlib

import numpy as np

from jojax.data.text import load_tokenizer
from jojax.errors import UserError

FORMAT = "jojax tokens 1"
REMEDY = "scripts/prepare_data.py makes such folders"


def read_index(data_cfg):
    """(folder, index). UserError: no such folder, unfinished, of another format."""
    if not data_cfg.get("path"):
        raise UserError(f"data.path is not set: data.source = 'tokens' needs a folder of token shards; {REMEDY}")
    folder = pathlib.Path(data_cfg["path"]).expanduser()
    try:
        index = json.loads((folder / "index.json").read_text())
    except OSError as error:
        begun = folder.with_name(f"incomplete.{folder.name}").exists()
        why = "is not prepared to the end: start that command again" if begun else f"holds no index.json; {REMEDY}"
        raise UserError(f"data.path {folder} {why}") from error
    except ValueError as error:
        raise UserError(f"{folder / 'index.json'} is damaged ({error}): prepare the folder again") from error
    if index.get("format") != FORMAT:
        raise UserError(f"data.path {folder} holds {index.get('format', 'no tokens')!r}, not {FORMAT!r}; {REMEDY}")
    return folder, index


def stored_tokenizer(data_cfg):
    """The tokenizer beside the shards, checked against their index; data.tokenizer may name no other."""
    folder, index = read_index(data_cfg)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if hashlib.sha256(tokenizer.json.encode()).hexdigest() != index["tokenizer"]["sha256"]:
        raise UserError(f"{folder / 'tokenizer.json'} is not the one that made the shards: prepare the folder again")
    return tokenizer


class TokenShards:
    """The tokens of a split as one array: len(), [indices] -> int32 of their shape.

    Attributes:
      starts: int64 [D + 1], as in Corpus; 8 bytes a document are all that is held in memory.
      digest: of tokens, documents and tokenizer.

    Raises:
      UserError: unknown split, a shard that is missing or cut.
    """

    def __init__(self, data_cfg, split):
        folder, index = read_index(data_cfg)
        if split not in index["splits"]:
            raise UserError(f"data.path {folder} has no split {split!r}: it has {', '.join(sorted(index['splits']))}")
        shards = index["splits"][split]["shards"]
        self._first = np.cumsum([0, *(shard["tokens"] for shard in shards)], dtype=np.int64)
        self._maps = [_map(folder / f"{s['name']}.tokens", index["dtype"], s["tokens"]) for s in shards]
        starts = [_starts(folder / f"{s['name']}.starts.npy", s) for s in shards]
        ends = [part[1:] + first for part, first in zip(starts, self._first, strict=False)]
        self.starts = np.concatenate([np.zeros(1, np.int64), *ends])
        sums = [s["sha256"][key] for s in shards for key in ("tokens", "starts.npy")]
        self.digest = hashlib.sha256("\0".join([index["tokenizer"]["sha256"], *sums]).encode()).hexdigest()[:24]

    def __len__(self):
        return int(self._first[-1])

    def __getitem__(self, at):
        at = np.asarray(at)
        shard = np.searchsorted(self._first, at, side="right") - 1
        out = np.empty(at.shape, np.int32)
        for number in np.unique(shard):
            here = shard == number
            out[here] = self._maps[number][at[here] - self._first[number]]
        return out


def _map(path, kind, count):
    size = count * np.dtype(kind).itemsize
    try:
        if path.stat().st_size != size:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}: prepare the folder again")
        return np.memmap(path, kind, "r")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error}): prepare the folder again") from error


def _starts(path, shard):
    try:
        starts = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read ({error}): prepare the folder again") from error
    if len(starts) != shard["documents"] + 1 or starts[0] != 0 or starts[-1] != shard["tokens"]:
        raise UserError(f"{path} does not fit its shard: prepare the folder again")
    return starts
