"""The blocks one after the other: scanned or unrolled, with or without rematerialisation, one parameter tree for all.

Parameters of block ℓ stand at index ℓ of axis 0 under `blocks`. What the last block would hand on to nobody (names
beginning with "advance") is not stored: those arrays have depth − 1 entries.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jojax.models.block import Block


def run(module, state, ctx, shared, sites, *, drop_path=0.0, past=None, at=0, capacity=0):
    """Inside the compact method of `module`, a model with spec, encoding, scan and remat: (x, carry) through all
    blocks. -> x [B, L, C], the new pasts or None."""
    depth = module.spec.dims.depth
    block = nn.remat(Block, prevent_cse=not module.scan) if module.remat else Block
    block = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True, "encoding": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
        length=depth,
        unroll=1 if module.scan else depth,
    )
    if depth > 1:
        starting = module.is_initializing()
        block = nn.map_variables(block, "params", pad_last, drop_last, init=starting, mutable=starting)
    rates = jnp.linspace(0, drop_path, depth) if drop_path else None
    blocks = block(module.spec, module.encoding, advances=depth > 1, capacity=capacity, name="blocks")
    (x, _), new = blocks(state, (past, rates), ctx, shared, sites, at)
    return x, new


def pad_last(tree):
    return _advance_leaves(tree, lambda t: jnp.concatenate([t, jnp.zeros_like(t[:1])]))


def drop_last(tree):
    return _advance_leaves(tree, lambda t: t[:-1])


def _advance_leaves(tree, change):
    def leaf(path, t):
        return change(t) if any(str(getattr(p, "key", "")).startswith("advance") for p in path) else t

    return jax.tree_util.tree_map_with_path(leaf, tree)
