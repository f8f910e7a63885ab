"""Reading what others wrote: compressed streams, parquet, optional packages."""

import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import zlib

from jojax.errors import UserError
from scripts.prepare.work import Bad

DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error)  # of a compressed file


def need(module, why):
    """An optional package. UserError saying how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(
            f"{why} needs the package {package}: python3 -m pip install {package}, or all of them with '.[prepare]'"
        ) from error


@contextlib.contextmanager
def opened(path):
    """A binary stream, decompressed by the ending of its name. UserError where it is damaged."""
    try:
        if path.suffix == ".zst":
            zstandard = need("zstandard", f"{path.name} (.zst)")
            with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as z:
                try:
                    yield io.BufferedReader(z)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
        else:
            opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
            with opener(path, "rb") as stream:
                yield stream
    except DAMAGE as error:
        raise UserError(f"{path} can't be read to its end ({error}): get that file again") from error


def files_of(root):
    """The file itself, or the files of a tree that are not hidden, in the order of their paths."""
    return [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file() and p.name[0] != ".")


def parquet_files(root, *splits):
    """{split: sorted files} of a tree of parquet files, by the part of the name before its first - or ."""
    found = {}
    for path in sorted(root.rglob("*.parquet")):
        found.setdefault(path.name.replace(".", "-").split("-")[0], []).append(path)
    if splits and (gone := [s for s in splits if s not in found]):
        raise UserError(f"{root} has no {gone[0]}-*.parquet: its parquet files are of {', '.join(found) or 'no split'}")
    return {s: found[s] for s in splits} if splits else found


def parquet_rows(files, columns):
    """(name, row as a dict) of some files, in bounded memory. UserError: one is damaged or lacks a column."""
    parquet, arrow = need("pyarrow.parquet", "reading parquet"), need("pyarrow", "reading parquet")
    for path in files:
        try:
            file = parquet.ParquetFile(path)
            if gone := [c for c in columns if c not in file.schema_arrow.names]:
                raise UserError(f"{path} has no column {gone[0]!r}, but {', '.join(file.schema_arrow.names)}")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                for row in batch.to_pylist():
                    yield f"{path.name}:{number}", row
                    number += 1
        except (arrow.ArrowException, OSError) as error:
            raise UserError(f"{path} can't be read ({error}): get that file again") from error


def parquet_names(path, column):
    """The class names that the hub's metadata in a parquet file give, or None."""
    metadata = need("pyarrow.parquet", "reading parquet").read_schema(path).metadata or {}
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return None


def image_rows(files, image, labels):
    """Members of images from parquet; labels: {column: (feature, count)}."""
    for name, row in parquet_rows(files, (image, *labels)):
        data = row[image]["bytes"] if isinstance(row[image], dict) else row[image]
        if not data:
            yield Bad(name, f"its {image} is empty")
        elif odd := [c for c, (_, n) in labels.items() if row[c] is None or not 0 <= row[c] < n]:
            yield Bad(name, f"its {odd[0]} is {row[odd[0]]}, not 0 to {labels[odd[0]][1] - 1}")
        else:
            yield name, {"image": data} | {feature: row[c] for c, (feature, _) in labels.items()}
