"""Images from bytes to normalised float32, with NumPy and Pillow: the same pixels on every machine.

Every random function takes the generator of its example, so an augmented image is a function of that
generator alone. Sizes are (height, width). Resizing is bicubic, antialiased (Pillow), on uint8.
"""

import copy
import io
import math

import numpy as np
from PIL import Image, UnidentifiedImageError

from jojax.data.augment import augment, options, rub_out
from jojax.errors import UserError

CROPS = ("none", "pad4", "inception", "cover")
CROP_RATIO = 224 / 256  # evaluation keeps this central part: shorter side to 256, centre 224


def decode(data, name):
    """An encoded image to uint8 RGB [H, W, 3].

    Greyscale, palette and CMYK are converted; the format is found from the bytes, not from the name; EXIF
    rotation is ignored, as in the published ImageNet pipelines.

    Args:
      data: bytes of a JPEG, PNG or another format Pillow reads.
      name: what to call the image when it can't be decoded.

    Raises:
      UserError: the bytes are not an image or are damaged.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels are of mode {image.mode}, not 8 bits a channel: convert it")
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error and more
        why = "no image format that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"{name} can't be decoded ({why}): replace or remove that image") from error


def resize(image, size, box=None):
    """uint8 [H, W, 3] (or its part box = (left, top, right, bottom)) to uint8 [size[0], size[1], 3]."""
    if box is None and image.shape[:2] == tuple(size):
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box))


def resize_small(image, size):
    """The smallest resize that keeps the aspect ratio and covers `size` (square: its shorter side)."""
    height, width = image.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    return resize(image, (max(size[0], round(height * scale)), max(size[1], round(width * scale))))


def centre_crop(image, size):
    """The central uint8 [size[0], size[1], 3]; the odd pixel goes to the top and left."""
    top, left = ((have - want) // 2 for have, want in zip(image.shape[:2], size, strict=True))
    return image[top : top + size[0], left : left + size[1]]


def inception_crop(image, size, rng, area=(0.08, 1.0), ratio=(3 / 4, 4 / 3), tries=10):
    """Random resized crop (Szegedy et al. 2014, arXiv:1409.4842; areas as in DeiT, arXiv:2012.12877).

    A box of uniformly drawn share of the area and log-uniformly drawn aspect ratio (width / height), resized
    to `size`. Where no try fits, the largest central box whose ratio is allowed.
    """
    height, width = image.shape[:2]
    for _ in range(tries):
        target = rng.uniform(*area) * height * width
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        h, w = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if 0 < h <= height and 0 < w <= width:
            top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
            return resize(image, size, box=(left, top, left + w, top + h))
    w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
    top, left = (height - h) // 2, (width - w) // 2
    return resize(image, size, box=(left, top, left + w, top + h))


def cover_crop(image, size, rng, scale=1.1):
    """A random window of the image resized to cover `scale` times the window (ComRoPE's released transform)."""
    image = resize_small(image, [round(scale * n) for n in size])
    top, left = (rng.integers(have - want + 1) for have, want in zip(image.shape[:2], size, strict=True))
    return image[top : top + size[0], left : left + size[1]]


def pad_crop(image, rng, pad=4):
    """A random crop of the image's own size after `pad` black pixels were put on every side."""
    height, width = image.shape[:2]
    padded = np.zeros((height + 2 * pad, width + 2 * pad, 3), image.dtype)
    padded[pad : pad + height, pad : pad + width] = image
    top, left = rng.integers(2 * pad + 1, size=2)
    return padded[top : top + height, left : left + width]


def flip(image, rng):
    """Mirrored left to right with probability 1/2."""
    return image[:, ::-1] if rng.integers(2) else image


def normalise(image, mean, std):
    """uint8 [..., 3] to float32 (image / 255 - mean) / std; mean, std: one number or three, white is 1."""
    mean, std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return (image.astype(np.float32) / np.float32(255) - mean) / std


def image_size(data_cfg):
    """data.image_size as (height, width). Raises UserError where it is no size."""
    value = data_cfg["image_size"]
    size = (value, value) if isinstance(value, int) else tuple(value)
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise UserError(f"data.image_size is {value!r}: give one positive integer or (height, width)")
    return size


def clip_span(data_cfg):
    """Frames of the video from the first to the last of a clip; 0 where there are images."""
    frames = data_cfg.get("frames", 0)
    return frames and (frames - 1) * _stride(data_cfg) + 1


def _stride(data_cfg):
    return data_cfg.get("frame_stride", 0) or 1


def _of_clip(transform, data_cfg):
    """The transform of an image as that of a clip, where data.frames asks for one: of every data.frame_stride-th frame,
    [frames, h, w, 3]. In training it starts anywhere, in evaluation it is the middle of the video; after the video's
    end its last frame is repeated. All frames are augmented alike: each gets a copy of the generator."""
    span, stride = clip_span(data_cfg), _stride(data_cfg)

    def of_clip(example, *rng):
        video = example["image"]
        spare = max(0, len(video) - span)
        first = rng[0].integers(spare + 1) if rng else spare // 2
        frames = (video[min(k, len(video) - 1)] for k in range(first, first + span, stride))
        rows = [transform(example | {"image": frame}, *copy.deepcopy(rng)) for frame in frames]
        return rows[0] | {"image": np.stack([row["image"] for row in rows])}

    return of_clip if span else transform


def _settings(data_cfg):
    """(size, crop, ratio, mean, std) of a data config, checked."""
    crop = data_cfg.get("crop", "none")
    if crop not in CROPS:
        raise UserError(f"data.crop is {crop!r}: choose one of {', '.join(CROPS)}")
    values = {key: np.atleast_1d(np.asarray(data_cfg.get(key, 0.5), np.float32)) for key in ("mean", "std")}
    for key, value in values.items():
        positive = value.min() > 0 if key == "std" else value.min() >= 0
        if value.shape not in ((1,), (3,)) or value.max() > 1 or not positive:
            raise UserError(f"data.{key} is {data_cfg[key]!r}: give one number or three; white is 1, not 255")
    ratio = data_cfg.get("crop_ratio", CROP_RATIO)
    if ratio != CROP_RATIO and crop not in ("inception", "cover"):
        raise UserError(f"data.crop_ratio = {ratio} does nothing here: it is for data.crop = 'inception' or 'cover'")
    return image_size(data_cfg), crop, ratio, values["mean"], values["std"]


def image_train_transform(data_cfg):
    """The augmentation of a training example as a function (example, rng) -> example.

    Args:
      data_cfg: mapping with image_size (int or (h, w)) and, optionally, crop ('none', 'pad4', 'inception',
        'cover'; default none: a plain resize), flip (bool, default False), augment (augment.Options; after
        crop and flip, erasing after normalising), mean and std (default 0.5), frames and frame_stride (clips).

    Returns:
      A function of {'image': uint8 [H, W, 3], 'label': int} and a np.random.Generator that returns
      {'image': float32 [h, w, 3], 'label': int32, 'weight': float32 1}.

    Raises:
      UserError: a value of the config is not usable.
    """
    size, crop, _, mean, std = _settings(data_cfg)
    mirror, opts = bool(data_cfg.get("flip", False)), options(data_cfg)
    fill = tuple(min(255, round(255 * float(m))) for m in np.broadcast_to(mean, 3))

    def transform(example, rng):
        image = example["image"]
        if crop == "inception":
            image = inception_crop(image, size, rng)
        elif crop == "cover":
            image = cover_crop(image, size, rng)
        else:
            image = resize(image, size)
            if crop == "pad4":
                image = pad_crop(image, rng)
        if mirror:
            image = flip(image, rng)
        image = normalise(augment(image, opts, fill, rng), mean, std)
        return _row(rub_out(image, opts, rng), example["label"])

    return _of_clip(transform, data_cfg)


def image_eval_transform(data_cfg):
    """The fixed transform of an evaluation example as a function (example) -> example; keys as in training.

    With data.crop = 'inception' or 'cover' the shorter side is resized to size / data.crop_ratio (default
    0.875) and the centre is cut out; else the whole image is resized to data.image_size (which leaves an
    image of that size as it is).
    """
    size, crop, ratio, mean, std = _settings(data_cfg)

    def transform(example):
        if crop in ("inception", "cover"):
            cover = tuple(round(n / ratio) for n in size)
            image = centre_crop(resize_small(example["image"], cover), size)
        else:
            image = resize(example["image"], size)
        return _row(normalise(image, mean, std), example["label"])

    return _of_clip(transform, data_cfg)


def _row(image, label):
    return {"image": image, "label": np.int32(label), "weight": np.float32(1)}
