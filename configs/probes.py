"""What perplexity does not show: passkey, associative recall and copying, learned at 64 tokens and asked at up to 512.

Command: python3 -m jojax.train --config configs/probes.py:probe=recall,encoding=jo_projected
Table: none of the papers'. Of a ratio of perplexities near 1 they leave open whether far tokens are used at all
Expected: nothing is published for these sizes
Cost: 2 to 4 minutes on 2 CPU cores
Arguments: probe=passkey|recall|copy, encoding=NAME, seed=N, smoke
"""

from configs import common

ENCODINGS = ("none", "rope", "jo_fixed", "jo_projected", "alibi", "fox", "grape_ap_strict")


def get_config(arg=None):
    arg = common.parse(arg, probe="passkey")
    c = common.lm(source="probe", name=arg.probe, tokenizer="", vocab=64, length=64)
    c.model.update(width=64, depth=2, heads=2)
    c.steps, c.batch_size = 3000, 64
    c.optim.update(lr=2e-3, warmup_steps=200, weight_decay=0.01)
    c.optim.encoding_lr = 0.1 if common.content_angles(arg.encoding or "jo_projected") else 1.0
    c.log.every_steps, c.checkpoint.every_steps, c.eval.batch_size = 100, 500, 64
    c.eval.lengths = (64, 128, 256, 512)
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.batch_size = 4, 1, 4
    return common.finish(c, arg, "jo_projected")


def sweep():
    for probe in ("passkey", "recall", "copy"):
        for encoding in ENCODINGS:
            yield {"arg": f"probe={probe},encoding={encoding}"}
