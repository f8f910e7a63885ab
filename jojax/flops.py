"""How many floating-point operations a model needs, counted by hand: matrix products alone, two for each
multiply-and-add, encodings left out.

A forward pass over one row of L sites, T = L of which the head reads (1 in a vision model), width C, H · D query and
G · D key channels, F MLP units, in each of `depth` blocks

    2 L C (H D + 2 G D) + 2 L H D C        queries, keys and values; the way out
    2 · 2 L² H D                           scores and weighted values, of all pairs, causal or not
    2 L C F · (2, or 3 of SwiGLU)          the MLP

then 2 T C V for the head of V words or classes, and 2 L C · (numbers of a patch) of a vision model. KV-shift adds
2 · 2 L C G, a recurrence has 2 L C H D · 4 in the place of attention. Training is three times that (the gradients of
inputs and of weights): 6 · parameters · tokens + 12 · depth · L² H D a row. Remat recomputes more than that.
"""

import math

from jojax.models import build


def forward(config) -> int:
    """Of one row or image."""
    m, dims = config.model, build.dims_of(config)
    C, HD, GD = dims.width, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    F = round(m.mlp_ratio * C) + build.matching_width(m, dims)
    if m.kind == "lm":
        L, outside = config.data.length, config.data.length * dims.vocab
    else:
        patches, side = math.prod(dims.grid), build.patch_of(config)
        L = patches + (m.pool == "cls")
        outside = patches * math.prod(side) * 3 + config.data.classes
    if m.get("mixer") == "recurrence":
        mixer = 4 * L * C * HD
    else:
        mixer = 2 * L * C * (HD + GD) + 2 * L * L * HD + 2 * L * C * dims.kv_heads * bool(m.get("kv_shift"))
    mlp = L * C * F * (3 if m.mlp == "swiglu" else 2)
    return 2 * (m.depth * (mixer + mlp) + C * outside)


def training(config) -> int:
    """Of one row or image, with its gradients."""
    return 3 * forward(config)
