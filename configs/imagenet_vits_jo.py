"""ImageNet-1K, ViT-S/16 at 224², JoFormer-fixed: axial frames through which values travel too.

Command: python3 -m jojax.train --config configs/imagenet_vits_jo.py --config.data.path=DIR
Table: JoFormer, table 2
Expected: top-1 / top-5 81.11 / 95.53 after 300 epochs, +0.40 / +0.27 over RoPE-2D (one seed)
Cost: as configs/imagenet_vits.py, plus about a quarter uncompiled (author: 1,020 s an epoch against 790 s)
Arguments and deviations: as configs/imagenet_vits.py
"""

from configs import imagenet_vits

MARGINS = imagenet_vits.MARGINS


def get_config(arg=None):
    return imagenet_vits.get_config(arg, encoding="rope_axial_qkv")


def sweep():
    for seed in range(5):
        for encoding in ("rope_axial", "rope_axial_qkv"):
            yield {"arg": f"encoding={encoding},seed={seed}"}
