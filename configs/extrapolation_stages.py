"""Length extrapolation at equal budgets: the three falling rates, or one rate for the model of one layer.

Command: python3 -m jojax.train --config configs/extrapolation_stages.py:encoding=jo_projected --config.data.path=DIR
    DIR: token shards of OpenWebText, 32,000 tokens
Table: JoFormer, table 4, with the budgets made equal (200K steps at 5e-4, 2e-4, 5e-5)
Expected: from the author's notes, PPL at 512 / 4,096, owt16: jo_fixed 23.18 / 128.37, rope 23.54 / 223.16, alibi
    24.06 / 22.11, jo_random_qk 24.21 / 26.00, jo_lf_qk 24.79 / 21.92, jo_projected 25.55 / 26.01,
    jo_projected_qk 30.61 / 31.36 (from RoPE; by its level a run of fewer steps: our inference). one_layer, plan=single,
    512 / 8,192: rope 78.58 / 253.67, jo_fixed 78.40 / 286.88, jo_projected_qk 73.82 / 80.20, jo_projected 73.81 / 76.10
Cost: as configs/length_extrapolation.py
Arguments: as configs/length_extrapolation.py, size owt16, plan published
Deviations: as there; every encoding resets its moments at the boundaries, so that budgets are equal in that too.
"""

from configs import length_extrapolation

MARGINS = length_extrapolation.MARGINS

EQUAL = ("rope", "rope_matched", "jo_fixed", "alibi", "fox", "jo_random_qk", "jo_random", "jo_lf_qk", "jo_pemb_qk")
EQUAL = (*EQUAL, "jo_projected", "jo_projected_qk")
ONE_LAYER = ("rope", "jo_fixed", "jo_projected_qk", "jo_projected", "jo_projected_pointwise", "alibi", "fox")


def get_config(arg=None):
    return length_extrapolation.get_config(arg, size="owt16", plan="published")


def sweep():
    for encoding in EQUAL:
        yield {"arg": f"size=owt16,encoding={encoding}"}
    for seed in range(3):
        for encoding in EQUAL:
            yield {"arg": f"size=c128,encoding={encoding},seed={seed}"}
        for encoding in (*ONE_LAYER, "jo_random_qk", "jo_random"):
            yield {"arg": f"size=one_layer,plan=single,encoding={encoding},seed={seed}"}
