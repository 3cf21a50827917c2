"""torch's DataLoader: when a thread asks one for its next batch, and when it has it.

All iterators of DataLoaders share one `__next__`, which nothing in torch lets others listen to. It is
replaced while anybody listens, and put back after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from . import table
from .find import ABSENT


class Listener(Protocol):
    """Is called on the thread that asks; must not raise."""

    def wait_begins(self) -> None:
        """A loader is asked."""

    def wait_ends(self, *, has_batch: bool) -> None:
        """It has answered with a batch, or raised."""


_listeners: tuple[Listener, ...] = ()
_ours: Any = None
_original: Any = None


def listen(listener: Listener) -> Callable[[], None]:
    """Call it for each batch of any DataLoader, until what is returned is called."""
    global _listeners, _ours, _original
    kind = table.get(table.LOADER_ITERATOR)
    if kind is ABSENT or not callable(vars(kind).get("__next__")):
        table.miss(table.LOADER_ITERATOR)
        return lambda: None
    if not _listeners and kind.__next__ is not _ours:  # still there where it could not be put back
        _original = kind.__next__
        _ours = kind.__next__ = _heard(_original)
    _listeners = (*_listeners, listener)

    def leave() -> None:
        global _listeners, _ours
        _listeners = tuple(other for other in _listeners if other is not listener)
        if not _listeners and kind.__next__ is _ours:  # else somebody has put theirs around ours
            kind.__next__ = _original
            _ours = None

    return leave


def _heard(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:
        listeners = _listeners
        for listener in listeners:
            listener.wait_begins()
        has_batch = False
        try:
            batch = original(self)
            has_batch = True
        finally:
            for listener in listeners:
                listener.wait_ends(has_batch=has_batch)
        return batch

    return __next__
