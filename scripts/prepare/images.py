"""CIFAR-10, CIFAR-100 and the MNIST family, from the formats in which they are handed on."""

import dataclasses
import gzip
import hashlib
import importlib
import io
import pickle
import sys
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from jojax.errors import UserError
from scripts.prepare.files import DAMAGE, image_rows, parquet_files, parquet_names
from scripts.prepare.work import Bad, fingerprint

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
MD5 = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
MNIST = {
    "mnist": ("3.0.1", "http://yann.lecun.com/exdb/mnist (mirror: the hub's ylecun/mnist)"),
    "fashion_mnist": ("3.0.1", "https://github.com/zalandoresearch/fashion-mnist, Debian: dataset-fashion-mnist"),
    "kmnist": ("3.0.1", "https://github.com/rois-codh/kmnist"),
}


@dataclasses.dataclass
class Source:
    """What records.prepare takes."""

    plan: dict
    features: dict[str, tuple]
    splits: Mapping[str, Callable[..., Any]]


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


# --------------------------------------------------------------------------------------------------- CIFAR
@dataclasses.dataclass
class Cifar:
    """How the two differ: feature -> (number of classes, key in pickles, column in parquet, file of names), in the
    order of their bytes in the binary records."""

    name: str
    labels: dict[str, tuple[int, bytes, str, str]]
    train: tuple[str, ...]  # members, without .bin
    test: str
    image: str = "img"

    def prepare_from(self, root):
        """Source of an archive, its folder, or a folder of parquet files. UserError where it is none."""
        if root.is_dir() and any(root.rglob("*.parquet")):
            return self._parquet(root)
        members = _members(root)
        wanted = {s: [_find(members, m) for m in names] for s, names in self._splits().items()}
        if None in [m for found in wanted.values() for m in found]:
            raise UserError(
                f"{root} holds no {self.name} ({', '.join((*self.train, self.test))}, .bin or pickles, or *.parquet): "
                f"get {self.name.replace('cifar', 'cifar-')}-binary.tar.gz or -python.tar.gz from {CIFAR_URL}"
            )
        binary = wanted["test"][0].endswith(".bin")
        labels = {f: ("label", n, self._names(members, file)) for f, (n, _, _, file) in self.labels.items()}
        read = self._binary if binary else self._pickled
        content = hashlib.sha256(b"".join(hashlib.sha256(members[m]).digest() for s in wanted for m in wanted[s]))
        plan = {"dataset": self.name, "source": content.hexdigest()[:16]}
        splits = {s: lambda s=s: self._all(s, wanted[s], members, read) for s in wanted}
        return Source(plan, self._features(labels), splits)

    def _splits(self):
        return {"train": self.train, "test": (self.test,)}

    def _features(self, labels):
        return {"image": ("image", (32, 32, 3)), "id": ("text",)} | labels

    def _names(self, members, file):
        found = _find(members, file)
        return members[found].decode().split() if found and len(members[found]) < 10_000 else None

    def _all(self, split, files, members, read):
        """Members numbered through the files of a split."""
        number = 0
        for file in files:
            for pixels, labels in read(file, members[file]):
                name = f"{split}_{number:05d}"
                odd = [f for f, label in labels.items() if not 0 <= label < self.labels[f][0]]
                if pixels is None:
                    yield Bad(f"{file}, image {number}", "its record is cut short")
                elif odd:
                    yield Bad(f"{file}, image {number}", f"its {odd[0]} is {labels[odd[0]]}")
                else:
                    image = png(np.ascontiguousarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0)))
                    yield name, {"id": name, "image": image} | labels
                number += 1

    def _binary(self, file, data):
        """Records of one byte a label, coarse before fine, and 3,072 of red, green, blue."""
        order = sorted(self.labels)  # coarse_label, label
        size = len(order) + 3072
        for start in range(0, len(data), size):
            record = np.frombuffer(data[start : start + size], np.uint8)
            if len(record) < size:
                yield None, {}
            else:
                yield record[len(order) :], {f: int(v) for f, v in zip(order, record, strict=False)}

    def _pickled(self, file, data):
        content = unpickle(data, file)
        try:
            pixels = np.asarray(content[b"data"], np.uint8)
            labels = {f: content[key] for f, (_, key, _, _) in self.labels.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is no pickle of {self.name} ({error!r}): get it from {CIFAR_URL}") from error
        for i, row in enumerate(pixels):
            yield (row if row.size == 3072 else None), {f: int(v[i]) for f, v in labels.items()}

    def _parquet(self, root):
        files = parquet_files(root, "train", "test")
        labels = {c: (f, n) for f, (n, _, c, _) in self.labels.items()}
        plan = {"dataset": self.name, "source": fingerprint([p for paths in files.values() for p in paths])}
        spec = {f: ("label", n, parquet_names(files["train"][0], c)) for c, (f, n) in labels.items()}

        def rows(split):
            for i, member in enumerate(image_rows(files[split], self.image, labels)):
                bad = isinstance(member, Bad)
                yield member if bad else (f"{split}_{i:05d}", {"id": f"{split}_{i:05d}"} | member[1])

        return Source(plan, self._features(spec), {s: lambda s=s: rows(s) for s in files})


CIFAR10 = Cifar(
    "cifar10",
    {"label": (10, b"labels", "label", "batches.meta.txt")},
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
)
CIFAR100 = Cifar(
    "cifar100",
    {
        "label": (100, b"fine_labels", "fine_label", "fine_label_names.txt"),
        "coarse_label": (20, b"coarse_labels", "coarse_label", "coarse_label_names.txt"),
    },
    ("train",),
    "test",
)


def _members(root):
    """{file name: bytes} of a tar or a folder; 180 MB."""
    if root.is_dir():
        return {p.name: p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and p.suffix != ".gz"}
    if not root.is_file():
        raise UserError(f"{root} does not exist: give the archive or its folder; CIFAR is at {CIFAR_URL}")
    if root.name in MD5:
        md5 = hashlib.md5(root.read_bytes()).hexdigest()
        told = "as published" if md5 == MD5[root.name] else f"but {MD5[root.name]} was published"
        print(f"{root.name}: md5 {md5}, {told}", file=sys.stderr)
    try:
        with tarfile.open(root) as archive:
            return {m.name.rpartition("/")[2]: _extract(archive, m) for m in archive if m.isfile()}
    except (tarfile.TarError, *DAMAGE) as error:
        raise UserError(f"{root} is damaged ({error}): get it again from {CIFAR_URL}") from error


def _extract(archive, member):
    file = archive.extractfile(member)
    assert file, member.name
    return file.read()


def _find(members, name):
    return next((m for m in (f"{name}.bin", name) if m in members), None)


class _Arrays(pickle.Unpickler):
    """Builds arrays, numbers, strings and containers of them, and nothing else, so no code of a file can run."""

    def find_class(self, module, name):
        core = importlib.import_module("numpy._core.multiarray")
        allowed = {
            ("multiarray", "_reconstruct"): core._reconstruct,
            ("multiarray", "scalar"): core.scalar,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): lambda text, coding="latin1": text.encode("latin1"),
        }
        top, _, last = module.rpartition(".")
        if top in ("", "numpy.core", "numpy._core") and (last, name) in allowed:
            return allowed[last, name]
        raise UserError(f"it wants to load {module}.{name}, which no CIFAR file does: get it from {CIFAR_URL}")


def unpickle(data, name):
    """The content of a pickle of arrays, with keys as bytes. UserError where it would do anything else."""
    try:
        return _Arrays(io.BytesIO(data), encoding="bytes").load()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{name} is no pickle that can be read ({error!r}): get it from {CIFAR_URL}") from error


# --------------------------------------------------------------------------------------------------- MNIST
def mnist(name, root):
    """Source of {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, or of parquet files."""
    spec = {"image": ("image", (28, 28, 1)), "label": ("label", 10, None)}
    if not root.is_dir():
        raise UserError(f"{root} is no folder: put the files of {name} there; they are at {MNIST[name][1]}")
    if any(root.rglob("*.parquet")):
        files = parquet_files(root, "train", "test")
        plan = {"dataset": name, "source": fingerprint([p for paths in files.values() for p in paths])}
        splits = {s: lambda s=s: image_rows(files[s], "image", {"label": ("label", 10)}) for s in files}
        return Source(plan, spec, splits)
    pairs = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        found = [_idx_file(root, f"{prefix}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        if None in found:
            gone = f"{prefix}-{'images-idx3' if found[0] is None else 'labels-idx1'}-ubyte.gz"
            raise UserError(f"{root} has no {gone}: put it there; {name} is at {MNIST[name][1]}")
        pairs[split] = found
    plan = {"dataset": name, "source": fingerprint([p for pair in pairs.values() for p in pair])}
    return Source(plan, spec, {s: lambda s=s: _idx_members(s, *pairs[s]) for s in pairs})


def _idx_file(root, name):
    return next((p for p in (root / f"{name}.gz", root / name) if p.is_file()), None)


def read_idx(path):
    """IDX of bytes: 0, 0, 8, number of axes, big-endian sizes, then the data. A cut file gives what is there, and
    its header's shape."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except DAMAGE as error:
        raise UserError(f"{path} is damaged ({error}): get that file again") from error
    if raw[:3] != b"\0\0\x08":
        raise UserError(f"{path} is no IDX file of bytes: get that file again")
    shape = np.frombuffer(raw, ">u4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]), tuple(int(n) for n in shape)


def _idx_members(split, images, labels):
    (pixels, shape), (classes, (count,)) = read_idx(images), read_idx(labels)
    if shape[0] != count or len(shape) != 3:
        raise UserError(f"{images} has shape {shape}, but {labels} {count} labels: they are no pair")
    size = shape[1] * shape[2]
    for i in range(count):
        image = pixels[i * size : (i + 1) * size]
        if len(image) < size or i >= len(classes):
            yield Bad(f"{images.name}, image {i}", "the file ends before it")
        elif classes[i] > 9:
            yield Bad(f"{labels.name}, label {i}", f"it is {classes[i]}")
        else:
            yield f"{split}_{i:05d}", {"image": png(image.reshape(shape[1:])), "label": int(classes[i])}
