"""Nested containers as torch takes them apart, those that libraries have registered included.

Without torch's functions a container is one leaf: counts and observed steps are refused, and a batch with
containers cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import table
from .find import ABSENT

_found = [table.get(path) for path in table.TREES]


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return [tree], None


def _unflatten(leaves: Any, spec: Any) -> Any:
    return leaves[0]


def _leaves(tree: Any) -> list[Any]:
    return [tree]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return function(tree)


def _map_only(cls: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    return function(tree) if isinstance(tree, cls) else tree


if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
elif ABSENT in _found:
    tree_flatten, tree_unflatten, tree_leaves = _flatten, _unflatten, _leaves
    tree_map, tree_map_only = _map, _map_only
else:
    tree_flatten, tree_unflatten, tree_leaves, tree_map, tree_map_only = _found

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
