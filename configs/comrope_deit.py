"""ImageNet-1K, ViT-S/16 under DeiT-III's recipe, read at 128 … 512: ComRoPE against RoPE-Mixed.

Command: python3 -m jojax.train --config configs/comrope_deit.py:encoding=comrope_ld --config.data.path=DIR
Table: ComRoPE, table 10 (the recipe of RoPE for vision transformers)
Expected: top-1 at 128 / 224 / 384 / 512: rope_mixed 68.99 / 81.42 / 82.11 / 78.39, comrope_ap 68.48 / 82.01 / 81.65 /
    79.75, comrope_ld 69.88 / 81.78 / 82.32 / 78.97 (one run each)
Cost: as configs/imagenet_vits.py with recipe=deit3, 400 epochs
Arguments: as configs/imagenet_vits.py, recipe deit3
Deviations: size of the model, epochs and coordinates are unstated there; ours are ViT-S, 400 and each encoding's own.
"""

from configs import imagenet_vits

MARGINS = {"accuracy": 0.5}  # declared before any run: results/README.md

RESOLUTIONS = (128, 192, 224, 256, 320, 384, 448, 512)


def get_config(arg=None):
    c = imagenet_vits.get_config(arg, encoding="comrope_ld", recipe="deit3")
    c.eval.resolutions = RESOLUTIONS if c.steps > 3 else (128,)
    return c


def sweep():
    for encoding in ("rope_mixed", "comrope_ap", "comrope_ld"):
        yield {"arg": f"encoding={encoding}"}
