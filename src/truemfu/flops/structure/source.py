"""Reads the source of a `forward` without running it: names it uses, and poolings it calls as functions.

Modules show their layers, not what their forward does between them. Two such things change the FLOPs: a
pooling called as a function shrinks everything after it, and a causal mask halves the pairs of attention.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from ..operators.conv_sizes import SizeStep
from .streams import FixedSize


class FunctionalPool(NamedTuple):
    """A pooling called in a forward, and the children that are used before it."""

    after: frozenset[str]
    dims: int
    step: Callable[[int], int]


@lru_cache(maxsize=1024)
def names_in(function: Any) -> frozenset[str]:
    """Every name, attribute and keyword in a function's code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    found: set[str] = set()
    waiting = [code] if code is not None else []
    while waiting:
        code = waiting.pop()
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                waiting.append(constant)
            elif isinstance(constant, tuple):
                found.update(item for item in constant if isinstance(item, str))
    return frozenset(found)


@lru_cache(maxsize=1024)
def pools_in(function: Any) -> tuple[FunctionalPool, ...]:
    """The poolings that a forward calls as functions with literal numbers, in source order."""
    if not any("pool" in name for name in names_in(function)):
        return ()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):  # no source: a class defined interactively or generated
        return ()
    own = inspect.unwrap(function).__code__.co_varnames[:1]
    reader = _Reader(own[0] if own else "self")
    reader.visit(tree)
    return tuple(reader.pools)


class _Reader(ast.NodeVisitor):
    def __init__(self, own: str) -> None:
        self._own = own
        self.seen: set[str] = set()
        self.pools: list[FunctionalPool] = []

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == self._own:
            self.seen.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)  # the arguments are evaluated before the call
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        kind = name.removeprefix("adaptive_").removeprefix("max_").removeprefix("avg_")
        if kind in ("pool1d", "pool2d", "pool3d") and (step := _step(name, node)) is not None:
            self.pools.append(FunctionalPool(frozenset(self.seen), int(kind[4]), step))


def _step(name: str, call: ast.Call) -> Callable[[int], int] | None:
    """How a pooling changes a size; None if its arguments are not literal numbers."""
    given = dict(enumerate(call.args))
    named = {k.arg: k.value for k in call.keywords}

    def number(position: int, *keys: str, default: int | None = None) -> int | None:
        node = given.get(position, next((named[k] for k in keys if k in named), None))
        if node is None:
            return default
        try:
            value = ast.literal_eval(node)
        except ValueError:
            return None
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        return value if isinstance(value, int) else None

    if name.startswith("adaptive"):
        size = number(1, "output_size")
        return None if size is None else FixedSize(size)
    kernel = number(1, "kernel_size")
    stride, padding = number(2, "stride", default=kernel), number(3, "padding", default=0)
    if kernel is None or stride is None or padding is None:
        return None
    return SizeStep(kernel, stride, padding)
