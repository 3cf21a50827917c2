"""Replaces functions of torch, or methods of a trainer, while they are needed, and restores them afterwards.

If other code has wrapped a replacement meanwhile, it stays below that code and does what the original does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Generic, TypeVar

from . import table
from .find import ABSENT

Listener = TypeVar("Listener")


def replace(owner: Any, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Run `instead(original, *args, **kwargs)` for calls of a function; the returned function ends that."""
    original, had_own = getattr(owner, name), name in vars(owner)
    called = functools.partial(instead, original)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    for function in (ours, instead):
        not_compiled(function)
    if hasattr(original, "__wrapped__"):  # a program may call what is below its decorators
        ours.__wrapped__ = original.__wrapped__

    def end() -> None:
        nonlocal called
        called = original
        if vars(owner).get(name) is not ours:
            return
        if had_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, ours)
    return end


def not_compiled(function: Callable[..., Any]) -> None:
    """Keep the compiler, if it is loaded, from this function's own code; what that calls is compiled as ever.

    After a graph break dynamo compiles whatever Python code runs, and ours with it.
    """
    skip = table.loaded(table.SKIP_CODE)
    if skip is not ABSENT and isinstance(function, FunctionType):
        skip(function.__code__)


def replace_named(path: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """The same for a name of the table; does nothing if its module is not loaded."""
    if table.loaded(path) is ABSENT:
        return lambda: None
    home, _, name = path.partition(":")
    return replace(sys.modules[home], name, instead)


@contextlib.contextmanager
def replaced(path: str, instead: Callable[..., Any]) -> Iterator[None]:
    """The same inside the context."""
    end = replace_named(path, instead)
    try:
        yield
    finally:
        end()


class Listeners(Generic[Listener]):
    """Those who are told of each call of a function, which is replaced while there are any.

    `tell(listeners, original, *args, **kwargs)` tells all of them, and calls the original.
    """

    def __init__(self, tell: Callable[..., Any]) -> None:
        self._tell = tell
        self._all: tuple[Listener, ...] = ()
        self._end: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._all)

    def add(self, listener: Listener, owner: Any, name: str) -> Callable[[], None]:
        """Tell a listener of this function's calls; the returned function ends that."""
        if not self._all:
            not_compiled(self._tell)
            self._end = replace(owner, name, functools.partial(self._tell, self))
        self._all = (*self._all, listener)

        def remove() -> None:
            self._all = tuple(other for other in self._all if other is not listener)
            if not self._all:
                self._end()

        return remove
