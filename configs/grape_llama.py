"""Llama-like language models on FineWeb-Edu: rotations, ALiBi, FoX and GRAPE, with and without KV-shift.

Command: python3 -m jojax.train --config configs/grape_llama.py:size=medium,encoding=fox --config.data.path=DIR
    DIR: python3 scripts/prepare_data.py fineweb_edu FILES --out DIR --tokenizer GPT2 --valid 0.001, where FILES is the
    folder of sample-100BT's parquet and GPT2 that of GPT-2's vocab.json and merges.txt
Table: GRAPE, tables 1 (353M) and 2 (770M), and figures 2 and 3
Expected: validation loss at 49.15 G tokens, read off the figures, medium: rope 2.556, alibi 2.541, fox 2.562, grape_ap
    2.571; large: 2.410, 2.434, 2.407, 2.444 (one run each; jumps of .02 to .05 between evaluations, so no order)
Cost: 25,000 steps of 480 × 4,096 tokens; 353 M or 772 M parameters
Arguments: size=medium|large, form=official|paper|relative, kv_shift, encoding=NAME, seed=N, smoke
    official: the released code: QK-norm after the rotation, decay on all but norms, lr 1e-3; its GRAPE-AP is
    grape_ap_official. paper: where the text differs: lr 2e-3 at medium, and grape_ap, whose queries are normalised.
    relative: ours, as paper but with what keeps the relative law: QK-norm before the rotation, no decay on position
    parameters, grape_ap_strict
Deviations: all matrices start from N(0, (.5/√C)²), the tied embedding too, and outputs are not scaled down by depth.
    Rows are whole windows of packed documents that do not see each other; there they do. Evaluation scores the whole
    valid split. Micro-batches: --config.optim.accumulate.
"""

from configs import common

MARGINS = {"loss": 0.02, "lm_eval": 1.0, "parameters": "1%"}  # declared before any run: results/README.md

SIZES = {"medium": (1024, 24, 8, 2730), "large": (1280, 36, 10, 3413)}
PATH = {"official": "grape_ap_official", "paper": "grape_ap", "relative": "grape_ap_strict"}
SHIFTED = ("rope", "alibi", "fox", "grape_ap_official")


def get_config(arg=None):
    arg = common.parse(arg, size="medium", form="official", kv_shift=False)
    if arg.size not in SIZES or arg.form not in PATH:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, form one of {', '.join(PATH)}")
    width, depth, heads, hidden = SIZES[arg.size]
    c = common.lm(**common.shards("fineweb_edu"), length=4096, vocab=50_304)
    c.model.update(width=width, depth=depth, heads=heads, mlp="swiglu", mlp_ratio=hidden / width, norm="rmsnorm")
    c.model.update(bias=False, tied=True, head_bias=False, kv_shift=arg.kv_shift, init_std=0.5 / width**0.5, remat=True)
    c.model.qk_norm = "before" if arg.form == "relative" else "after"
    c.steps, c.batch_size, c.dtype = 25_000, 480, "bfloat16"
    lr = 2e-3 if arg.size == "medium" and arg.form != "official" else 1e-3
    c.optim.update(lr=lr, end_lr_fraction=3e-5 / lr, warmup_steps=2000, b2=0.95, weight_decay=0.01)
    c.optim.encoding_decay = arg.form != "relative"
    c.eval.every_steps, c.checkpoint.every_steps, c.log.every_steps = 1000, 500, 20
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.batch_size, c.data.length = 4, 1, 4, 128
    return common.finish(c, arg, PATH[arg.form])


def sweep():
    common_ones = ("rope", "grape_m_freq", "grape_m_ctx", "alibi", "fox")
    for size, more in (("medium", ("grape_a_k", "grape_a_q", "grape_a_qk")), ("large", ())):
        for form, path in PATH.items():
            for encoding in (*common_ones, *more, path):
                yield {"arg": f"size={size},form={form},encoding={encoding}"}
        for encoding in SHIFTED:
            yield {"arg": f"size={size},kv_shift,encoding={encoding}"}
