"""Nested containers as torch takes them apart, those that libraries have registered included.

Without torch's functions a container is one leaf: counts and observed steps are refused, and a batch with
containers cannot be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import table

if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
else:
    _FLATTEN, _UNFLATTEN, _LEAVES, _MAP, _MAP_ONLY = table.TREES
    tree_flatten = table.get_or(_FLATTEN, lambda tree: ([tree], None))
    tree_unflatten = table.get_or(_UNFLATTEN, lambda leaves, spec: leaves[0])
    tree_leaves = table.get_or(_LEAVES, lambda tree: [tree])
    tree_map = table.get_or(_MAP, lambda function, tree: function(tree))
    tree_map_only = table.get_or(
        _MAP_ONLY, lambda cls, function, tree: function(tree) if isinstance(tree, cls) else tree
    )

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
