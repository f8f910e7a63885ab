"""How fast one core makes a model's input: images a second, and text in MB/s, from one run on this machine.

    python scripts/bench/input.py [--images FOLDER] [--seconds 5]

- images: JPEG -> decoded, cropped, augmented, normalised 224 × 224, with the recipes of configs/imagenet_vits.py, and
  with none but the crop. FOLDER holds JPEGs (searched below it); without it, embedded images enlarged to 500 × 375 and
  saved with quality 90, which decode like photographs of that size but for their plainer content
- text: the embedded Wikipedia articles through a byte-level BPE of 2,048 and of 16,384 tokens, and as bytes

One process, one thread: a machine of n cores makes up to n times as much, n up to 32 (jojax/data/stream.py).
"""

import argparse
import io
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]
os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizers' library

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from jojax import config  # noqa: E402 — the repository's own package, installed or not
from jojax.data.documents import open_documents  # noqa: E402
from jojax.data.image import decode, image_train_transform  # noqa: E402
from jojax.data.source import FashionMnist  # noqa: E402
from jojax.data.text import BPETokenizer, ByteTokenizer  # noqa: E402

SIZE, IMAGES = (500, 375), 64
RECIPES = {"crop and flip": None, "JoFormer's (RandAugment, erasing)": "recipe=jo", "DeiT III's": "recipe=deit3"}


def jpegs(folder):
    """Encoded images."""
    if folder:
        found = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in (".jpeg", ".jpg"))[:IMAGES]
        if not found:
            sys.exit(f"error: there is no JPEG below {folder}")
        return [path.read_bytes() for path in found]
    source, out = FashionMnist("test"), []
    for i in range(IMAGES):
        file = io.BytesIO()
        Image.fromarray(source[i]["image"]).resize(SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        out.append(file.getvalue())
    return out


def per_second(make, items, seconds):
    """How many items, after one for the caches."""
    make(items[0], 0)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        make(items[done % len(items)], done)
        done += 1
    return done / (time.perf_counter() - start)


def images(folder, seconds):
    encoded = jpegs(folder)
    print(f"JPEG -> 224 × 224, {sum(map(len, encoded)) / len(encoded) / 1000:.0f} kB each: images a second on one core")
    print(f"  {'decoding alone':36} {per_second(lambda data, _: decode(data, ''), encoded, seconds):8.0f}")
    for name, arg in RECIPES.items():
        data = config.load(f"{ROOT}/configs/imagenet_vits.py:{arg or 'recipe=jo'}").data
        if arg is None:
            data.augment.update(rand="", erase=0.0)
        transform = image_train_transform(data)

        def make(encoded, n, transform=transform):
            transform({"image": decode(encoded, ""), "label": 0}, np.random.default_rng(n))

        print(f"  {name:36} {per_second(make, encoded, seconds):8.0f}")


def text(seconds):
    source = open_documents({"source": "wikipedia_excerpt"}, "train")
    articles = [source[i] for i in range(len(source))]
    size = sum(len(article.encode()) for article in articles) / len(articles) / 1e6
    print(f"text, articles of {1000 * size:.0f} kB: MB/s on one core")
    tokenizers = {f"BPE of {n:,} tokens": BPETokenizer.train(iter(articles), n) for n in (2048, 16_384)}
    for name, tokenizer in {**tokenizers, "bytes": ByteTokenizer()}.items():
        rate = per_second(lambda article, _, t=tokenizer: t.encode_documents([article]), articles, seconds)
        print(f"  {name:36} {rate * size:8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", default="", help="a folder of JPEGs, such as ImageNet's val/")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = parser.parse_args()
    images(args.images, args.seconds)
    text(args.seconds)
