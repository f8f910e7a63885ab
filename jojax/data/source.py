"""Random-access sources of a split: len(source), source[i]; made by open_source.

Image sources give {'image': uint8 [H, W, 3], 'label': int} and know `classes`, the number of classes;
of clips (data.frames) the image is a Video (jojax.data.folder); text sources give documents (jojax.data.documents).
"""

import json
import pathlib
from typing import Any

import numpy as np

from jojax.data.documents import open_documents
from jojax.data.folder import FolderImages, FolderVideos, find_split
from jojax.data.image import clip_span, decode
from jojax.errors import UserError

SOURCES = ("fashion_mnist", "tfds", "folder", "text", "wikipedia_excerpt", "tokens", "probe")
FASHION = pathlib.Path(__file__).parent / "embedded" / "fashion_mnist.npz"
MEMORY = 1 << 30  # decoded images of one size are kept in memory where all of a split fit in 1 GiB


# source: what it would leave unread, and the sources that read it
UNREAD = {
    "fashion_mnist": ("path", "name", "folder or tfds"),
    "wikipedia_excerpt": ("path", "name", "train_path", "valid_path", "text or tokens"),
    "text": ("path", "name", "tokens or probe"),
    "tokens": ("name", "probe"),
    "probe": ("path", "train_path", "valid_path", "text or tokens"),
}


def check(data_cfg):
    """UserError where a config names data and a source that would not read it."""
    *keys, others = UNREAD.get(data_cfg.get("source"), ("",))
    for key in keys:
        if data_cfg.get(key):
            raise UserError(
                f"data.{key} = {data_cfg[key]!r} would not be read: data.source = {data_cfg['source']!r} has "
                f"other data; set data.source to {others}, or data.{key} to ''"
            )
    frames, stride = data_cfg.get("frames", 0), data_cfg.get("frame_stride", 0)
    if frames and data_cfg.get("source") != "folder":
        raise UserError(f"data.frames = {frames} would not be read: clips are of data.source = 'folder'")
    if stride and frames < 2:
        raise UserError(f"data.frame_stride = {stride} does nothing here: it is for data.frames = 2 or more")


def open_source(data_cfg, split):
    """The split of the data set that a config names.

    Args:
      data_cfg: mapping with source and what that kind needs: path and name (tfds), path (folder), the
        paths of jojax.data.documents (text); classes, where given, is checked.
      split: 'train', the name of another split, or 'valid': the held-out part, whatever the data set
        calls it.

    Raises:
      UserError: unknown source, nothing at the path, unknown split, other number of classes; all name the
        remedy.
    """
    kind = data_cfg.get("source")
    if kind in ("text", "wikipedia_excerpt"):
        return open_documents(data_cfg, split)
    if kind == "fashion_mnist":
        source = FashionMnist(split)
    elif kind == "tfds":
        source = TfdsImages(_path(data_cfg), data_cfg.get("name"), split)
    elif kind == "folder":
        span = clip_span(data_cfg)
        source = FolderVideos(_path(data_cfg), split, span) if span else FolderImages(_path(data_cfg), split)
    else:
        raise UserError(f"data.source is {kind!r}: choose one of {', '.join(SOURCES)}")
    wanted = data_cfg.get("classes")
    if wanted and wanted != source.classes:
        raise UserError(f"data.classes is {wanted}, but {source} has {source.classes} classes: set it to that number")
    return source


def _path(data_cfg):
    if not data_cfg.get("path"):
        raise UserError(f"data.path is not set: data.source = {data_cfg['source']!r} needs a folder")
    return pathlib.Path(data_cfg["path"]).expanduser()


class FashionMnist:
    """5,000 training and 1,000 test images of Fashion-MNIST, in the package; padded from 28 to 32 pixels,
    three equal channels."""

    classes = 10

    def __init__(self, split):
        split = find_split(split, ("train", "test"), "Fashion-MNIST")
        with np.load(FASHION) as arrays:
            self._images = np.pad(arrays[f"{split}_images"], ((0, 0), (2, 2), (2, 2)))
            self._labels = arrays[f"{split}_labels"]

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        image = np.repeat(self._images[index][:, :, None], 3, axis=2)
        return {"image": image, "label": int(self._labels[index])}

    def __repr__(self):
        return "Fashion-MNIST"


class TfdsImages:
    """A prepared TFDS image data set in ArrayRecord files, read without TensorFlow.

    The bytes of the images are decoded by Pillow here, so that the pixels do not depend on which decoder
    TFDS finds. Where all images have one size and fit in 1 GiB, each is decoded once and kept.
    """

    def __init__(self, path, name, split):
        import tensorflow_datasets as tfds

        self._folder = find_prepared(path, name)
        _check_format(self._folder, name)
        builder = tfds.builder_from_directory(str(self._folder))
        info = builder.info
        base, bracket, part = split.partition("[")
        base = find_split(base, tuple(info.splits), self._folder)
        self._split = base + bracket + part
        features = dict(info.features.items())
        for key, kind in (("image", tfds.features.Image), ("label", tfds.features.ClassLabel)):
            if not isinstance(features.get(key), kind):
                have = ", ".join(sorted(features))
                raise UserError(f"{self._folder} has no {kind.__name__} feature {key!r}, but {have}")
        gone = [file for file in info.splits[base].filepaths if not file.exists()]
        if gone:
            raise UserError(f"{gone[0]} is missing: copy it there, or {_remedy(name)}")
        try:
            decoders: Any = {"image": tfds.decode.SkipDecoding()}
            records: Any = builder.as_data_source(self._split, decoders=decoders)
        except ValueError as error:
            raise UserError(f"{self._folder} has no split {self._split!r} ({error})") from error
        self._records = records
        self.classes = features["label"].num_classes
        shape = features["image"].shape
        self._keep = None not in shape and int(np.prod(shape)) * len(self) <= MEMORY
        self._kept = {}

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        index = int(index)
        if index in self._kept:
            return self._kept[index]
        try:
            record = self._records[index]
        except RuntimeError as error:  # ArrayRecord's word for damage
            raise UserError(f"record {index} of {self!r} can't be read ({error}): copy the files again") from error
        example = {
            "image": decode(record["image"], f"record {index} of {self!r}"),
            "label": int(record["label"]),
        }
        if self._keep:
            self._kept[index] = example
        return example

    def __repr__(self):
        return f"{self._folder} [{self._split}]"


def find_prepared(path, name):
    """The folder with dataset_info.json: `path` itself, or path/name/version (name: 'cifar100',
    'cifar100:3.0.2', 'set/config'); of several versions the newest.

    Raises:
      UserError: nothing there, preparation was broken off, or several configs to choose from.
    """
    if _is_prepared(path):
        return path
    if not path.is_dir():
        raise UserError(f"{path} is no folder: set data.path to the data_dir that TFDS prepared into; {_remedy(name)}")
    if not name:
        raise UserError(f"{path} holds no dataset_info.json: set data.name to a data set under it, such as cifar100")
    name, _, version = str(name).partition(":")
    folder = path / name
    found = [p for p in folder.glob(version or "*") if _is_prepared(p)]
    if found:
        return max(found, key=lambda p: [int(n) if n.isdigit() else -1 for n in p.name.split(".")])
    configs = sorted({p.parent.parent.name for p in folder.glob("*/*/dataset_info.json")})
    if configs:
        raise UserError(
            f"{folder} has the configs {', '.join(configs)}: set data.name to {name}/{configs[0]} or another"
        )
    if any(folder.glob("*incomplete*")) or any(folder.glob(version or "*.*.*")):
        raise UserError(f"{folder} was not prepared to the end: delete it, and {_remedy(name)}")
    raise UserError(
        f"{folder} holds no prepared data set{' of version ' + version if version else ''}: {_remedy(name)}"
    )


def _check_format(folder, name):
    try:
        file_format = json.loads((folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    except ValueError as error:
        raise UserError(f"{folder / 'dataset_info.json'} is damaged ({error}): {_remedy(name)}") from error
    if file_format != "array_record":
        raise UserError(f"{folder} was prepared as {file_format}, which needs TensorFlow: {_remedy(name)}")


def _is_prepared(folder):
    return all((folder / file).is_file() for file in ("dataset_info.json", "features.json"))


def _remedy(name):
    return (
        f"prepare it with tfds.builder({str(name or 'NAME')!r}, data_dir=…, file_format='array_record')"
        ".download_and_prepare(), where TensorFlow is installed"
    )
