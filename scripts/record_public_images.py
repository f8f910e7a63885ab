"""Images, labels and losses as timm and torchvision compute them, for tests/test_augment.py, beside
scripts/record_public_values.py: the libraries are called, none of their code is here.

    public/bin/pip install pillow && public/bin/pip install --no-deps timm torchvision
    public/bin/python scripts/record_public_images.py

Their random draws come from a script: `Script` turns a list of numbers 0 … 1 into what is asked for, here in place of
the modules `random` and `numpy.random`, in the tests in place of the generator of an example. So an entry of
tests/public_images.json is what was called, the inputs (images by `picture`), the draws and the values. Neither jojax
nor JAX is imported.
"""

import importlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "public_images.json"
SIZE = (9, 7)
FILL = (124, 116, 104)


def picture(seed, height=SIZE[0], width=SIZE[1]):
    """Smooth colours with an edge, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(a * y + b * x + c) for a, b, c in rng.uniform(0.2, 1.5, (3, 3))]
    image = 120 + 70 * np.stack(waves, -1)
    image[height // 2 :, : width // 2] += 30
    return image.clip(0, 255).astype(np.uint8)


class Script:
    """Draws from a list, in the methods of a NumPy generator and of the module `random`."""

    def __init__(self, draws):
        self.left = list(draws)

    def random(self):
        return self.left.pop(0)

    def uniform(self, low=0.0, high=1.0):
        return low + self.left.pop(0) * (high - low)

    def normal(self, mean=0.0, std=1.0, size=None):
        return mean + std * (2 * self.left.pop(0) - 1) if size is None else np.ones(size)

    gauss = normal

    def integers(self, below):
        return int(self.left.pop(0) * below)

    def randint(self, low, high, size=None):
        """As `random` has it where size is missing: the upper end counts."""
        return low + self.integers(high - low + 1)

    def permutation(self, n):
        return np.argsort([self.left.pop(0) for _ in range(n)])


def module_at(name) -> Any:
    return importlib.import_module(name)


def values(image):
    return np.asarray(image).tolist()


def timm_augment():
    """Every op of the two sets at levels and signs, and two policies from end to end."""
    Image = module_at("PIL.Image")
    module = module_at("timm.data.auto_augment")
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC, "translate_const": 1}
    for increasing, names in ((1, module._RAND_INCREASING_TRANSFORMS), (0, module._RAND_TRANSFORMS)):
        for number, name in enumerate(names):
            for magnitude, sign in ((3.0, 0.2), (9.0, 0.8)):
                module.random = Script([sign])
                op = module.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=hparams)
                image = op(Image.fromarray(picture(1)))
                # the tests draw the op first
                draws = [(number + 0.5) / len(names), *([] if len(module.random.left) else [sign])]
                spec = f"rand-m{magnitude:g}-n1-p1-inc{increasing}"
                yield {"spec": spec, "seed": 1, "draws": draws, "called": f"AugmentOp({name})"}, values(image)
    for spec, seed in (("rand-m9-mstd0.5-inc1", 5), ("rand-m7-n3-mstd101-p0.7", 6)):
        number = 3 if "n3" in spec else 2
        draws = np.random.default_rng(seed).integers(1, 1000, 5 * number) / 1000
        ops, rest = draws[:number], Script(draws[number:])
        made = module.rand_augment_transform(spec, dict(hparams))
        chosen = [made.ops[int(u * len(made.ops))] for u in ops]
        module.random = rest
        image = Image.fromarray(picture(2))
        for op in chosen:
            image = op(image)
        yield {"spec": spec, "seed": 2, "draws": draws.tolist(), "called": "rand_augment_transform"}, values(image)


def torchvision_augment():
    Image = module_at("PIL.Image")
    modes = module_at("torchvision.transforms.functional").InterpolationMode
    module_at("torchvision.transforms").InterpolationMode = modes
    module = module_at("torchvision.transforms.autoaugment")
    # the order is jojax's; the library's own is checked to have the same ops
    names = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast")
    names = (*names, "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize")
    image = Image.fromarray(picture(3, 18, 17))
    space = module.RandAugment()._augmentation_space(31, (18, 17))
    assert set(space) == set(names)
    for number, name in enumerate(names):
        for m, sign in ((4, 0.2), (9, 0.8)):
            magnitudes, signed = space[name]
            magnitude = float(magnitudes[m]) if magnitudes.ndim else 0.0
            magnitude *= -1 if signed and sign > 0.5 else 1
            made = module._apply_op(image, name, magnitude, interpolation=modes.NEAREST, fill=None)
            draws = [(number + 0.5) / len(names), *([sign] if signed else [])]
            inputs = {"spec": f"torchvision-m{m}-n1", "seed": 3, "size": [18, 17], "draws": draws}
            yield inputs | {"called": f"_apply_op({name})"}, values(made)


def jitter():
    Image = module_at("PIL.Image")
    functional = module_at("torchvision.transforms.functional")
    for order in ([0.1, 0.5, 0.9], [0.9, 0.5, 0.1], [0.5, 0.9, 0.1]):
        image, factors = Image.fromarray(picture(4)), [0.1, 0.9, 0.6]
        for i, factor in zip(np.argsort(order), factors, strict=True):
            adjust = ("adjust_brightness", "adjust_contrast", "adjust_saturation")[i]
            image = getattr(functional, adjust)(image, 0.7 + 0.6 * factor)
        yield {"strength": 0.3, "seed": 4, "draws": [*order, *factors], "called": "adjust_*"}, values(image)


def erasing():
    torch, module = module_at("torch"), module_at("timm.data.random_erasing")
    H, W = 14, 10
    for seed, fill in ((1, "noise"), (2, "mean"), (3, "noise"), (4, "mean")):
        draws = np.random.default_rng(seed).integers(1, 1000, 60) / 1000
        if seed == 4:
            draws[0] = 0.9  # not erased
        module.random = Script(draws)
        module._get_pixels = lambda pixel, colour, size, dtype, device: torch.ones(size) * pixel
        image = torch.full((3, H, W), 2.0)
        mode = {"noise": "pixel", "mean": "const"}[fill]
        module.RandomErasing(0.5, mode=mode, device="cpu")(image)
        inputs = {"probability": 0.5, "fill": fill, "size": [H, W], "draws": draws.tolist()}
        yield inputs | {"called": "RandomErasing"}, image.numpy().transpose(1, 2, 0).astype(int).tolist()


def mixing():
    """A batch of four; timm's partner of a row is the one at the other end, ours the neighbour: rows are put so."""
    torch, module = module_at("torch"), module_at("timm.data.mixup")
    x = np.stack([picture(s, 8, 6) for s in range(4)]).astype(np.float32) / 255
    labels = [2, 0, 3, 2]
    for cut, lam, at in ((False, 0.3, (0, 0)), (True, 0.3, (2, 5)), (True, 0.81, (7, 0)), (True, 0.55, (4, 3))):
        draws = iter(at)
        mixup = module.Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=5)
        mixup._params_per_batch = lambda lam=lam, cut=cut: (lam, cut)
        module.np.random.randint = lambda low, high, size=None, draws=draws: next(draws)
        pairs = [0, 2, 3, 1]
        images, targets = mixup(torch.tensor(x[pairs].transpose(0, 3, 1, 2)), torch.tensor(labels)[pairs])
        back = np.argsort(pairs)
        images, targets = images.numpy().transpose(0, 2, 3, 1)[back], targets.numpy()[back]
        logits = np.random.default_rng(7).normal(size=(4, 5)).astype(np.float32)
        given, both = torch.tensor(logits), module_at("timm.loss")
        t = torch.tensor(targets)
        losses = {
            "softmax": both.SoftTargetCrossEntropy()(given, t),
            "sigmoid": both.BinaryCrossEntropy()(given, t),
            "both": both.BinaryCrossEntropy(target_threshold=0.05)(given, t),
        }
        yield (
            {"cut": cut, "lam": lam, "at": list(at), "labels": labels, "called": "Mixup"},
            {
                "images": np.round(images.astype(float), 7).tolist(),
                "targets": targets.astype(float).tolist(),
                "losses": {name: float(loss) for name, loss in losses.items()},
            },
        )


def main():
    packages = ("timm", "timm.data", "timm.layers", "timm.loss", "torchvision", "torchvision.transforms")
    for package in packages:  # not run: they import all models
        if spec := importlib.util.find_spec(package):
            sys.modules[package] = importlib.util.module_from_spec(spec)
    loss = module_at("timm.loss")
    loss.SoftTargetCrossEntropy = module_at("timm.loss.cross_entropy").SoftTargetCrossEntropy
    loss.BinaryCrossEntropy = module_at("timm.loss.binary_cross_entropy").BinaryCrossEntropy
    recorders = (timm_augment, torchvision_augment, jitter, erasing, mixing)
    libraries = {name: version(name) for name in ("timm", "torchvision", "torch", "pillow")}
    lines = [f'"libraries": {json.dumps(libraries)}']
    for recorder in recorders:
        entries = [json.dumps({"inputs": inputs, "values": found}) for inputs, found in recorder()]
        lines.append(f'"{recorder.__name__}": [\n' + ",\n".join(entries) + "\n]")
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{OUT.stat().st_size:,} bytes in {OUT}")


if __name__ == "__main__":
    main()
