"""The published configs on data in the published formats: CIFAR-100 from TFDS, ImageNet from class folders."""

import math

import pytest

import runs
from image_sets import write_cifar100, write_imagenet

SMALL = {"model.width": 32, "model.depth": 2, "model.heads": 2, "steps": 3, "log.every_steps": 1}


def check(workdir, spec, overrides, scored):
    runs.train(spec, overrides, workdir)
    record = runs.result(workdir)
    assert record["state"] == "finished" and record["examples"] == 3 * record["config"]["batch_size"]
    assert record["scored"] == scored and 0 <= record["metrics"]["accuracy"] <= 1
    losses = runs.losses(workdir)
    assert list(losses) == [1, 2, 3]
    assert losses[1] == pytest.approx(math.log(record["config"]["data"]["classes"]), abs=0.2)  # as good as guessing
    return record


@pytest.mark.slow
def test_cifar100_from_a_prepared_tfds_directory(tmp_path):
    write_cifar100(tmp_path / "tfds", train=20, test=7)
    record = check(
        tmp_path / "run", "configs/cifar100_vit_tiny.py:smoke", SMALL | {"data.path": str(tmp_path / "tfds")}, 7
    )
    assert record["config"]["encoding"]["preset"] == "rope_axial_qkv"


@pytest.mark.slow
def test_imagenet_from_a_tree_of_class_folders(tmp_path):
    """A thousand classes with one image each, larger than they are shown to the model and not square."""
    write_imagenet(tmp_path / "tree", classes=1000, train=1, valid=11, size=(260, 240))
    given = SMALL | {"data.path": str(tmp_path / "tree"), "model.patch": 56}
    record = check(tmp_path / "run", "configs/imagenet_vits_jo.py:smoke", given, 11)
    assert record["config"]["dtype"] == "bfloat16" and record["config"]["data"]["image_size"] == 224
