"""A small language model on whole Wikipedia articles, and how it fares beyond its training length.

Command: python3 -m jojax.train --config configs/quickstart.py
Table: none; the scaled-down question of JoFormer's length experiment (train at 128, read at 128 … 1,024)
Expected: see README. After three minutes every ratio is still near 1; what separates the encodings, longer training,
    is in configs/length_extrapolation.py
Cost: about 3 minutes on 2 CPU cores
Arguments: encoding=NAME, seed=N, smoke
"""

from configs import common


def get_config(arg=None):
    arg = common.parse(arg)
    c = common.lm(length=128, vocab=2048)
    c.steps, c.batch_size = 350, 16
    c.optim.lr, c.optim.warmup_steps = 2e-3, 50
    c.optim.encoding_lr = 0.1 if common.content_angles(arg.encoding or "jo_projected") else 1.0
    c.checkpoint.every_steps, c.log.every_steps = 175, 25
    c.eval.lengths, c.eval.document_tokens = (128, 256, 512, 1024), 4096
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.eval.lengths = 4, 1, (128, 256)
    return common.finish(c, arg, "jo_projected")


def sweep():
    for encoding in ("rope", "alibi", "jo_fixed", "jo_projected"):
        yield {"arg": f"encoding={encoding}"}
