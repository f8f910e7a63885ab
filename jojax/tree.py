"""Names of the leaves of a tree: the '/'-joined path, 'params/blocks/mlp/kernel', the same for dicts and
dataclasses."""

from collections.abc import Callable
from typing import Any

import jax


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves(tree: Any) -> dict[str, Any]:
    """{name: leaf} in the tree's order."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def named_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree of function(name, leaf, *leaves of the trees `rest` at the same place)."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaf: function(_name(path), *leaf), tree, *rest)
