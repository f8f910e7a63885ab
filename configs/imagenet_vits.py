"""ImageNet-1K, ViT-S/16 at 224², 2-D rotary baseline (axial, base 100, queries and keys only).

Command: python3 -m jojax.train --config configs/imagenet_vits.py --config.data.path=DIR
    DIR: a folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or with data.source=tfds a TFDS data_dir
Table: JoFormer, table 2 (ViT-S, JoFormer against RoPE-2D)
Expected: top-1 / top-5 80.71 / 95.26 after 300 epochs (one seed; the author's mid-run note calls the pair tied)
Cost: 375,000 steps of 1,024 images, 22 M parameters; the author took 790 s an epoch in float16,
    about 66 hours
Arguments: encoding=NAME, seed=N, smoke
Deviations: inception crop and flip only; the published recipe adds RandAugment(2, 9), mixup .8, cutmix 1.0 and random
    erasing .25, so expect lower figures. Its dropout .1 is on attention weights and projections; here it is on the
    embedding and the outputs of attention and MLP. bfloat16 for float16.
"""

from configs import common


def get_config(arg=None, encoding="rope_axial"):
    arg = common.parse(arg)
    c = common.vit(source="folder", path="data/imagenet", classes=1000, image_size=224, crop="inception")
    c.data.update(valid_split="val", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), label_smoothing=0.1)
    c.data.name = "imagenet2012"
    c.model.update(width=384, depth=12, heads=6, patch=16, dropout=0.1, drop_path=0.1, eps=1e-6)
    c.batch_size, c.dtype = 1024, "bfloat16"
    epoch = 1_281_167 // c.batch_size
    c.steps = 300 * epoch
    c.optim.update(lr=1e-3, weight_decay=0.05, warmup_steps=5 * epoch, clip=0.0)
    c.eval.every_steps, c.checkpoint.every_steps, c.log.every_steps = 10 * epoch, epoch, 100
    c.eval.batch_size = 256
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.batch_size, c.eval.batch_size = 3, 1, 8, 8
    return common.finish(c, arg, encoding)


def sweep():
    for encoding in ("learned", "rope_axial", "rope_axial_qkv", "rope_mixed", "rope_mixed_qkv"):
        yield {"arg": f"encoding={encoding}"}
