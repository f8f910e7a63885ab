"""Fine-tuning on ImageNet-1K from a checkpoint without rotation: angles start at zero, its table of positions stays.

Command: python3 -m jojax.train --config configs/comrope_finetune.py:encoding=comrope_ld --config.data.path=DIR
    starts from init=WORKDIR; by default that of configs/comrope_vitb.py:encoding=learned, or for size=384 what
    scripts/resize_checkpoint.py makes of it, runs/comrope_vitb-encoding=learned-384
Table: ComRoPE, table 4 (a CLIP model fine-tuned for four epochs), at 224 and 384
Expected: top-1 from CLIP's weights, which these are not: learned 79.91, rope_unit10k 79.82, liere_comrope
    80.12, comrope_ap 80.11, comrope_ld 80.17. What must hold: at step 0 all but rope_unit10k score what the
    checkpoint scores
Cost: 1,483 steps of 3,456 images, 86 M parameters; about an hour and a half on 4 A800 at 224 (estimate)
Arguments: size=224|384, init=DIR, encoding=learned|comrope_ap|comrope_ld|liere_comrope|rope_unit10k, seed=N, smoke
Deviations: CLIP's size, the resolution and whether its table stayed are unstated; ours is ViT-B/16 and stays.
    rope_unit10k turns from the first step on, so it does not start at the checkpoint's accuracy. No schedule is stated:
    cosine, as from scratch
"""

from configs import common, comrope_vitb
from configs.encodings import preset
from configs.imagenet_vits import IMAGES

MARGINS = {"accuracy": 0.5}  # declared before any run: results/README.md

ROTATIONS = ("comrope_ap", "comrope_ld", "liere_comrope", "rope_unit10k")


def get_config(arg=None):
    arg = common.parse(arg, size=224, init="", encoding="comrope_ld")
    if arg.size not in (224, 384) or arg.encoding not in ("learned", *ROTATIONS):
        raise ValueError(f"size must be 224 or 384, encoding one of learned, {', '.join(ROTATIONS)}")
    c = comrope_vitb.get_config(f"encoding=learned,seed={arg.seed}" + ",smoke" * arg.smoke)
    if arg.encoding in ROTATIONS:
        start = {} if arg.encoding == "rope_unit10k" else {"angle_init": "zero"}
        both = {"name": "joint", "rotation": preset(arg.encoding) | start, "bias": preset("learned")}
        c.encoding = {"preset": f"{arg.encoding}+learned", **both}
    c.data.image_size, c.init_from = arg.size, arg.init
    if not (arg.init or arg.smoke):
        c.init_from = "runs/comrope_vitb-encoding=learned" + "-384" * (arg.size == 384)
    c.eval.resolutions = ()  # the table is of one grid
    if not arg.smoke:
        c.batch_size = 3456
        epoch = IMAGES / c.batch_size
        c.steps = round(4 * epoch)
        c.eval.every_steps = c.checkpoint.every_steps = round(epoch)
        c.optim.update(lr=3e-4, warmup_steps=round(0.02 * c.steps))
    return c


def sweep():
    for size in (224, 384):
        for encoding in ("learned", *ROTATIONS):
            yield {"arg": f"size={size},encoding={encoding}"}
