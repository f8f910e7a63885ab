"""From a config to a model: `build(config)` reads `config.model`, `config.encoding`, `attention`, `dtype` and sizes."""

import dataclasses

import jax

from jojax import encodings
from jojax.encodings.base import Dims
from jojax.errors import UserError
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT, grid_of

SWITCHES = ("mixer", "mlp", "norm", "qk_norm", "window", "kv_shift", "bias", "eps", "dropout", "layer_scale",
            "init_std")  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64")


def pair(value) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else tuple(value)


def dims_of(config) -> Dims:
    m = config.model
    heads, width = m.heads, m.width
    if m.kind not in ("lm", "vit"):
        raise UserError(f"model.kind = {m.kind!r}: choose from lm, vit")
    needs = {"lm": ("vocab", "length"), "vit": ("image_size", "classes")}[m.kind]
    if any(key not in config.data for key in needs):
        raise UserError(f"model.kind = {m.kind!r} needs data.{' and data.'.join(needs)}: use a config of such a model")
    if not m.head_dim and width % heads:
        raise UserError(f"model.width = {width} is not divisible by model.heads = {heads}: change one, or set head_dim")
    common = dict(
        heads=heads,
        kv_heads=m.kv_heads or heads,
        head_dim=m.head_dim or width // heads,
        width=width,
        depth=m.depth,
    )
    if m.kind == "lm":
        return Dims(**common, vocab=config.data.vocab, length=config.data.length)
    grid = grid_of(frames_of(config) + pair(config.data.image_size), patch_of(config))
    return Dims(**common, axes=len(grid), grid=grid, causal=False)


def frames_of(config) -> tuple[int, ...]:
    """(data.frames,) of clips, () of images."""
    return (config.data.frames,) if config.data.get("frames") else ()


def patch_of(config) -> tuple[int, ...]:
    """Sides of a patch along every axis of the grid."""
    time, clips = config.model.get("patch_frames"), frames_of(config)
    if time and not clips:
        raise UserError(f"model.patch_frames = {time} does nothing here: it is for clips (data.frames)")
    return ((time or 1,) if clips else ()) + pair(config.model.patch)


def matching_width(m, dims: Dims) -> int:
    """MLP units by which a model without content angles gets as many parameters as jo_projected has: an angle table
    V·K and depth − 1 heads of F·K + K, with K = G·D/2 angles. 0 unless `model.match_jo_projected`."""
    if not m.get("match_jo_projected"):
        return 0
    angles = dims.kv_heads * dims.head_dim // 2
    extra = dims.vocab * angles + (dims.depth - 1) * (round(m.mlp_ratio * dims.width) + 1) * angles
    matrices = 3 if m.mlp == "swiglu" else 2
    return round(extra / dims.depth / (matrices * dims.width + (matrices - 1) * m.bias))


def build(config, trained=()) -> LM | ViT:
    """trained: the grid of the training, where images are now of another size."""
    if config.dtype not in DTYPES:
        raise UserError(f"dtype = {config.dtype!r}: choose from {', '.join(DTYPES)}")
    if config.dtype == "float64" != jax.dtypes.canonicalize_dtype("float64"):
        raise UserError("dtype = 'float64' needs JAX_ENABLE_X64=1 in the environment: else JAX computes in float32")
    m, dims = config.model, dataclasses.replace(dims_of(config), trained=trained)
    ratio = m.mlp_ratio + matching_width(m, dims) / dims.width
    spec = Spec(
        dims=dims,
        dtype=config.dtype,
        attention=config.attention,
        mlp_ratio=ratio,
        **{k: m[k] for k in SWITCHES if k in m},  # a record may be older than a switch
    )
    encoding = encodings.build(config.encoding, dims, config.dtype)
    if m.kind == "lm":
        return LM(
            spec,
            encoding,
            tied=m.tied,
            head_bias=m.head_bias,
            loss_chunk=m.loss_chunk,
            scan=m.scan,
            remat=m.remat,
        )
    if m.drop_path and m.depth == 1:
        raise UserError(f"model.drop_path = {m.drop_path} does nothing at model.depth = 1: set it to 0")
    return ViT(
        spec,
        encoding,
        classes=config.data.classes,
        patch=patch_of(config),
        pool=m.pool,
        drop_path=m.drop_path,
        scan=m.scan,
        remat=m.remat,
    )
