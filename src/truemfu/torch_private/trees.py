"""Nested containers: torch's own functions for them, or plain ones for dicts, lists and tuples.

torch's functions also handle containers that libraries have registered. Without them, these are leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelError
from . import table
from .find import ABSENT

_found = [table.get(path) for path in table.NAMES if path.startswith(table.PYTREE)]


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    cls = type(tree)
    keys: tuple[Any, ...] | None
    if isinstance(tree, dict):
        parts, keys = list(tree.values()), tuple(tree)
    elif isinstance(tree, (list, tuple)) and cls is not torch.Size:
        parts, keys = list(tree), None
    else:
        return [tree], None
    leaves: list[Any] = []
    specs = []
    for part in parts:
        inner, spec = _flatten(part)
        leaves += inner
        specs.append((len(inner), spec))
    return leaves, (cls, keys, tuple(specs))


def _unflatten(leaves: Any, spec: Any) -> Any:
    leaves = list(leaves)
    if spec is None:
        return leaves[0]
    cls, keys, specs = spec
    parts = []
    for count, inner in specs:
        parts.append(_unflatten(leaves[:count], inner))
        leaves = leaves[count:]
    if keys is not None:
        return dict(zip(keys, parts, strict=True))
    if hasattr(cls, "_fields"):
        return cls(*parts)
    return parts if issubclass(cls, list) else tuple(parts)


def _leaves(tree: Any) -> list[Any]:
    return _flatten(tree)[0]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = _flatten(tree)
    return _unflatten(map(function, leaves), spec)


def _map_only(cls: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    return _map(lambda leaf: function(leaf) if isinstance(leaf, cls) else leaf, tree)


def _works() -> bool:
    """Whether torch's functions flatten, map and unflatten correctly."""
    flatten, unflatten, leaves, change, change_only = _found
    tree = {"a": [1, (2.0, "x")]}
    try:
        flat, spec = flatten(tree)
        return bool(
            list(flat) == leaves(tree) == [1, 2.0, "x"]
            and unflatten(flat, spec) == tree
            and change(str, tree) == {"a": ["1", ("2.0", "x")]}
            and change_only(int, str, tree) == {"a": ["1", (2.0, "x")]}
        )
    except Exception:  # they have changed, so they are not used
        return False


knows_all = ABSENT not in _found and _works()
"""Whether containers that libraries have registered are handled."""

if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
elif knows_all:
    tree_flatten, tree_unflatten, tree_leaves, tree_map, tree_map_only = _found
else:
    tree_flatten, tree_unflatten, tree_leaves = _flatten, _unflatten, _leaves
    tree_map, tree_map_only = _map, _map_only


def check_leaves(leaves: list[Any]) -> None:
    """Raise ModelError if a leaf may hold tensors that only torch's own functions would find."""
    if knows_all:
        return
    table.miss(_missing_name())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__dict__"):
            continue
        if any(isinstance(value, torch.Tensor) for value in vars(leaf).values()):
            raise ModelError(f"{type(leaf).__name__} holds tensors; {table.reason(_missing_name())}")


def _missing_name() -> str:
    paths = [path for path in table.NAMES if path.startswith(table.PYTREE)]
    return next((path for path, found in zip(paths, _found, strict=True) if found is ABSENT), paths[0])


__all__ = [
    "check_leaves", "knows_all", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip
