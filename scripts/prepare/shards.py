"""Text to token shards: cleaned and tokenised by several processes, held out by whole documents.

The folder: tokenizer.json; SPLIT-00000.tokens, raw little-endian uint16 or uint32, documents end to end, each closed by
the tokenizer's end-of-document id; SPLIT-00000.starts.npy, int64, where in that shard each document starts, and its
end; index.json, which jojax.data.tokens reads.
"""

import hashlib
import itertools
import json
import pathlib

import numpy as np

from jojax.data.text import BPETokenizer, ByteTokenizer, load_tokenizer
from jojax.data.tokens import FORMAT
from jojax.errors import UserError
from scripts.prepare import wikipedia
from scripts.prepare.work import Bad, Work, ordered, write_whole


def prepare(out, source, args):
    """`source`: texts.TextSource. A split `all` is divided: documents whose text's SHA-256 falls below the share
    `--valid` are the split valid, so equal documents never lie on both sides."""
    share = args.valid if "all" in source.splits else 0.0
    given = _given(args)
    tokenizer_plan = (
        {"tokenizer": hashlib.sha256(given.json.encode()).hexdigest()[:16]}
        if given
        else {"tokenizer": f"bpe of {args.vocab}", "sample_mb": args.sample_mb, "sample_every": args.sample_every}
    )
    plan = source.plan | tokenizer_plan | {"valid": share, "shard_mb": args.shard_mb}
    work = Work(out, plan, args.max_bad)
    if work.begin():
        return work
    tokenizer = _tokenizer(work.folder / "tokenizer.json", given, source, share, args)
    kind = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    def process(members):
        return ordered(_encode, members, args.jobs, _set_up, (tokenizer.json, source.convert))

    def write(part, results):
        return _write(work.folder, part, results, share, kind, args.shard_mb * 1e6)

    records = {s: work.stream(s, members(), process, write) for s, members in source.splits.items()}
    work.finish(records, _index(records, kind, tokenizer, share))
    return work


# ------------------------------------------------------------------------------------------------ the tokenizer
def _given(args):
    """The tokenizer that `--tokenizer` names, None where one is to be trained."""
    if args.tokenizer == "bpe":
        return None
    if args.tokenizer == "bytes":
        return ByteTokenizer()
    path = pathlib.Path(args.tokenizer)
    return gpt2(path) if path.is_dir() else load_tokenizer(path)


def gpt2(folder):
    """GPT-2's pair of files, encoder.json or vocab.json and vocab.bpe or merges.txt, as a BPETokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pair = [next((folder / n for n in names if (folder / n).is_file()), None) for names in
            (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt"))]  # fmt: skip
    if pair[0] is None or pair[1] is None:
        raise UserError(
            f"{folder} has no encoder.json (vocab.json) beside a vocab.bpe (merges.txt): give a folder of both"
        )
    vocab = json.loads(pair[0].read_text(encoding="utf-8"))
    lines = pair[1].read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return BPETokenizer(tokenizer.to_str(), str(folder))


def _tokenizer(path, given, source, share, args):
    """The one given, or a byte-level BPE of train documents; kept in a file, from which a second start reads it."""
    if not path.exists():
        tokenizer = given or BPETokenizer.train(_sample(source, share, args), args.vocab)
        write_whole(path, tokenizer.json)
    return load_tokenizer(path)


def _sample(source, share, args):
    """Every `--sample-every`th document of train, up to `--sample-mb` of text."""
    left = args.sample_mb * 1e6
    members = itertools.islice(source.splits.get("all", source.splits.get("train"))(), 0, None, args.sample_every)
    for _, text in ordered(_clean, members, args.jobs, _set_up, (ByteTokenizer.json, source.convert)):
        if isinstance(text, str) and text.strip() and _hash(text) >= share:
            yield text
            left -= len(text)
        if left <= 0:
            return


# ------------------------------------------------------------------------------------------------ workers
_CLEAN = {"": lambda text: text, "wiki": lambda markup: wikipedia.plain(markup)}
_worker = []


def _set_up(tokenizer, convert):
    made = ByteTokenizer() if tokenizer == ByteTokenizer.json else BPETokenizer(tokenizer)
    _worker[:] = made, _CLEAN[convert]


def _clean(members):
    """The text of each document, or Bad."""
    texts, clean = [], _worker[1]
    for name, payload in members:
        try:
            texts.append(clean(payload))
        except Exception as error:  # a page that the parser can't digest
            texts.append(Bad(name, f"its markup can't be turned into text ({error!r})"))
    return texts


def _encode(members):
    """(hash, bytes, ids) of each document, Bad, or None for an empty one."""
    tokenizer, texts = _worker[0], _clean(members)
    good = [text for text in texts if isinstance(text, str) and text.strip()]
    encoded = iter(tokenizer.encode_documents(good) if good else [])
    out = []
    for text in texts:
        if isinstance(text, Bad):
            out.append(text)
        else:
            out.append((_hash(text), len(text.encode()), next(encoded)) if text.strip() else None)
    return out


def _hash(text):
    """0 … 1, of the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


# ------------------------------------------------------------------------------------------------ files
def _write(folder, part, results, share, kind, most):
    """One part: a pair of files for each split that it has documents of. The stream `all` gives train and valid."""
    stream, number = part.rsplit("-", 1)
    files, starts, text, empty, written = {}, {}, {}, 0, 0
    try:
        for _, result in results:
            if result is None:
                empty += 1
                continue
            place, size, ids = result
            split = stream if stream != "all" else ("valid" if place < share else "train")
            if split not in files:
                files[split] = (folder / f"{split}-{number}.tokens.part").open("wb")
                starts[split], text[split] = [0], 0
            files[split].write(ids.astype(kind).tobytes())
            starts[split].append(starts[split][-1] + len(ids))
            text[split] += size
            written += len(ids) * kind.itemsize
            if written >= most:
                break
    finally:
        for file in files.values():
            file.close()
    splits = {
        s: {"documents": len(starts[s]) - 1, "tokens": starts[s][-1], "text_bytes": text[s]} for s in sorted(files)
    }
    for split, where in starts.items():
        with (folder / f"{split}-{number}.starts.npy.part").open("wb") as file:
            np.save(file, np.array(where, np.int64))
    names = [f"{s}-{number}.{ending}" for s in splits for ending in ("tokens", "starts.npy")]
    return names, {"splits": splits, "empty": empty}


def _index(records, kind, tokenizer, share):
    splits = {}
    for rows in records.values():
        for number, row in enumerate(rows):
            for split, counts in row["splits"].items():
                name = f"{split}-{number:05d}"
                parts = {key: row["files"][f"{name}.{key}"]["sha256"] for key in ("tokens", "starts.npy")}
                splits.setdefault(split, []).append({"name": name, **counts, "sha256": parts})
    for split in ("train", "valid"):
        if split not in splits:
            raise UserError(
                f"no document is left for the {split} split: change --valid, the share of documents held out"
                if "all" in records
                else f"the {split} split has no document"
            )
    totals = {
        split: {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "text_bytes")}
        | {"shards": shards}
        for split, shards in splits.items()
    }
    held_out = f"documents whose text's SHA-256 is below {share:g} of its range" if "all" in records else "as published"
    return {
        "format": FORMAT,
        "dtype": kind.str,
        "tokenizer": {
            "file": "tokenizer.json",
            "vocab": tokenizer.vocab_size,
            "sha256": hashlib.sha256(tokenizer.json.encode()).hexdigest(),
        },
        "valid_split": held_out,
        "empty": {s: sum(r["empty"] for r in rows) for s, rows in records.items()},
        "splits": totals,
    }
