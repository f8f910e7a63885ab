"""Rows of tokens cut from a corpus: packed for training, and windows inside documents for evaluation.

Every row is a pure function of its index, so order, resume and the number of hosts cost nothing. Its
keys, each [L]:
  tokens, targets: int32; targets[t] is the token after tokens[t]
  weight: float32, 1 where the prediction counts, else 0
  position: int32, from 0 at the start of the row or, later, of its document
  segment: int32, index of the document in the corpus, -1 for padding (whose other values are 0)
Rows of windows also have, as int32 scalars: document, and offset: how many predictions of it lie before
the row.
"""

import numpy as np

from jojax.errors import UserError


class PackedRows:
    """Training rows: row i is corpus.tokens[i·L : i·L + L], with whatever documents lie there.

    A prediction counts where its target lies in the document of its input, so the end of a document
    predicts nothing and is itself the last target. The last row is padded; together the rows hold every
    prediction once.
    """

    def __init__(self, corpus, length):
        _check_length("data.length", length)
        self._corpus, self._length = corpus, length

    def __len__(self):
        return -(-(len(self._corpus.tokens) - 1) // self._length)

    def __getitem__(self, index):
        corpus, length = self._corpus, self._length
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * length
        at = np.arange(first, min(first + length, len(corpus.tokens) - 1))
        document = np.searchsorted(corpus.starts, at, side="right") - 1
        row = {
            "tokens": corpus.tokens[at],
            "targets": corpus.tokens[at + 1],
            "weight": at + 1 < corpus.starts[document + 1],
            "position": at - np.maximum(corpus.starts[document], first),
            "segment": document,
        }
        return _pad(row, length)


class Windows:
    """Evaluation rows, each inside one document, in the order of the documents.

    Attributes:
      protocol: dict, what is scored and how, to be kept beside any number computed from the rows: kind,
        length, further settings, documents (that have a row), windows, predictions (the sum of all weights).
    """

    def __init__(self, corpus, length, rows, **protocol):
        """rows: int64 [R, 4] of document, offset, count of inputs, and first input whose prediction
        counts."""
        self._corpus, self._length, self._rows = corpus, length, rows
        self.protocol = protocol | {
            "length": length,
            "documents": len(np.unique(rows[:, 0])),
            "windows": len(rows),
            "predictions": int((rows[:, 2] - rows[:, 3]).sum()),
        }

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        document, offset, count, first = self._rows[index]
        at = self._corpus.starts[document] + offset + np.arange(count)
        row = {
            "tokens": self._corpus.tokens[at],
            "targets": self._corpus.tokens[at + 1],
            "weight": np.arange(count) >= first,
            "position": np.arange(count),
            "segment": np.full(count, document),
        }
        return _pad(row, self._length) | {"document": np.int32(document), "offset": np.int32(offset)}


def split_windows(corpus, length, most=0):
    """Every prediction of every document exactly once: documents cut into windows from their start, the
    last padded. most > 0: of each document the first `most` predictions only."""
    _check_length("the window length", length)
    return Windows(corpus, length, _cut(_first(corpus, most), length), kind="split", **_said(most))


def common_windows(corpus, lengths, most=0):
    """The same predictions at every length, so that only the context differs between the lengths.

    Of each document the first floor(n / max) · max of its n predictions (of its first `most`, where most > 0) are
    cut into windows of each length.

    Returns:
      dict length -> Windows, lengths ascending.

    Raises:
      UserError: a length does not divide the largest, or no document is long enough.
    """
    lengths = sorted({int(length) for length in lengths})
    for length in lengths:
        _check_length("eval.lengths", length)
    longest = lengths[-1]
    odd = [length for length in lengths if longest % length]
    if odd:
        raise UserError(
            f"eval.lengths: {odd[0]} does not divide {longest}, so their windows can't hold the same tokens"
        )
    available = _first(corpus, most)
    kept = available // longest * longest
    if not kept.any():
        raise UserError(
            f"eval.lengths: no document has {longest} predictions (the longest has {available.max()}): use "
            "smaller lengths or longer documents"
        )
    return {
        length: Windows(corpus, length, _cut(kept, length), kind="common", longest=longest, **_said(most))
        for length in lengths
    }


def sliding_windows(corpus, length, stride, most=0):
    """Every prediction once, after the first window each with length - stride to length tokens of context.

    Windows inside a document start at 0, stride, 2·stride, …; from the second on, only what the one
    before did not score counts.
    """
    _check_length("the window length", length)
    if not 1 <= stride <= length:
        raise UserError(f"the stride {stride} must lie between 1 and the window length {length}")
    n = _first(corpus, most)
    windows = 1 + -(-np.maximum(n - length, 0) // stride)
    document, offset = _spread(windows, stride)
    count = np.minimum(length, n[document] - offset)
    first = np.where(offset > 0, length - stride, 0)
    rows = np.stack([document, offset, count, first], 1)
    return Windows(corpus, length, rows, kind="sliding", stride=stride, **_said(most))


def _first(corpus, most):
    """int64 [D]: the predictions of each document that are looked at."""
    n = corpus.predictions()
    return np.minimum(n, most) if most else n


def _said(most):
    return {"first_predictions_of_each_document": most} if most else {}


def _spread(windows, step):
    """windows [D]: how many each document has. Returns document [R] and offset [R] of each, offsets step
    apart."""
    document = np.repeat(np.arange(len(windows)), windows)
    number = np.arange(len(document)) - np.repeat(np.cumsum(windows) - windows, windows)
    return document, number * step


def _cut(predictions, length):
    """The first predictions[d] of each document d in windows that do not overlap."""
    document, offset = _spread(-(-predictions // length), length)
    count = np.minimum(length, predictions[document] - offset)
    return np.stack([document, offset, count, np.zeros_like(count)], 1)


def _pad(row, length):
    """Values of any integer or bool type [n ≤ L] to the contract's types, [L]."""
    short = length - len(row["tokens"])
    return {
        key: np.pad(
            value.astype(np.float32 if key == "weight" else np.int32),
            (0, short),
            constant_values=-1 if key == "segment" else 0,
        )
        for key, value in row.items()
    }


def _check_length(name, length):
    if not isinstance(length, int | np.integer) or length < 1:
        raise UserError(f"{name} is {length!r}: give a positive integer")
