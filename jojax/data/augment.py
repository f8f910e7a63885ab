"""Augmentations of one training image: RandAugment, 3-Augment and colour jitter on uint8 through Pillow, random erasing
and cutout on the normalised image. `options` reads `data.augment`, that of the batch (mixup, cutmix) too.

Every function takes the generator of its example. Values at fixed draws are those of timm and torchvision
(tests/public_images.json).
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from jojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """`data.augment`, all off by default; and what belongs to it of `data`."""

    rand: str = ""  # 'rand-m9-mstd0.5-inc1' (timm) or 'torchvision-m9-n2'
    three: bool = False  # 3-Augment
    jitter: float = 0.0  # brightness, contrast and saturation by a factor of 1 ± jitter
    erase: float = 0.0  # probability
    erase_fill: str = "noise"  # noise: N(0, 1) a pixel and channel; mean: 0 after normalising
    cutout: int = 0  # side of a square, in pixels
    mixup: float = 0.0  # α of Beta(α, α); 0 = off
    cutmix: float = 0.0
    switch: float = 0.5  # how often cutmix, where both are on
    repeat: int = 1  # times that an example stands in its batch, each augmented on its own
    loss: str = "softmax"
    mixed_targets: str = "share"
    label_smoothing: float = 0.0


CHOICES = {"erase_fill": ("noise", "mean"), "loss": ("softmax", "sigmoid"), "mixed_targets": ("share", "both")}
OF_DATA = ("loss", "mixed_targets", "label_smoothing")


def options(data_cfg) -> Options:
    """UserError for what is unknown, or does nothing beside the rest."""
    given, valid = dict(data_cfg.get("augment", {})), [f.name for f in dataclasses.fields(Options)]
    for key in given:
        if key not in valid or key in OF_DATA:
            known = ", ".join(name for name in valid if name not in OF_DATA)
            raise UserError(f"data.augment.{key} is no augmentation; there are {known}")
    made = Options(**given, **{key: data_cfg[key] for key in OF_DATA if key in data_cfg})
    for key, names in CHOICES.items():
        if getattr(made, key) not in names:
            raise UserError(f"{_path(key)} is {getattr(made, key)!r}: choose one of {', '.join(names)}")
    policy(made.rand)
    mixed = made.mixup > 0 or made.cutmix > 0
    for key, used, use in (
        ("three", not made.rand, "set it or data.augment.rand, not both"),
        ("erase_fill", made.erase > 0, "it is for data.augment.erase"),
        ("switch", made.mixup > 0 and made.cutmix > 0, "it is for mixup and cutmix together"),
        ("mixed_targets", mixed and made.loss == "sigmoid", "it is for mixup or cutmix with data.loss = 'sigmoid'"),
        ("label_smoothing", made.mixed_targets == "share", "with data.mixed_targets = 'both' targets are 0 or 1"),
    ):
        if not used and getattr(made, key) != getattr(Options, key):
            raise UserError(f"{_path(key)} = {getattr(made, key)!r} does nothing here: {use}")
    return made


def _path(key):
    return f"data.{key}" if key in OF_DATA else f"data.augment.{key}"


def augment(image, opts: Options, fill, rng):
    """uint8 [H, W, 3] -> the same, by the policies of `opts`; fill: the colour of what comes into view."""
    if not (opts.rand or opts.three or opts.jitter):
        return image
    picture = Image.fromarray(image)
    if opts.rand:
        picture = policy(opts.rand)(picture, fill, rng)
    elif opts.three:
        picture = three_augment(picture, rng)
    if opts.jitter:
        picture = colour_jitter(picture, opts.jitter, rng)
    return np.asarray(picture)


def rub_out(image, opts: Options, rng):
    """float32 [H, W, 3], normalised -> the same with a part erased; in place."""
    if opts.erase:
        erase(image, opts.erase, opts.erase_fill == "noise", rng)
    if opts.cutout:
        cutout(image, opts.cutout, rng)
    return image


# ------------------------------------------------------------------------------------ RandAugment
def _affine(image, matrix, fill, resample):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=resample, fillcolor=fill)


def _solarize_add(image, add):
    return image.point([min(255, i + add) if i < 128 else i for i in range(256)] * 3)


# op: (picture, value, fill, resampling filter) -> picture
OPS = {
    "identity": lambda p, v, fill, how: p,
    "auto_contrast": lambda p, v, fill, how: ImageOps.autocontrast(p),
    "equalize": lambda p, v, fill, how: ImageOps.equalize(p),
    "invert": lambda p, v, fill, how: ImageOps.invert(p),
    "rotate": lambda p, v, fill, how: p.rotate(v, resample=how, fillcolor=fill),
    "posterize": lambda p, v, fill, how: ImageOps.posterize(p, v) if v < 8 else p,
    "solarize": lambda p, v, fill, how: ImageOps.solarize(p, v),
    "solarize_add": lambda p, v, fill, how: _solarize_add(p, v),
    "color": lambda p, v, fill, how: ImageEnhance.Color(p).enhance(v),
    "contrast": lambda p, v, fill, how: ImageEnhance.Contrast(p).enhance(v),
    "brightness": lambda p, v, fill, how: ImageEnhance.Brightness(p).enhance(v),
    "sharpness": lambda p, v, fill, how: ImageEnhance.Sharpness(p).enhance(v),
    "shear_x": lambda p, v, fill, how: _affine(p, (1, v, 0, 0, 1, 0), fill, how),
    "shear_y": lambda p, v, fill, how: _affine(p, (1, 0, 0, v, 1, 0), fill, how),
    "translate_x": lambda p, v, fill, how: _affine(p, (1, 0, v * p.size[0], 0, 1, 0), fill, how),
    "translate_y": lambda p, v, fill, how: _affine(p, (1, 0, 0, 0, 1, v * p.size[1]), fill, how),
}
ENHANCE = ("color", "contrast", "brightness", "sharpness")
REACH = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.45, "translate_y": 0.45}


def _signed(value, rng):
    return -value if rng.random() > 0.5 else value


def timm_value(op, level, increasing, rng):
    """What an op gets at level 0 … 1. `increasing`: it is stronger at higher levels, as all but four are anyway."""
    if op in REACH:
        return _signed(level * REACH[op], rng)
    if op in ENHANCE:
        return max(0.1, 1 + _signed(level * 0.9, rng)) if increasing else level * 1.8 + 0.1
    if op == "posterize":  # bits that stay
        return 4 - int(level * 4) if increasing else int(level * 4)
    if op == "solarize":  # what is brighter is inverted
        threshold = min(256, int(level * 256))
        return 256 - threshold if increasing else threshold
    return min(128, int(level * 110)) if op == "solarize_add" else None


def torchvision_value(op, level, size, rng):
    """Likewise at level 0 … 1; translations by whole pixels, size = (width, height)."""
    if op in ENHANCE:
        return 1 + _signed(level * 0.9, rng)
    if op.startswith("translate"):
        pixels = size[op == "translate_y"]
        return -int(_signed(level * 150 / 331 * pixels, rng)) / pixels  # it moves the picture, timm the view
    if op in REACH:
        return _signed(level * REACH[op], rng)
    return 8 - round(level * 4) if op == "posterize" else 255 * (1 - level)


MOVES = tuple(REACH)[1:]
TIMM = ("auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", *ENHANCE, *MOVES)
TORCHVISION = ("identity", *MOVES, "rotate", "brightness", "color", "contrast", "sharpness")
TORCHVISION = (*TORCHVISION, "posterize", "solarize", "auto_contrast", "equalize")


@dataclasses.dataclass(frozen=True)
class RandAugment:
    """RandAugment (arXiv 1909.13719): `n` ops drawn with replacement.

    rand (timm): each with probability `p` at magnitude N(m, mstd²) within 0 … mmax of 10 (mstd above 100: uniform in
    0 … m); inc: increasing ops; bicubic, filled with the mean. torchvision: each at magnitude m of 30, nearest pixel,
    filled with black."""

    name: str = "rand"
    m: float = 10.0
    n: int = 2
    p: float = 0.5
    mstd: float = 0.0
    mmax: float = 10.0
    inc: int = 0

    def __call__(self, picture, fill, rng):
        ops = TIMM if self.name == "rand" else TORCHVISION
        for op in [ops[rng.integers(len(ops))] for _ in range(self.n)]:
            if self.name == "torchvision":
                value = torchvision_value(op, self.m / 30, picture.size, rng)
                picture = OPS[op](picture, value, (0, 0, 0), Image.Resampling.NEAREST)
            elif self.p == 1 or rng.random() <= self.p:
                level = max(0.0, min(self.magnitude(rng), self.mmax)) / 10
                picture = OPS[op](picture, timm_value(op, level, self.inc, rng), fill, Image.Resampling.BICUBIC)
        return picture

    def magnitude(self, rng):
        if not self.mstd:
            return self.m
        return rng.uniform(0, self.m) if self.mstd > 100 else rng.normal(self.m, self.mstd)


def policy(text):
    """The RandAugment of 'rand-m9-mstd0.5-inc1' or 'torchvision-m9-n2', sections in any order. UserError for any other
    text but ''."""
    name, *sections = text.split("-")
    keys = {"rand": "m|n|p|mstd|mmax|inc", "torchvision": "m|n", "": "-"}.get(name, "-")
    matches = [re.fullmatch(rf"({keys})(\d+(?:\.\d+)?)", section) for section in sections]
    found: dict[str, Any] = {match[1]: float(match[2]) for match in matches if match}
    odd = found.get("n", 1) % 1 or found.get("inc", 1) not in (0, 1)
    if len(found) < len(sections) or (keys == "-" and text) or odd:
        raise UserError(
            f"data.augment.rand is {text!r}: write timm's rand-m9-mstd0.5-inc1, with any of m (magnitude of 10), n "
            "(ops), p (probability of each), mstd, mmax and inc (0 or 1), or torchvision-m9-n2 (magnitude of 30)"
        )
    return RandAugment(name, **found | {"n": int(found.get("n", 2))})


# ------------------------------------------------------------------------------------ others
def three_augment(picture, rng):
    """One of greyscale, solarisation at 128 and Gaussian blur of radius 0.1 … 2 (DeiT III, arXiv 2204.07118)."""
    kind = rng.integers(3)
    if kind == 0:
        return ImageOps.grayscale(picture).convert("RGB")
    return ImageOps.solarize(picture) if kind == 1 else picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2)))


def colour_jitter(picture, strength, rng):
    """Brightness, contrast and saturation in random order, each times a factor of max(0, 1 − s) … 1 + s."""
    for i in rng.permutation(3):
        factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
        picture = OPS[("brightness", "contrast", "color")[i]](picture, factor, None, None)
    return picture


def erase(image, probability, noise, rng, area=(0.02, 1 / 3), aspect=(0.3, 1 / 0.3), tries=10):
    """Random erasing (arXiv 1708.04896) as timm has it: a box of a share of the area and a ratio (height / width),
    drawn uniformly and log-uniformly, that is smaller than the image; in place."""
    H, W, channels = image.shape
    if rng.random() > probability:
        return
    for _ in range(tries):
        size = rng.uniform(*area) * H * W
        ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
        h, w = round(math.sqrt(size * ratio)), round(math.sqrt(size / ratio))
        if h < H and w < W:
            top, left = rng.integers(H - h + 1), rng.integers(W - w + 1)
            image[top : top + h, left : left + w] = rng.normal(size=(h, w, channels)) if noise else 0
            return


def cutout(image, side, rng):
    """A square of zeros around a random pixel, cut at the rim (arXiv 1708.04552); in place."""
    top, left = (int(rng.integers(n)) - side // 2 for n in image.shape[:2])
    image[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = 0
