"""The questions of the papers' tables at the size of a desk: one table of small runs each, on real data.

Command: python3 scripts/sweep.py --config configs/scaled_down.py
    data/ holds eltec_eng_{train,valid}.jsonl.xz (scripts/prepare_data.py eltec_eng) and cifar10_jpeg/{train,test}/
    <class>/*.jpg, all of CIFAR-10 as JPEG files, which no script here makes; the lossless images, of prepare_data.py
    cifar10, are another data set: --config.data.source=tfds --config.data.name=cifar10 --config.data.path=data/tfds
Table: none of the papers'. `table=` novels: length extrapolation (JoFormer, table 4); rates: which rate each encoding
    wants there; staged: the same from jo_fixed to jo_projected; values: value rotation in vision (JoFormer, table 1);
    resolutions: ComRoPE's table 1; wikipedia: JoFormer's table 3; grape: GRAPE's tables 1 and 2; plane: the models
    of scripts/draw_plane.py
Expected: nothing is published at this scale: what is found stands in results/; never in one table with a paper's rows
Cost: 2 to 15 minutes a run on 2 CPU cores, about six hours in all
Arguments: table=NAME, encoding=NAME, lr=X (novels, rates), seed=N, smoke
"""

from configs import common
from configs.encodings import preset

EXTRAPOLATION = ("rope", "jo_projected", "alibi", "jo_fixed", "jo_projected_pointwise", "jo_random")
RATES = (3e-3, 6e-3, 1.2e-2)
TRIED = {"jo_projected": (1.5e-3, *RATES)}  # where the best of RATES stands at their rim, a neighbour too
# of RATES, by the loss on the valid split after a third of the steps, seed 0: results/scaled_down-table=rates.md
CHOSEN = dict(rope=6e-3, jo_projected=3e-3, alibi=6e-3, jo_fixed=6e-3, jo_projected_pointwise=6e-3, jo_random=6e-3)
SWEEPS = {  # table: encodings, seeds
    "resolutions": (("ape_grid", "rope_unit10k", "liere_comrope", "comrope_ap", "comrope_ld"), 1),
    "wikipedia": (("sinusoidal", "rope", "jo_fixed", "jo_learned", "jo_projected_wiki"), 1),
    "plane": (("none", "rope", "jo_fixed", "jo_projected", "fox", "recurrence"), 1),
    "staged": (("jo_fixed", "jo_projected"), 1),
    "grape": (("rope", "alibi", "fox", "grape_m_freq", "grape_a_qk", "grape_ap_strict"), 1),
    "values": (("rope_axial_qk", "rope_axial_qkv", "rope_axial_learned_qk", "rope_axial_learned_qkv"), 3),
}


def get_config(arg=None):
    arg = common.parse(arg, table="novels", lr=0.0)
    if arg.table not in MAKE:
        raise ValueError(f"table={arg.table}: choose from {', '.join(MAKE)}")
    c = MAKE[arg.table](arg)
    if arg.smoke:
        c.steps, c.optim.warmup_steps, c.batch_size, c.stages = 4, 1, 4, ()
    return common.finish(c, arg, "rope_axial_qkv" if c.model.kind == "vit" else "jo_projected")


def novels(arg):
    """Trained at 256 tokens, read at up to 8,192: two windows of 8,192 from each of the 10 held-out novels."""
    paths = {f"{split}_path": f"data/eltec_eng_{split}.jsonl.xz" for split in ("train", "valid")}
    c = common.lm(source="text", **paths, length=256, vocab=2048)
    c.model.update(width=128, depth=2, heads=4)
    c.steps, c.batch_size = 1000, 16
    c.optim.lr, c.optim.warmup_steps = arg.lr or CHOSEN.get(arg.encoding, 6e-3), 100
    c.optim.encoding_lr = 0.1 if common.content_angles(arg.encoding or "jo_projected") else 1.0
    c.log.every_steps, c.checkpoint.every_steps = 50, 250
    c.eval.document_tokens, c.eval.lengths = 16_384, (256, 512, 1024, 2048, 4096, 8192)
    return c


def rates(arg):
    c = novels(arg)
    c.steps, c.eval.lengths, c.eval.document_tokens = 333, (), 8192
    return c


def staged(arg):
    """The author's three rates and fresh moments, three times as high; the projected model takes over at the last."""
    c = novels(arg)
    c.optim.update(warmup_steps=0, schedule="constant")
    first = {"steps": 500, "lr": 1.5e-3, "encoding_lr": 1.0, "encoding": {"preset": "jo_fixed", **preset("jo_fixed")}}
    second = first | {"steps": 250, "lr": 6e-4, "reset_optimizer": True}
    last = {"steps": 250, "lr": 1.5e-4, "encoding_lr": 1.0, "reset_optimizer": True}
    c.stages = (first, second, last)
    return c


def grape(arg):
    """GRAPE's block on the novels: RMSNorm, SwiGLU, tied, no biases, QK-norm before the rotation."""
    c = novels(arg)
    c.model.update(mlp="swiglu", mlp_ratio=8 / 3, norm="rmsnorm", bias=False, tied=True, head_bias=False)
    c.model.qk_norm = "before"
    c.data.length, c.batch_size, c.steps, c.optim.encoding_lr = 512, 8, 700, 1.0
    c.eval.lengths = (512, 1024, 2048)
    return c


def wikipedia(arg):
    """On 95 whole articles, which every model here learns by heart if it is trained for long."""
    c = common.lm(length=64, vocab=2048)
    c.model.update(width=128, depth=2, heads=2, dropout=0.2)
    c.steps, c.batch_size = 1000, 32
    c.optim.update(lr=1e-3, warmup_steps=100, weight_decay=0.01)
    c.log.every_steps, c.checkpoint.every_steps = 50, 250
    return c


def plane(arg):
    """On the novels; encoding=recurrence has a gated linear recurrence in attention's place."""
    recurrent = arg.encoding == "recurrence"
    if recurrent:
        arg.encoding = "none"
    c = novels(arg)
    c.steps, c.eval.lengths, c.eval.document_tokens, c.data.length = 700, (), 8192, 128
    c.model.mixer = "recurrence" if recurrent else "attention"
    return c


def values(arg):
    c = common.vit(source="folder", path="data/cifar10_jpeg", name="cifar10_jpeg", classes=10, crop="pad4")
    c.model.update(width=64, depth=4, heads=2, patch=4)
    c.steps, c.batch_size = 2500, 64
    c.optim.update(lr=2e-3, warmup_steps=200, weight_decay=0.05)
    c.log.every_steps, c.checkpoint.every_steps = 100, 500
    return c


def resolutions(arg):
    """Trained at 32 pixels, a patch 4; read at other sizes, and with all coordinates moved by up to ten patches."""
    c = values(arg)
    c.model.heads = 4  # of 16 channels: one block of 8 an axis
    c.eval.resolutions = (16, 24, 32, 48, 64)
    if arg.encoding != "ape_grid":  # a table has no answer outside itself
        c.eval.offsets = (0.0, 0.5, 10.0)
    return c


MAKE = {"novels": novels, "rates": rates, "staged": staged, "grape": grape, "wikipedia": wikipedia, "values": values}
MAKE |= {"resolutions": resolutions, "plane": plane}


def sweep():
    for encoding in EXTRAPOLATION:
        for lr in TRIED.get(encoding, RATES):
            yield {"arg": f"table=rates,encoding={encoding},lr={lr:g}"}
    for seed in range(3):
        for encoding in EXTRAPOLATION:
            yield {"arg": f"table=novels,encoding={encoding},seed={seed}"}
    for table, (encodings, seeds) in SWEEPS.items():
        for seed in range(seeds):
            for encoding in encodings:
                yield {"arg": f"table={table},encoding={encoding},seed={seed}"}
