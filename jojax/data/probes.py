"""Generated rows that each ask for one thing; only the answers count. A row is a function of (kind, split, length, its
number), so `length` may be any, and the longer rows ask the same from further away:

  passkey   a key of KEY symbols behind a marker, anywhere in noise; at the end of the row it is asked for
  recall    PAIRS keys, each followed by its value; then as many of them again, spread over noise, each to be answered
            by its value (multi-query associative recall, arXiv 2312.04927)
  copy      symbols, a marker, the same symbols again; in training from 1 to length / 2 of them, else length / 2

Symbols: 0 and 1 are markers; the rest in three equal parts are keys, values, noise. Keys as in jojax.data.windows.
"""

import zlib

import numpy as np

from jojax.errors import UserError

KINDS = ("passkey", "recall", "copy")
ASK, HERE = 0, 1
KEY, PAIRS = 5, 8
SHORTEST = {"passkey": 2 * KEY + 2, "recall": 4 * PAIRS, "copy": 2}
ROWS = {"train": 1 << 18, "valid": 512}


class ProbeRows:
    """Rows of a split ('train', 'valid') at a length. `protocol`: what is scored.

    UserError: another kind, too short a row, too few symbols."""

    def __init__(self, kind, split, length, vocab):
        if kind not in KINDS:
            raise UserError(f"data.name = {kind!r}: with data.source = 'probe' choose from {', '.join(KINDS)}")
        if length < SHORTEST[kind]:
            raise UserError(f"a row of {length} tokens is too short for {kind}: it needs {SHORTEST[kind]}")
        if vocab < 2 + 3 * PAIRS:
            raise UserError(f"data.vocab = {vocab}: probes need {2 + 3 * PAIRS} symbols or more")
        self.kind, self.split, self.length = kind, split, length
        self.keys, self.values, self.noise = np.array_split(np.arange(2, vocab), 3)
        asked = {"passkey": KEY, "recall": PAIRS, "copy": length // 2}[kind]
        self.protocol = {"kind": kind, "length": length, "rows": len(self), "predictions": asked * len(self)}

    def __len__(self):
        return ROWS[self.split]

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        seed = zlib.crc32(f"{self.kind} {self.split} {self.length}".encode())
        text, asked = getattr(self, self.kind)(np.random.default_rng([seed, index]))
        n, L = len(text) - 1, self.length
        row = {"tokens": text[:-1], "targets": text[1:], "weight": asked[1:], "position": np.arange(n)}
        row = {k: np.pad(v.astype(np.float32 if k == "weight" else np.int32), (0, L - n)) for k, v in row.items()}
        return row | {"segment": np.where(np.arange(L) < n, 0, -1).astype(np.int32)}

    def passkey(self, rng):
        text = rng.choice(self.noise, self.length + 1)
        key = rng.choice(self.values, KEY)
        at = rng.integers(self.length + 1 - 2 * (KEY + 1) + 1)
        text[at : at + KEY + 1] = HERE, *key
        text[-KEY - 1 :] = ASK, *key
        return text, np.arange(len(text)) >= len(text) - KEY

    def recall(self, rng):
        text = rng.choice(self.noise, self.length + 1)
        keys, values = rng.choice(self.keys, PAIRS, replace=False), rng.choice(self.values, PAIRS)
        text[: 2 * PAIRS] = np.stack([keys, values], 1).ravel()
        slots = (self.length + 1 - 2 * PAIRS) // 2
        at = 2 * PAIRS + 2 * np.sort(rng.choice(slots, PAIRS, replace=False))
        order = rng.permutation(PAIRS)
        text[at], text[at + 1] = keys[order], values[order]
        asked = np.zeros(len(text), bool)
        asked[at + 1] = True
        return text, asked

    def copy(self, rng):
        most = self.length // 2
        n = rng.integers(1, most + 1) if self.split == "train" else most
        symbols = rng.choice(self.values, n)
        text = np.array([*symbols, ASK, *symbols])
        return text, np.arange(len(text)) > n
