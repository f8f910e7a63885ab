"""Tokenizers that keep every byte: UTF-8 bytes as they are, and byte-level BPE (Sennrich et al. 2016;
Radford et al. 2019).

Both have the same interface:
  encode_documents(texts) -> list of int32 [n], one a text, the end-of-document id last
  to_bytes(ids) -> bytes, end-of-document ids left out
  vocab_size, eos: int; token_bytes: int64 [vocab_size], UTF-8 bytes of each token, 0 for eos: over a
  document they sum to its length in bytes, so bits per byte are exact
  json: what a file holds that load_tokenizer reads
"""

import functools
import json
import logging
import pathlib

import numpy as np

from jojax.errors import UserError

log = logging.getLogger(__name__)

EOS = "<|endoftext|>"
_BYTES_FILE = json.dumps({"tokenizer": "bytes"})


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

    vocab_size = 257
    eos = 256
    token_bytes = np.append(np.ones(256, np.int64), 0)
    json = _BYTES_FILE

    def encode_documents(self, texts):
        return [np.append(np.frombuffer(text.encode(), np.uint8), 256).astype(np.int32) for text in texts]

    def to_bytes(self, ids):
        return bytes(int(i) for i in ids if i != self.eos)


class BPETokenizer:
    """A byte-level BPE of the `tokenizers` library, given as the text of its json file.

    Raises:
      UserError: the tokenizer is not byte-level or has no <|endoftext|>.
    """

    def __init__(self, text, name="the tokenizer"):
        from tokenizers import Tokenizer

        self.json, self._name = text, name
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{name} is not a tokenizer.json of the tokenizers library ({error})") from error
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokenizer.token_to_id(EOS)
        if eos is None:
            raise UserError(f"{name} has no token {EOS}: add it as a special token")
        self.eos = eos
        self._pieces = self._read_pieces()
        self.vocab_size = len(self._pieces)
        self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int64)

    @classmethod
    def train(cls, texts, vocab):
        """Trains on an iterable of texts. vocab: ids in all, the 256 bytes and <|endoftext|> among them."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab < 257:
            raise UserError(f"data.vocab is {vocab}: byte-level BPE needs at least 257 (256 bytes and {EOS})")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() < vocab:
            log.warning("the text yields only %d tokens, not %d", tokenizer.get_vocab_size(), vocab)
        return cls(tokenizer.to_str())

    def _read_pieces(self):
        """The bytes of each token, b'' for the end of a document and for ids that are not in use."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        pieces = [b""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            try:
                pieces[index] = token.encode() if token in added else bytes(byte_of_character()[c] for c in token)
            except KeyError as error:
                raise UserError(f"{self._name} is not byte-level: its token {token!r} is no byte string") from error
        pieces[self.eos] = b""
        return pieces

    def encode_documents(self, texts):
        out = []
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array([*encoding.ids, self.eos], np.int32)
            if self.token_bytes[ids].sum() != len(text.encode()):
                raise UserError(
                    f"{self._name} does not keep the bytes of the text {text[:40]!r}…: use one without "
                    "normalizer and prefix space"
                )
            out.append(ids)
        return out

    def to_bytes(self, ids):
        return b"".join(self._pieces[int(i)] for i in ids)


@functools.cache
def byte_of_character():
    """The byte that each character of the byte-level alphabet stands for: printable Latin-1 for itself,
    the other
    bytes, in order, for the characters from U+0100 on."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {c: ord(c) for c in alphabet if ord(c) < 256}
    rest = (b for b in range(256) if b not in table.values())
    return table | {c: b for c, b in zip((c for c in alphabet if ord(c) >= 256), rest, strict=True)}


def load_tokenizer(path):
    """The tokenizer of a file that holds the `json` of one, or of any byte-level tokenizer.json with <|endoftext|>."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer {path} can't be read ({error}): give bytes, bpe or a json file") from error
    return ByteTokenizer() if text == _BYTES_FILE else BPETokenizer(text, f"data.tokenizer {path}")
