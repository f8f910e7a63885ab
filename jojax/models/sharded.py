"""Activations and attention on a mesh: what a step that is traced in one (`jojax.shard.within`) makes of them.

Rows lie over data and fsdp, sites over `sequence`, heads over `tensor`. In attention every device has the queries of
its own sites and heads, and gathers the keys, values and edge keys of all sites; their gradients come back summed and
cut again. Without a mesh all is as given. A causal model's last shard has most to do: sites are cut in their order.
"""

import functools

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jojax.encodings.base import wide
from jojax.errors import UserError
from jojax.models.scores import Sites

ROWS, SITES, HEADS = ("data", "fsdp"), "sequence", "tensor"


def meshed() -> bool:
    """Is this traced in a mesh of a run?"""
    return {*ROWS, SITES, HEADS} <= set(jax.sharding.get_abstract_mesh().axis_names)


def lay(tree):
    """Arrays [B, L, ...], each device with its rows and sites; the first says B and L, what has other axes stays."""
    if not meshed():
        return tree
    sites = jax.tree.leaves(tree)[0].shape[:2]
    here = functools.partial(lax.with_sharding_constraint, shardings=P(ROWS, SITES))
    return jax.tree.map(lambda t: here(t) if t.shape[:2] == sites else t, tree)


def vocabulary(table, axis):
    """An array with an entry a token along `axis`, as it is used: over `tensor` where that divides it, gathered over
    fsdp, where else rows would be."""
    if not meshed():
        return table
    names: list = [None] * table.ndim
    names[axis] = HEADS if table.shape[axis] % jax.sharding.get_abstract_mesh().shape[HEADS] == 0 else None
    return lax.with_sharding_constraint(table, P(*names))


def attend(function, q, k, v, query: Sites, key: Sites, *, edge=None, edge_key=None, **static):
    """`function` (`attention.xla`, …) on each device's own queries and heads; arguments are its own."""
    if not meshed():
        return function(q, k, v, query, key, edge=edge, edge_key=edge_key, **static)
    given = (q, k, v, query, key, edge and edge.replace(key=None), edge_key)  # which stands for the edge's own

    def local(q, k, v, query, key, edge, edge_key):
        k, v, edge_key = jax.tree.map(whole, (k, v, edge_key))
        check_step(q, edge, edge_key)
        return function(q, k, v, query, key, edge=edge, edge_key=edge_key, **static)

    def whole(t):
        return lax.all_gather(t, SITES, axis=1, tiled=True) if t.shape[1] < key.index.size else t

    def lies(t, *names):
        """A dimension of size one is for all: nothing to split."""
        return P(*(name if n > 1 else None for n, name in zip(t.shape, names, strict=False)))

    def own(tree):
        return jax.tree.map(lambda t: lies(t, ROWS, SITES, HEADS), tree)

    weights = edge and jax.tree.map(lambda t: lies(t, *[None] * (t.ndim - 1), HEADS), edge.weights)
    specs = (
        *own((q, k, v)),
        jax.tree.map(lambda t: P(SITES) if t.ndim == 1 else P(ROWS, SITES), query),
        jax.tree.map(lambda t: P() if t.ndim == 1 else P(ROWS), key),
        edge and edge.replace(query=own(edge.query), key=None, weights=weights),
        own(edge_key),
    )
    return jax.shard_map(local, in_specs=specs, out_specs=P(ROWS, SITES, HEADS), check_vma=False)(*given)


def check_step(q, edge, edge_key):
    """UserError for a step that does not answer for as many heads as it is asked for."""
    if edge is None:
        return
    (B, Lq, G, R, _), Lk = q.shape, edge_key.shape[1]
    state, seen = jax.ShapeDtypeStruct((B, G * R, Lq), wide(q.dtype)), jax.ShapeDtypeStruct((B, Lq, Lk), bool)
    found = jax.eval_shape(edge.step, state, edge.query, edge_key, seen, edge.weights)[0].shape[1]
    if found != G * R:
        raise UserError(
            f"an edge's step answers for {found} heads where a device has {G * R}: read heads from the state and the "
            f"weights (their last axis), or set mesh.tensor=1"
        )
