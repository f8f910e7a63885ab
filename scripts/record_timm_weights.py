"""Logits of timm's vision transformers at tiny sizes, for tests/test_convert.py, beside
scripts/record_public_values.py: the library is called, none of its code is here.

    public/bin/pip install torch numpy && public/bin/pip install --no-deps timm torchvision
    public/bin/python scripts/record_timm_weights.py

An entry of tests/timm_weights.json holds the factory that was called, its options, the names and shapes of the state
dict and the logits. The weights themselves and the images are `weights` and `images`, drawn from a seed, exact in
float32. All runs in float64, but for frequencies and angles, which timm has in float32. Neither jojax nor JAX is
imported.
"""

import importlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "timm_weights.json"

SIZES: dict[str, Any] = dict(img_size=(8, 9), patch_size=(2, 3), embed_dim=24, depth=2, num_heads=2, num_classes=5)
VIT, DEIT3, EVA = "vision_transformer:vit_tiny_patch16_224", "deit:deit3_small_patch16_224", "eva:vit_small_patch16_"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ape": (VIT, {}),
    "ape_mean": (VIT, {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "ape_layer_scale": (DEIT3, {}),
    "axial": (EVA + "rope_224", {}),
    "axial_rows_first": (EVA + "rope_224", {"rope_grid_indexing": "ij"}),
    "axial_ape": (EVA + "rope_ape_224", {}),
    "mixed": (EVA + "rope_mixed_224", {}),
    "mixed_separate": (EVA + "rope_mixed_224", {"qkv_fused": False}),
    "mixed_no_key_bias": (EVA + "rope_mixed_224", {"attn_type": "eva"}),
    "mixed_ape": (EVA + "rope_mixed_ape_224", {}),
}


def weights(shapes, seed=1):
    """{name: float32} of {name: shape}: multiples of 1/64 from −¼ to ¼, gains around one."""
    rng, out = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        gain = len(shape) == 1 and "bias" not in name
        out[name] = (gain + rng.integers(-16, 17, shape) / 64).astype(np.float32)
    return out


def images(seed=2):
    """[2, height, width, 3] in eighths from −2 to 2."""
    return np.random.default_rng(seed).integers(-16, 17, (2, *SIZES["img_size"], 3)) / 8


def factory(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"timm.models.{module}"), name)


def entry(called, options):
    torch: Any = importlib.import_module("torch")
    model = factory(called)(**SIZES, **options).double().eval()
    shapes = {name: list(t.shape) for name, t in model.state_dict().items()}
    model.load_state_dict({name: torch.tensor(t, dtype=torch.float64) for name, t in weights(shapes).items()})
    with torch.no_grad():
        logits = model(torch.tensor(images()).permute(0, 3, 1, 2))
    return {"called": called, "options": options, "shapes": shapes, "logits": logits.tolist()}


def main():
    for package in ("timm", "timm.data", "timm.models", "torchvision", "torchvision.models"):
        # not run: they import all models, and what torch of another build refuses
        if spec := importlib.util.find_spec(package):
            sys.modules[package] = importlib.util.module_from_spec(spec)
    vars(sys.modules["timm"])["__version__"] = version("timm")
    constants = vars(importlib.import_module("timm.data.constants"))
    vars(sys.modules["timm.data"]).update({name: value for name, value in constants.items() if name.isupper()})
    lines = [f'"libraries": {json.dumps({name: version(name) for name in ("timm", "torch")})}']
    lines += [f"{json.dumps(name)}: {json.dumps(entry(*model))}" for name, model in MODELS.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(MODELS)} models, {OUT.stat().st_size:,} bytes in {OUT}")


if __name__ == "__main__":
    main()
