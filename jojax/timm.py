"""Weights of timm's vision transformers and those of the ViT here, by one table in both directions.

The logits are the same, of images normalised alike (tests/test_convert.py): timm's vision_transformer and deit3, the
rope models of its eva, RoPE-ViT's own files (arXiv 2403.13298). On the way
- a position of the class token (a row of pos_embed beside those of the patches) is added to the class token;
- axial rotations have their planes of x first there, those of y here, and with pairing = 'half' neighbours part:
  channels of queries and keys change places. Frequencies of mixed rotations are those of x, y there, of y, x here.

A file does not say which axis is first: x in RoPE-ViT's models (grid_indexing 'xy'), y with timm's default ('ij'). Nor
does it say what has no weights: the base of axial rotations, the grid's shape, eps of the norms, exact GELU.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jojax import checkpoint
from jojax.encodings.absolute import Absolute
from jojax.encodings.base import Encoding
from jojax.encodings.build import build
from jojax.encodings.joint import PARTS, Joint
from jojax.encodings.none import NoPE
from jojax.encodings.rope import Rope
from jojax.errors import UserError

# our module or parameter -> timm's, {} the block's number; and the form of its array
TIMM = {
    "patches": ("patch_embed.proj", "conv"),
    "cls": ("cls_token", "same"),
    "encoding/table": ("pos_embed", "rows"),
    "blocks/encoding/freq": ("rope.freqs", "frequencies"),
    "blocks/norm_attention": ("blocks.{}.norm1", "flat"),
    "blocks/query": ("blocks.{}.attn.q_proj", "dense"),
    "blocks/key": ("blocks.{}.attn.k_proj", "dense"),
    "blocks/value": ("blocks.{}.attn.v_proj", "dense"),
    "blocks/out": ("blocks.{}.attn.proj", "merge"),
    "blocks/layer_scale_mixer": ("blocks.{}.ls1.gamma", "flat"),
    "blocks/norm_mlp": ("blocks.{}.norm2", "flat"),
    "blocks/mlp_in": ("blocks.{}.mlp.fc1", "dense"),
    "blocks/mlp_out": ("blocks.{}.mlp.fc2", "dense"),
    "blocks/layer_scale_mlp": ("blocks.{}.ls2.gamma", "flat"),
    "norm": ("norm", "flat"),
    "head": ("head", "dense"),
}
LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
FORMS = {  # our array -> timm's; timm's, our shape -> ours
    "same": (lambda t: t, lambda t, shape: t),
    "flat": (lambda t: t.reshape(-1), np.reshape),
    "rows": (lambda t: t[None], np.reshape),
    "dense": (lambda t: t.reshape(len(t), -1).T, lambda t, shape: t.T.reshape(shape)),
    "merge": (lambda t: t.reshape(-1, t.shape[-1]).T, lambda t, shape: t.T.reshape(shape)),
    "conv": (lambda t: t.transpose(3, 2, 0, 1), lambda t, shape: t.transpose(2, 3, 1, 0)),
    "frequencies": (lambda t: t.swapaxes(0, 1), lambda t, shape: t.swapaxes(0, 1)),
}
ALIASES = (  # other names of the same: data-parallel training, timm's eva, RoPE-ViT
    (r"^module\.", ""),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"\.attn\.([qv])_bias$", r".attn.\1_proj.bias"),
    (r"^freqs$", "rope.freqs"),
)
COORDINATES = ("freqs_t_x", "freqs_t_y")  # of patches, beside RoPE-ViT's frequencies
ALIKE = {  # options of the encodings that timm's models have
    NoPE: {},
    Absolute: {"kind": ("learned",)},
    Rope: {
        "transport": ("qk",),
        "form": ("axial", "mixed"),
        "coord": ("index",),
        "cls_pos": ("none",),
        "fraction": (1.0,),
        "angle_share_heads": (False,),
        "angle_share_layers": (False,),
    },
}


def rotation(encoding) -> Rope | None:
    """The rotations of a model's encoding, if it has any. UserError: timm's models have no such encoding."""
    if isinstance(encoding, Joint):
        parts = [build(getattr(encoding, n), encoding.dims, encoding.dtype)(parent=None) for n in PARTS]
        return next(filter(None, [rotation(part) for part in parts]), None)
    if type(encoding) not in ALIKE:
        raise UserError(
            f"timm's models have no encoding like {type(encoding).__name__}: its weights have no place there"
        )
    wanted = dict(ALIKE[type(encoding)])
    if isinstance(encoding, Rope):
        wanted["learned"] = (encoding.form == "mixed",)
    for option, valid in wanted.items():
        if getattr(encoding, option) not in valid:
            raise UserError(
                f"encoding.{option} = {getattr(encoding, option)!r}: timm's models have {' or '.join(map(str, valid))} "
                "alone; weights imported with that can start a run without it (config.init_from)"
            )
    return encoding if isinstance(encoding, Rope) else None


def place(path) -> tuple[str, str]:
    """Name in timm and form of one of our parameters."""
    path = re.sub(r"/of_(rotation|bias)(?=/)", "", path)
    if path in TIMM:
        return TIMM[path]
    module, _, leaf = path.rpartition("/")
    if module not in TIMM or leaf not in LEAVES:
        raise UserError(f"{path} has no counterpart in timm's vision transformers: no such weights there")
    name, form = TIMM[module]
    return f"{name}.{LEAVES[leaf]}", form if leaf == "kernel" else "flat"


def channels(rope, first):
    """[D]: the channel of a head of timm's that becomes our channel c, of queries and keys alike."""
    planes = np.arange(rope.dims.head_dim).reshape(-1, 2)  # neighbours turn together
    if rope.form == "axial" and first == "x":
        planes = np.roll(planes, len(planes) // 2, 0)
    return planes.ravel() if rope.pairing == "interleaved" else planes.T.ravel()


def reordered(path, t, rope, first, inverse=False):
    """One of our arrays with its channels, or the axes of its frequencies [depth, 2, G, D/2], as they are here from as
    they are there."""
    if rope is not None and path.startswith(("blocks/query/", "blocks/key/")):
        order = channels(rope, first)
        return t[..., np.argsort(order) if inverse else order]
    return t[:, ::-1] if path.endswith("/freq") and first == "x" else t


def to_timm(params: Mapping[str, Any], encoding: Encoding, first="x") -> dict[str, Any]:
    """{timm's name: array} of {path: array}, queries, keys and values apart."""
    rope, out = rotation(encoding), {}
    for path, t in params.items():
        (name, form), t = place(path), reordered(path, t, rope, first, inverse=True)
        whole = {name.format(i): own for i, own in enumerate(t)} if "{}" in name else {name: t}
        out |= {name: FORMS[form][0](own) for name, own in whole.items()}
    return out


def from_timm(tensors, like: Mapping[str, Any], encoding: Encoding, first="x") -> dict[str, Any]:
    """{path: array} for `like` {path: something of its shape} of weights under timm's names. UserError: no fit."""
    rope, out = rotation(encoding), {}
    wanted = to_timm({path: np.broadcast_to(np.float32(0), t.shape) for path, t in like.items()}, encoding)
    tensors = canonical(tensors, wanted)
    refuse_misfit(tensors, wanted)
    for path, t in like.items():
        name, form = place(path)
        back = FORMS[form][1]
        if "{}" in name:
            own = np.stack([back(tensors[name.format(i)], t.shape[1:]) for i in range(t.shape[0])])
        else:
            own = back(tensors[name], t.shape)
        out[path] = reordered(path, own, rope, first)
    return out


def canonical(tensors, wanted):
    """Weights under the names of TIMM, the class token with its position in it."""
    out = {}
    for name, t in tensors.items():
        for pattern, new in ALIASES:
            name = re.sub(pattern, new, name)
        if ".attn.qkv." in name and len(t) % 3 == 0:
            out |= {name.replace("qkv", f"{n}_proj"): part for n, part in zip("qkv", np.split(t, 3), strict=True)}
        elif name not in COORDINATES:
            out[name] = t
    for name in [n for n in out if n.endswith(".attn.q_proj.bias")]:  # keys have none in timm's eva
        key = name.replace("q_proj", "k_proj")
        out.setdefault(key, np.zeros(len(out[key.replace("bias", "weight")]), np.float32))
    both = out.keys() & wanted.keys()
    if "rope.freqs" in both and out["rope.freqs"].size == wanted["rope.freqs"].size:
        out["rope.freqs"] = out["rope.freqs"].reshape(wanted["rope.freqs"].shape)  # RoPE-ViT's: heads and planes as one
    if {"cls_token", "pos_embed"} <= both and out["pos_embed"].shape[1] == wanted["pos_embed"].shape[1] + 1:
        out["cls_token"] = out["cls_token"] + out["pos_embed"][:, :1]
        out["pos_embed"] = out["pos_embed"][:, 1:]
    return out


def published(tensors, rotary):
    """What `to_timm` gives as timm's classes have it: queries, keys and values as one; eva's names where `rotary`."""
    out = {}
    for name, t in tensors.items():
        if rotary:
            name = re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name)
        out[name] = t
    for name in [n for n in out if ".attn.q_proj." in n]:
        three = [name.replace("q_proj", f"{n}_proj") for n in "qkv"]
        if len({len(out[n]) for n in three}) == 1:  # not where heads share keys
            out[name.replace("q_proj", "qkv")] = np.concatenate([out.pop(n) for n in three])
    return out


def refuse_misfit(tensors, wanted):
    had, wants = ({name: t.shape for name, t in tree.items()} for tree in (tensors, wanted))
    both = had.keys() & wants.keys()
    if "head.weight" in both and had["head.weight"][0] != wants["head.weight"][0]:
        raise UserError(
            f"the file has {had['head.weight'][0]} classes, the config {wants['head.weight'][0]}: import with the "
            "file's (--config.data.classes); a run of other classes that starts from the result (config.init_from) "
            "begins with a new head"
        )
    if "pos_embed" in both and had["pos_embed"][1] != wants["pos_embed"][1]:
        raise UserError(
            f"the file has {had['pos_embed'][1]} positions, the config {wants['pos_embed'][1]} patches: import with "
            "the file's size (--config.data.image_size) and resize the result with scripts/resize_checkpoint.py"
        )
    if found := checkpoint.difference(had, wants):
        raise UserError(
            f"the weights do not fit the model, in timm's names: {found}; set the config's model and encoding (sizes, "
            "layer_scale, pool, patch) to those of the file"
        )
