"""Real images in the file formats of CIFAR-100 and ImageNet, for the tests that read them."""

import io

import numpy as np
from PIL import Image

from jojax.data.source import open_source

FASHION_CFG = {"source": "fashion_mnist", "classes": 10}


def fashion(split):
    """Fashion-MNIST: source[i] = {image uint8 [32, 32, 3], label}"""
    return open_source(FASHION_CFG, split)


def encoded(array, kind, mode="RGB"):
    file = io.BytesIO()
    Image.fromarray(array).convert(mode).save(file, kind)
    return file.getvalue()


def write_files(folder, files):
    """{relative path: bytes}"""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_cifar100(folder, train, test):
    """cifar100 3.0.2 as TFDS prepares it in ArrayRecord files, from images of Fashion-MNIST; labels 90 to 99."""
    import tensorflow_datasets as tfds

    features = {
        "id": tfds.features.Text(),
        "image": tfds.features.Image(shape=(32, 32, 3)),
        "label": tfds.features.ClassLabel(num_classes=100),
        "coarse_label": tfds.features.ClassLabel(num_classes=20),
    }

    def examples(split, count):
        source = fashion(split)
        for i in range(count):
            image, label = source[i]["image"], source[i]["label"]
            row = {"id": f"{split}_{i:05d}", "label": label + 90, "coarse_label": label}
            yield i, row | {"image": encoded(image, "PNG")}

    with tfds.core.registered.skip_registration():

        class Cifar100(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("3.0.2")

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, dl_manager):
                return {"train": examples("train", train), "test": examples("test", test)}

            def _generate_examples(self):
                raise NotImplementedError

    Cifar100(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def write_imagenet(folder, classes, train, valid, size=(32, 32), kind="JPEG"):
    """train/<wnid>/*.JPEG, `train` a class, and `valid` images in val, over the first classes by turns; upscaled."""
    made = {split: fashion(source) for split, source in (("train", "train"), ("val", "test"))}
    wnids = [f"n{i:08d}" for i in range(classes)]

    def picture(split, i):
        image = Image.fromarray(made[split][i % len(made[split])]["image"])
        return encoded(np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC)), kind)

    files = {
        f"train/{w}/{w}_{i}.{kind}": picture("train", n * train + i) for n, w in enumerate(wnids) for i in range(train)
    }
    files |= {f"val/{wnids[i % classes]}/ILSVRC2012_val_{i:08d}.{kind}": picture("val", i) for i in range(valid)}
    return write_files(folder, files)
