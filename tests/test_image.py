"""Decoding, resizing, crops and normalisation against NumPy and against counts of what was drawn."""

import io

import ml_collections
import numpy as np
import pytest
from PIL import Image

from jojax.data import image as im
from jojax.errors import UserError


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pil, kind, **options):
    file = io.BytesIO()
    pil.save(file, kind, **options)
    return file.getvalue()


def test_decode_makes_rgb_of_every_kind():
    rgb = picture(5, 7)
    assert np.array_equal(im.decode(encoded(Image.fromarray(rgb), "PNG"), "x.JPEG"), rgb)
    grey = np.arange(35, dtype=np.uint8).reshape(5, 7)
    got = im.decode(encoded(Image.fromarray(grey), "PNG"), "x")
    assert np.array_equal(got, np.repeat(grey[..., None], 3, 2))
    smooth = np.full((16, 16, 3), (200, 60, 30), np.uint8)
    got = im.decode(encoded(Image.fromarray(smooth).convert("CMYK"), "JPEG", quality=95), "x")
    assert got.shape == (16, 16, 3) and np.abs(got.astype(int) - smooth).max() < 12


def test_decode_ignores_exif_rotation():
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees to view"
    data = encoded(Image.fromarray(picture(8, 24)), "JPEG", exif=exif)
    assert im.decode(data, "x").shape == (8, 24, 3)


@pytest.mark.parametrize("damage", [b"", b"not an image", "cut"])
def test_damaged_image_is_named(damage):
    if damage == "cut":
        damage = encoded(Image.fromarray(picture(64, 64)), "JPEG")[:900]
    with pytest.raises(UserError, match=r"cat/7\.JPEG can't be decoded"):
        im.decode(damage, "cat/7.JPEG")


def test_resize_small_covers_and_keeps_the_ratio():
    assert im.resize_small(picture(30, 60), (15, 15)).shape == (15, 30, 3)
    assert im.resize_small(picture(60, 30), (15, 15)).shape == (30, 15, 3)
    assert im.resize_small(picture(30, 60), (20, 10)).shape == (20, 40, 3)
    assert im.resize_small(picture(10, 12), (20, 24)).shape == (20, 24, 3)
    same = picture(9, 9)
    assert im.resize(same, (9, 9)) is same


def test_resize_is_antialiased():
    board = np.indices((64, 64)).sum(0)[..., None].repeat(3, 2) % 2 * np.uint8(255)
    small = im.resize(board.astype(np.uint8), (16, 16))[2:-2, 2:-2]
    assert np.abs(small.astype(int) - 127).max() < 6  # sampling without a filter gives 0 or 255


def test_centre_crop():
    image = picture(7, 9)
    assert np.array_equal(im.centre_crop(image, (3, 4)), image[2:5, 2:6])


def test_pad_crop_draws_every_shift():
    image = picture(6, 5)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(900):
        got = im.pad_crop(image, rng)
        hits = [(t, s) for t in range(9) for s in range(9) if np.array_equal(padded[t : t + 6, s : s + 5], got)]
        assert hits
        seen.add(hits[0])
    assert len(seen) >= 79  # 81 shifts; the four corners hold few pixels but are distinct


def test_inception_crop_draws_the_stated_areas_and_ratios(monkeypatch):
    boxes = []
    monkeypatch.setattr(im, "resize", lambda image, size, box: boxes.append(box) or np.zeros((*size, 3), np.uint8))
    rng = np.random.default_rng(2)
    for _ in range(2000):
        im.inception_crop(np.zeros((200, 300, 3), np.uint8), (32, 32), rng)
    left, top, right, bottom = np.array(boxes).T
    width, height = right - left, bottom - top
    assert left.min() == 0 and top.min() == 0 and right.max() == 300 and bottom.max() == 200
    area, ratio = width * height / 60000, width / height
    assert 0.07 < area.min() < 0.1 and area.max() > 0.85
    assert 0.72 < ratio.min() < 0.78 and 1.28 < ratio.max() < 1.37
    assert abs(np.log(ratio[area < 0.4]).mean()) < 0.03  # log-uniform: wide as often as tall


def test_inception_crop_of_an_extreme_image_takes_the_largest_centre(monkeypatch):
    boxes = []
    monkeypatch.setattr(im, "resize", lambda image, size, box: boxes.append(box) or image)
    im.inception_crop(np.zeros((6, 300, 3), np.uint8), (4, 4), np.random.default_rng(0), area=(1.0, 1.0))
    assert boxes == [(146, 0, 154, 6)]


def test_flip_is_fair():
    image = picture(4, 5)
    rng = np.random.default_rng(0)
    mirrored = sum(np.array_equal(im.flip(image, rng), image[:, ::-1]) for _ in range(1000))
    assert 430 < mirrored < 570


def test_normalise_per_channel():
    image = picture(4, 5)
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.3, 0.1])
    got = im.normalise(image, mean, std)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, (image / 255 - mean) / std, rtol=2e-5, atol=2e-6)


CONFIG = {"image_size": (20, 24), "crop": "inception", "flip": True, "mean": (0.5, 0.4, 0.3), "std": 0.25}


def test_transforms_return_the_contract():
    example = {"image": picture(40, 50), "label": 3}
    for cfg in (CONFIG, ml_collections.ConfigDict(CONFIG)):
        for row in (
            im.image_train_transform(cfg)(example, np.random.default_rng(0)),
            im.image_eval_transform(cfg)(example),
        ):
            assert row["image"].shape == (20, 24, 3) and row["image"].dtype == np.float32
            assert row["label"] == 3 and row["label"].dtype == np.int32
            assert row["weight"] == 1 and row["weight"].dtype == np.float32


def test_train_transform_depends_on_its_generator_alone():
    example, transform = {"image": picture(40, 50), "label": 3}, im.image_train_transform(CONFIG)
    a, b, c = (transform(example, np.random.default_rng(seed))["image"] for seed in (5, 5, 6))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_eval_transform_crops_seven_eighths():
    cfg = {"image_size": 224, "crop": "inception", "mean": 0, "std": 1}
    image = picture(256, 300)
    got = im.image_eval_transform(cfg)({"image": image, "label": 0})["image"]
    np.testing.assert_allclose(got, image[16:240, 38:262] / 255, rtol=1e-6)
    whole = im.image_eval_transform({"image_size": (256, 300), "mean": 0, "std": 1})
    np.testing.assert_allclose(whole({"image": image, "label": 0})["image"], image / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crop", "random"),
        ("image_size", 0),
        ("image_size", (3, 4, 5)),
        ("mean", 127.5),
        ("std", 0.0),
        ("mean", (0.5, 0.5)),
    ],
)
def test_bad_settings_name_their_key(key, value):
    with pytest.raises(UserError, match=rf"data\.{key} is "):
        im.image_train_transform(CONFIG | {key: value})
