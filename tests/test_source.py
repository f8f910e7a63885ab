"""Embedded images, prepared TFDS sets, class folders; and what is said when one of them is broken."""

import json
import subprocess
import sys

import ml_collections
import numpy as np
import pytest

from image_sets import FASHION_CFG, encoded, fashion, write_cifar100, write_files
from jojax.data.source import FASHION, open_source
from jojax.errors import UserError


def test_fashion_mnist():
    train, test = (
        open_source(FASHION_CFG, "train"),
        open_source(ml_collections.ConfigDict(FASHION_CFG), "valid"),
    )
    assert (len(train), len(test)) == (5000, 1000)
    for source, each in ((train, 500), (test, 100)):
        labels = [source[i]["label"] for i in range(len(source))]
        assert np.bincount(labels).tolist() == [each] * 10
    with np.load(FASHION) as arrays:
        original = arrays["train_images"][7]
    image = train[7]["image"]
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8
    assert np.array_equal(image[2:30, 2:30, 1], original) and original.any()
    assert not image[:2].any() and not image[30:].any() and not image[:, :2].any() and not image[:, 30:].any()
    with pytest.raises(IndexError):
        test[1000]


def test_fashion_mnist_is_learnable_and_its_labels_fit():
    """Nearest class mean: far above the tenth that shuffled labels would give."""
    with np.load(FASHION) as a:
        x, y = a["train_images"].reshape(5000, -1) / 255, a["train_labels"]
        u, v = a["test_images"].reshape(1000, -1) / 255, a["test_labels"]
    means = np.stack([x[y == c].mean(0) for c in range(10)])
    guess = ((u[:, None] - means) ** 2).sum(-1).argmin(1)
    assert (guess == v).mean() > 0.6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """20 train and 7 test records, and the images they were made from."""
    return write_cifar100(tmp_path_factory.mktemp("tfds"), 20, 7), {"train": fashion("train"), "test": fashion("test")}


def tfds_cfg(folder, **more):
    return {"source": "tfds", "path": str(folder), "name": "cifar100", "classes": 100} | more


def test_tfds_reads_what_was_prepared(prepared):
    folder, fashion = prepared
    source = open_source(tfds_cfg(folder), "train")
    assert len(source) == 20 and source.classes == 100
    originals = {fashion["train"][i]["image"].tobytes(): fashion["train"][i]["label"] + 90 for i in range(20)}
    got = {source[i]["image"].tobytes(): source[i]["label"] for i in range(20)}
    assert got == originals
    assert source[3]["image"].shape == (32, 32, 3) and source[3] is source[3]  # decoded once


def test_tfds_splits_versions_and_paths(prepared):
    folder, _ = prepared
    assert len(open_source(tfds_cfg(folder), "valid")) == 7
    assert len(open_source(tfds_cfg(folder, name="cifar100:3.0.2"), "train[:50%]")) == 10
    assert len(open_source(tfds_cfg(folder / "cifar100" / "3.0.2"), "test")) == 7


def test_tfds_needs_no_tensorflow(prepared):
    program = (
        "import sys; from jojax.data.source import open_source;"
        f"s = open_source({tfds_cfg(prepared[0])!r}, 'train'); s[0];"
        "assert 'tensorflow' not in sys.modules and 'tensorflow_datasets' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tfds_errors_say_what_to_do(prepared, tmp_path):
    folder, _ = prepared

    def message(path, split="train", **more):
        with pytest.raises(UserError) as caught:
            open_source(tfds_cfg(path, **more), split)
        return str(caught.value)

    assert "has no split 'validation': it has test, train" in message(folder, "validation")
    assert "data.classes is 10, but" in message(folder, classes=10)
    assert "file_format='array_record'" in message(tmp_path / "nowhere")
    assert "file_format='array_record'" in message(tmp_path)
    assert "data.name" in message(tmp_path, name=None)
    (tmp_path / "cifar100" / "incomplete.ABCDEF_3.0.2").mkdir(parents=True)
    assert "not prepared to the end" in message(tmp_path)
    assert "data.path is not set" in message("")


@pytest.fixture
def copied(prepared, tmp_path):
    import shutil

    shutil.copytree(prepared[0], tmp_path / "copy")
    return tmp_path / "copy", tmp_path / "copy" / "cifar100" / "3.0.2"


def test_tfds_of_another_format(copied):
    folder, version = copied
    info = json.loads((version / "dataset_info.json").read_text())
    (version / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    with pytest.raises(UserError, match=r"3\.0\.2 was prepared as tfrecord.*array_record"):
        open_source(tfds_cfg(folder), "train")
    (version / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_info\.json is damaged"):
        open_source(tfds_cfg(folder), "train")


def test_tfds_with_damaged_and_missing_files(copied):
    folder, version = copied
    file = version / "cifar100-train.array_record-00000-of-00001"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    source = open_source(tfds_cfg(folder), "train")
    with pytest.raises(UserError, match=r"record \d+ of .*3\.0\.2 \[train\] can't be (read|decoded)"):
        for i in range(20):
            source[i]
    file.unlink()
    with pytest.raises(UserError, match="00000-of-00001 is missing"):
        open_source(tfds_cfg(folder), "train")
    assert len(open_source(tfds_cfg(folder), "test")) == 7
    (version / "features.json").unlink()
    with pytest.raises(UserError, match="not prepared to the end"):
        open_source(tfds_cfg(folder), "test")


@pytest.fixture
def tree(tmp_path):
    """ImageNet's layout and its traps; class 2 has no validation image."""
    images = [fashion("train")[i]["image"] for i in range(7)]
    files = {
        "train/n01440764/n01440764_10.JPEG": encoded(images[0], "JPEG"),
        "train/n01440764/n01440764_2.JPEG": encoded(images[1], "JPEG", "CMYK"),
        "train/n01443537/a.jpg": encoded(images[2], "JPEG", "L"),
        "train/n02105855/n02105855_2933.JPEG": encoded(images[3], "PNG"),
        "train/n02105855/notes.txt": b"no image",
        "val/n02105855/ILSVRC2012_val_00000001.JPEG": encoded(images[4], "JPEG"),
        "val/n01440764/ILSVRC2012_val_00000002.JPEG": encoded(images[5], "JPEG"),
    }
    return write_files(tmp_path, files), images


def test_folder_labels_by_rank_and_reads_every_kind(tree):
    path, images = tree
    train = open_source({"source": "folder", "path": str(path), "classes": 3}, "train")
    assert [train[i]["label"] for i in range(len(train))] == [0, 0, 1, 2]
    for i in range(4):
        image = train[i]["image"]
        assert image.shape == (32, 32, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - images[i]).mean() < 12  # JPEG loses a little
    assert np.array_equal(train[3]["image"], images[3])


def test_folder_validation_keeps_the_labels_of_train(tree):
    val = open_source({"source": "folder", "path": str(tree[0])}, "valid")
    assert [val[i]["label"] for i in range(len(val))] == [0, 2] and val.classes == 3


def test_folder_errors(tree):
    path, _ = tree
    cfg = {"source": "folder", "path": str(path)}
    (path / "train" / "n01443537" / "b.JPEG").write_bytes(encoded(tree[1][6], "JPEG")[:400])
    train = open_source(cfg, "train")
    with pytest.raises(UserError, match=r"n01443537/b\.JPEG can't be decoded"):
        [train[i] for i in range(len(train))]
    with pytest.raises(UserError, match=r"has no split 'test': it has train, val"):
        open_source(cfg, "test")
    (path / "val" / "new").mkdir()
    with pytest.raises(UserError, match=r"has a class 'new' that .*train has not"):
        open_source(cfg, "val")
    (path / "flat").mkdir()
    (path / "flat" / "1.JPEG").write_bytes(b"x")
    with pytest.raises(UserError, match="has no class folders"):
        open_source(cfg, "flat")
    (path / "flat" / "n01440764").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        open_source(cfg, "flat")
    with pytest.raises(UserError, match="is no folder"):
        open_source(cfg | {"path": str(path / "nowhere")}, "train")


def test_unknown_source_lists_the_known():
    with pytest.raises(UserError, match=r"data\.source is 'imagenet': choose one of fashion_mnist, tfds, folder"):
        open_source({"source": "imagenet"}, "train")
