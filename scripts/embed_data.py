"""Make the two data files inside the package from their originals, byte for byte the same each time.

Fashion-MNIST: the first N images of each class, in the order of the original files (Debian package
dataset-fashion-mnist).
Wikipedia excerpt: copied after its checksum is verified.

    python scripts/embed_data.py --fashion /usr/share/datasets/fashion-mnist \\
        --wikipedia wikipedia_excerpt_2016.jsonl.xz
"""

import argparse
import gzip
import hashlib
import pathlib

import numpy as np

EMBEDDED = pathlib.Path(__file__).resolve().parent.parent / "jojax" / "data" / "embedded"
WIKIPEDIA_SHA256 = "8287e92f9598bb02a9253bc010316a079e66645b26575aaac19200dea8cd502f"


def read_idx(path):
    """An IDX file of bytes (big-endian header: 0, 0, 8, number of axes, then their sizes) as uint8 array."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def first_of_each_class(images, labels, count):
    """The first `count` images of every class, kept in the order of the file."""
    keep = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in np.unique(labels)]))
    return images[keep], labels[keep]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=pathlib.Path, required=True, help="folder of the four IDX files")
    parser.add_argument("--wikipedia", type=pathlib.Path, required=True, help="wikipedia_excerpt_2016.jsonl.xz")
    parser.add_argument("--out", type=pathlib.Path, default=EMBEDDED)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    arrays = {}
    for split, prefix, count in (("train", "train", 500), ("test", "t10k", 100)):
        images = read_idx(args.fashion / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(args.fashion / f"{prefix}-labels-idx1-ubyte.gz")
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = first_of_each_class(images, labels, count)
    np.savez_compressed(args.out / "fashion_mnist.npz", **arrays)

    text = args.wikipedia.read_bytes()
    if hashlib.sha256(text).hexdigest() != WIKIPEDIA_SHA256:
        raise SystemExit(f"{args.wikipedia} is not the excerpt this script knows: its checksum differs")
    (args.out / "wikipedia_excerpt_2016.jsonl.xz").write_bytes(text)

    for path in sorted(args.out.iterdir()):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>9}  {path.name}")


if __name__ == "__main__":
    main()
