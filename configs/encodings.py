"""Presets: the papers' row names -> `config.encoding`. A rotary preset also answers to NAME_qk, NAME_qkv and NAME_v;
ROTARY+BIAS, such as jo_projected+fox, takes the frames of one and the bias of the other.

Aliases (the same mapping, tested): jo_fixed = rope_qkv, jo_fixed_qk = rope, rope_axial_learned_qkv is JoFormer's
"axial learned" vision row. `rope_matched` is rope with an MLP widened to jo_projected's parameter count
(`model.match_jo_projected`).
JoFormer's vision families: axial fixed = rope_axial, axial learned (per layer) = rope_axial_learned(_per_layer),
combined fixed = rope_mixed_fixed, combined learned (per layer) = rope_mixed_learned(_per_layer). `rope_mixed` is the
RoPE-Mixed of its own paper. `liere_comrope` is LieRE as ComRoPE's authors re-implemented it, `liere` that of its own
paper and code.
"""

_ROPE = {"name": "rope", "transport": "qk"}
_JO = {"name": "joformer", "transport": "qkv"}
_AXIAL = {**_ROPE, "form": "axial", "pairing": "interleaved"}
_MIXED = {**_ROPE, "form": "mixed", "pairing": "interleaved"}
_LEARNED = {"learned": True, "freq_init": "normal"}
_GRID = {"angle_source": "own_mlp", "form": "axial", "pairing": "interleaved", "base": 100.0}
_NOISE = {"angle_noise": True, "angle_base": "zero", "angle_init": "normal"}

PRESETS = {
    "none": {"name": "none"},
    "sinusoidal": {"name": "absolute", "kind": "sinusoidal"},
    "sincos2d": {"name": "absolute", "kind": "sincos2d"},
    "learned": {"name": "absolute", "kind": "learned"},
    "ape_grid": {"name": "ape_grid"},
    "alibi": {"name": "grape_a", "gate": "alibi"},
    "grape_a_k": {"name": "grape_a", "gate": "k"},
    "grape_a_q": {"name": "grape_a", "gate": "q"},
    "grape_a_qk": {"name": "grape_a", "gate": "qk"},
    "alibi_2d": {"name": "relative", "kind": "alibi"},
    "t5_bias": {"name": "relative", "kind": "t5", "share_layers": True},
    "kerple": {"name": "relative", "kind": "kerple"},
    "fire": {"name": "relative", "kind": "fire"},
    "rel_bias_2d": {"name": "relative", "kind": "table"},
    "fox": {"name": "fox"},
    "grape_m_plane": {"name": "grape_m", "transport": "qk", "kind": "plane"},
    "grape_m_freq": {"name": "grape_m", "transport": "qk", "kind": "freq"},
    "grape_m_basis": {"name": "grape_m", "transport": "qk", "kind": "basis"},
    "grape_m_2d": {"name": "grape_m", "transport": "qk", "kind": "basis", "form": "mixed", "base": 10.0},
    "grape_m_mix": {"name": "grape_m", "transport": "qk", "kind": "mix"},
    "grape_m_ctx": {"name": "grape_m", "transport": "qk", "kind": "ctx"},
    "grape_ap": {"name": "grape_ap", "rotate": "key"},
    "grape_ap_official": {"name": "grape_ap", "rotate": "key", "query_norm": False},
    "grape_ap_strict": {"name": "grape_ap"},
    "grape_ap_quad": {"name": "grape_ap", "link": "quad"},
    "rope": _ROPE,
    "rope_matched": _ROPE,
    "rope_integer": {**_ROPE, "freq": "integer", "pairing": "interleaved"},
    "rope_partial": {**_ROPE, "fraction": 0.75},
    "rope_yarn": {**_ROPE, "scale_method": "yarn", "scale_factor": 8.0},
    "rope_axial": {**_AXIAL, "base": 100.0},
    "rope_axial_learned": {**_AXIAL, **_LEARNED, "angle_share_layers": True},
    "rope_axial_learned_per_layer": {**_AXIAL, **_LEARNED},
    "rope_mixed": {**_MIXED, "base": 10.0, "learned": True},
    "rope_mixed_fixed": {**_MIXED, "base": 10.0},
    "rope_mixed_learned": {**_MIXED, **_LEARNED, "angle_share_layers": True},
    "rope_mixed_learned_per_layer": {**_MIXED, **_LEARNED},
    "rope_unit10k": {**_AXIAL, "coord": "unit_center", "cls_pos": "center"},
    "comrope_ap": {"name": "comrope", "transport": "qk", "partition": "ap"},
    "comrope_ld": {"name": "comrope", "transport": "qk", "partition": "ld"},
    "liere": {"name": "liere", "transport": "qk"},
    "liere_comrope": {
        "name": "liere",
        "transport": "qk",
        "coord": "unit_center",
        "cls_pos": "center",
        "triangle": False,
        "angle_init": "normal",
    },
    "xpos": {"name": "xpos", "transport": "qk"},
    "jo_fixed": {**_ROPE, "transport": "qkv"},
    "jo_learned": {**_ROPE, "transport": "qkv", "learned": True, "angle_share_heads": True},
    "jo_token": {
        **_JO,
        "angle_source": "token_table",
        "angle_share_layers": True,
        "angle_bound": "none",
        "angle_base": "zero",
        "angle_init": "normal",
    },
    "jo_pemb": {**_JO, "angle_source": "token_table"},
    "jo_projected": {**_JO, "angle_source": "ffn_flow"},
    "jo_projected_pointwise": {**_JO, "angle_source": "ffn_flow", "accumulate": "none", "angle_base": "zero"},
    "jo_projected_mlp": {**_JO, "angle_source": "own_mlp"},
    "jo_projected_wiki": {
        **_JO,
        "angle_source": "own_mlp",
        "angle_hidden_mult": 2.0,
        "angle_ln": False,
        "angle_bound": "none",
        "angle_base": "zero",
        "angle_init": "normal",
        "pairing": "interleaved",
    },
    "jo_projected_2d": {**_JO, **_GRID, "accumulate": "none"},
    "jo_projected_raster": {**_JO, **_GRID, "accumulate": "raster"},
    "jo_random": {"name": "accumulated", "transport": "qkv"},
    "jo_det": {"name": "accumulated", "transport": "qkv", "steps": "token"},
    "jo_lf": {**_JO, **_NOISE, "angle_source": "own_mlp", "angle_bound": "norm_abs"},
    "jo_rpemb": {**_JO, **_NOISE, "angle_source": "token_table", "angle_bound": "norm_freq"},
    "jo_pmlp": {**_JO, "angle_source": "token_mlp"},
    "jo_cbd": {**_JO, "angle_source": "templates"},
    "jo_blocks": {"name": "jo_blocks", "transport": "qkv"},
    "householder": {"name": "householder", "transport": "qkv"},
}


PRESETS["grape_joint"] = {"name": "joint", "rotation": PRESETS["grape_m_freq"], "bias": PRESETS["grape_a_qk"]}


def preset(name: str) -> dict:
    """The encoding of a preset name, with its transport suffix, or of two joined by a plus; ValueError lists what there
    is."""
    rotation, plus, bias = name.partition("+")
    if plus:
        return {"name": "joint", "rotation": preset(rotation), "bias": preset(bias)}
    stem, _, suffix = name.rpartition("_")
    if name in PRESETS:
        return dict(PRESETS[name])
    if suffix in ("qk", "qkv", "v") and "transport" in PRESETS.get(stem, {}):
        return {**PRESETS[stem], "transport": suffix}
    raise ValueError(
        f"encoding={name}: no such preset; there are {', '.join(sorted(PRESETS))} (rotary ones also with _qk, _qkv, "
        "_v); a module of your own goes into --config.encoding=\"{'name': 'package.module'}\""
    )
