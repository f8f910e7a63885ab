"""ImageNet-1K, ViT-S/16 at 224², 2-D rotary baseline (axial, base 100, queries and keys only).

Command: python3 -m jojax.train --config configs/imagenet_vits.py --config.data.path=DIR
    DIR: a folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or with data.source=tfds a TFDS data_dir
Table: JoFormer, table 2 (ViT-S, JoFormer against RoPE-2D)
Expected: top-1 / top-5 80.71 / 95.26 after 300 epochs (one seed; the author's mid-run note calls the pair tied)
Cost: 375,000 steps of 1,024 images, 22 M parameters; the author took 790 s an epoch in float16,
    about 66 hours
Arguments: recipe=jo|deit3, encoding=NAME, seed=N, smoke
    deit3: DeiT-III's as RoPE for vision transformers has it (ViT-S, 400 epochs, top-1 at 224 / 384: APE 80.4 / 79.4,
    rope_axial 80.9 / 80.0, rope_mixed 80.9 / 81.8)
Deviations: dropout .1 is on attention weights and projections there; here it is on the embedding and the outputs of
    attention and MLP. bfloat16 for float16. RandAugment is torchvision's, which the notes do not name. deit3: 2,016
    images a step for 2,048, so that an example's three copies fit; one pass over a new third of the examples an epoch
"""

from configs import common

MARGINS = {"accuracy": 0.5, "top5": 0.3, "gain": 0.2}  # declared before any run: results/README.md

IMAGES = 1_281_167


def get_config(arg=None, encoding="rope_axial", **defaults):
    arg = common.parse(arg, **(dict(recipe="jo") | defaults))
    if arg.recipe not in ("jo", "deit3"):
        raise ValueError(f"recipe={arg.recipe}: choose jo or deit3")
    c = common.vit(source="folder", path="data/imagenet", classes=1000, image_size=224, crop="inception")
    c.data.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    c.data.name = "imagenet2012"
    c.data.augment.update(mixup=0.8, cutmix=1.0)
    c.model.update(width=384, depth=12, heads=6, patch=16, eps=1e-6)
    c.dtype = "bfloat16"
    if arg.recipe == "jo":
        c.batch_size, epochs = 1024, 300
        c.model.update(dropout=0.1, drop_path=0.1)
        c.data.label_smoothing = 0.1
        c.data.augment.update(rand="torchvision-m9-n2", erase=0.25)
        c.optim.update(lr=1e-3, weight_decay=0.05, clip=0.0)
    else:
        deit3(c)
        epochs = 400
    epoch = IMAGES // c.batch_size
    c.steps, c.optim.warmup_steps = epochs * epoch, 5 * epoch
    c.eval.every_steps, c.checkpoint.every_steps, c.log.every_steps = 10 * epoch, epoch, 100
    c.eval.batch_size = 256
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.batch_size, c.eval.batch_size = 3, 1, 24, 8
    return common.finish(c, arg, encoding)


def deit3(c):
    """DeiT III, arXiv 2204.07118, for ViT-S; FusedLAMB clips at 1 by itself."""
    c.batch_size = 2016
    c.model.layer_scale = 1e-4
    c.data.update(loss="sigmoid", mixed_targets="both", crop_ratio=1.0)
    c.data.augment.update(three=True, jitter=0.3, repeat=3)
    c.optim.update(name="lamb", lr=4e-3, weight_decay=0.03, clip=1.0, end_lr_fraction=1e-5 / 4e-3)


def sweep():
    for encoding in ("learned", "rope_axial", "rope_mixed"):
        yield {"arg": f"recipe=deit3,encoding={encoding}"}
    for encoding in ("learned", "rope_axial", "rope_axial_qkv", "rope_mixed", "rope_mixed_qkv"):
        yield {"arg": f"encoding={encoding}"}
