"""torch's DataLoader: when a thread requests its next batch, and when it has received it.

All DataLoader iterators share one `__next__`, for which torch has no hook. It is replaced while there are
listeners, and restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from . import table
from .find import ABSENT


class LoaderListener(Protocol):
    """Called on the thread that requests a batch; must not raise."""

    def wait_begins(self) -> None:
        """A batch is requested from a loader."""

    def wait_ends(self, *, has_batch: bool) -> None:
        """The loader has returned a batch, or raised."""


_listeners: tuple[LoaderListener, ...] = ()
_ours: Any = None
_original: Any = None


def listen(listener: LoaderListener) -> Callable[[], None]:
    """Call the listener for each batch of any DataLoader; the returned function ends that."""
    global _listeners, _ours, _original
    iterator_class = table.get(table.LOADER_ITERATOR)
    if iterator_class is ABSENT or not callable(vars(iterator_class).get("__next__")):
        table.miss(table.LOADER_ITERATOR)
        return lambda: None
    if (
        not _listeners and iterator_class.__next__ is not _ours
    ):  # ours is still there if it could not be restored
        _original = iterator_class.__next__
        _ours = iterator_class.__next__ = _with_listeners(_original)
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners, _ours
        _listeners = tuple(other for other in _listeners if other is not listener)
        if not _listeners and iterator_class.__next__ is _ours:  # else other code has wrapped ours
            iterator_class.__next__ = _original
            _ours = None

    return stop


def _with_listeners(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
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
