"""A small vision transformer on Fashion-MNIST, with and without value rotation.

Command: python3 -m jojax.train --config configs/quickstart_vit.py
Table: none; the scaled-down question of JoFormer's CIFAR-100 table (do rotated values help?)
Expected: top-1 above .817, a logistic regression's figure on the same 5,000 + 1,000 images
Cost: about a minute and a half on 2 CPU cores
Arguments: encoding=NAME, seed=N, smoke
"""

from configs import common


def get_config(arg=None):
    arg = common.parse(arg)
    c = common.vit(source="fashion_mnist", image_size=28, classes=10, crop="none", flip=True)
    c.model.update(width=96, depth=3, heads=4, patch=7, pool="cls")
    c.steps, c.batch_size = 900, 64
    c.optim.lr, c.optim.warmup_steps, c.optim.weight_decay = 2e-3, 50, 0.05
    c.checkpoint.every_steps, c.log.every_steps = 200, 25
    if arg.smoke:
        c.steps, c.optim.warmup_steps = 4, 1
    return common.finish(c, arg, "rope_axial_qkv")


def sweep():
    for encoding in ("rope_axial", "rope_axial_qkv"):
        yield {"arg": f"encoding={encoding}"}
