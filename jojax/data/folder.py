"""Class folders of images, or of videos as folders of their frames."""

import functools
import logging
import re

import numpy as np

from jojax.data.image import decode
from jojax.errors import UserError

log = logging.getLogger(__name__)
HELD_OUT = ("valid", "validation", "val", "test")  # 'valid' means the first of these that a data set has
SUFFIXES = (".jpg", ".jpeg", ".png")
VIDEOS = (".avi", ".mp4", ".mkv", ".mov", ".webm")


def find_split(wanted, available, place):
    """The name, among those available, of the split wanted."""
    if wanted in available:
        return wanted
    if wanted == "valid":
        held_out = [name for name in HELD_OUT if name in available]
        if held_out:
            return held_out[0]
    raise UserError(f"{place} has no split {wanted!r}: it has {', '.join(sorted(available)) or 'none'}")


class FolderImages:
    """Images as <path>/<split>/<class>/*.{jpg,jpeg,png}, any case of the ending.

    The label is the rank of the class among the sorted folder names of the train split (of this split,
    where there is no train), so that a held-out split without some class keeps its labels.
    """

    WHAT, LAYOUT = "image", "<split>/<class>/*.JPEG"

    def __init__(self, path, split):
        if not path.is_dir():
            raise UserError(f"{path} is no folder: data.path must hold {self.LAYOUT}")
        splits = subfolders(path)
        self._folder = path / find_split(split, splits, path)
        here = subfolders(self._folder)
        names = subfolders(path / "train") if "train" in splits else here
        if not here:
            raise UserError(
                f"{self._folder} has no class folders: put each {self.WHAT} into a folder named like its class"
            )
        unknown = sorted(set(here) - set(names))
        if unknown:
            raise UserError(f"{self._folder} has a class {unknown[0]!r} that {path / 'train'} has not")
        self.classes = len(names)
        listed = {name: self._list(name) for name in here}
        empty = [name for name in here if not listed[name]]
        if empty and here == names:
            raise UserError(
                f"{self._folder / empty[0]} holds no {self.WHAT}: remove that class, or put its {self.WHAT}s there"
            )
        files = [(file, label) for label, name in enumerate(names) for file in listed.get(name, ())]
        if not files:
            raise UserError(f"{self._folder} holds no {self.WHAT}: data.path must hold {self.LAYOUT}")
        self._files = [name for name, _ in files]
        self._labels = np.array([label for _, label in files], np.int32)

    def _list(self, name):
        inside = sorted(visible(self._folder / name))
        good = [p for p in inside if self._is_one(p)]
        if other := sorted(set(inside) - set(good)):
            what = f"{self.WHAT}s"
            log.warning("%s: %d entries that are no %s are left out, the first is %s", name, len(other), what, other[0])
        return [f"{name}/{p.name}" for p in good]

    def _is_one(self, place):
        return place.suffix.lower() in SUFFIXES

    def __len__(self):
        return len(self._files)

    def __getitem__(self, index):
        return {"image": self._open(self._folder / self._files[index]), "label": int(self._labels[index])}

    def _open(self, place):
        return read(place)

    def __repr__(self):
        return str(self._folder)


class FolderVideos(FolderImages):
    """Videos as <path>/<split>/<class>/<video>/*.{jpg,jpeg,png}; instead of an image, the Video of an example.

    span: frames from the first to the last of a clip; how many videos have fewer is said.
    """

    WHAT, LAYOUT = "video folder", "<split>/<class>/<video>/<frame>.jpg"

    def __init__(self, path, split, span):
        self._span, self._short = span, 0
        super().__init__(path, split)
        if self._short:
            _say_once(
                f"{self._folder}: {self._short:,} of {len(self):,} videos have fewer than the {span} frames of a clip; "
                "their last one is repeated"
            )

    def _is_one(self, place):
        if place.suffix.lower() in VIDEOS and not place.with_suffix("").is_dir():
            raise UserError(
                f"{place} is not decoded here: extract its frames, with mkdir {place.with_suffix('')} && ffmpeg -i "
                f"{place} -q:v 2 {place.with_suffix('')}/%05d.jpg"
            )
        if not place.is_dir():
            return False
        frames = len(frames_of(place))
        if not frames:
            raise UserError(f"{place} holds no frame named {', '.join('*' + s for s in SUFFIXES)}: put them there")
        self._short += frames < self._span
        return True

    def _open(self, place):
        return Video(place)


class Video:
    """The frames of a folder, by the numbers in their names: len(), [k] -> uint8 [H, W, 3], decoded when asked for."""

    def __init__(self, folder):
        def number(path):
            return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]

        self._files = sorted(frames_of(folder), key=number)
        first, last = self._files[0], self._files[-1]
        if number(first)[::2] != number(last)[::2]:
            raise UserError(f"{folder} holds {first.name} and {last.name}, two kinds of frames: leave one of them")

    def __len__(self):
        return len(self._files)

    def __getitem__(self, k):
        return read(self._files[k])


def frames_of(folder):
    return [p for p in visible(folder) if p.suffix.lower() in SUFFIXES]


def read(file):
    """An image file as uint8 [H, W, 3]."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} can't be read ({error})") from error
    return decode(data, str(file))


def subfolders(path):
    """Their names, sorted; hidden ones are none."""
    return sorted(p.name for p in visible(path) if p.is_dir())


def visible(path):
    return [p for p in path.iterdir() if not p.name.startswith(".")]


@functools.cache
def _say_once(text):
    log.warning(text)
