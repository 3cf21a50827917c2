"""torch's DataLoader: when a thread requests its next batch, and when it has received it.

All DataLoader iterators share one `__next__`, for which torch has no hook: it is replaced while there are
listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from . import table
from .replacing import Listeners


class LoaderListener(Protocol):
    """Called on the thread that requests a batch; must not raise."""

    def wait_begins(self, workers: int | None) -> None:
        """A batch is requested from a loader with so many worker processes."""

    def wait_ends(self, *, has_batch: bool) -> None:
        """The loader has returned a batch, or raised."""


def listen(listener: LoaderListener) -> Callable[[], None]:
    """Call the listener for each batch of any DataLoader; the returned function ends that."""
    if not table.has(table.LOADER_ITERATOR):
        return lambda: None
    return _listeners.add(listener, table.get(table.LOADER_ITERATOR), "__next__")


def _tell(listeners: Iterable[LoaderListener], original: Callable[[Any], Any], iterator: Any) -> Any:
    workers = getattr(iterator, "_num_workers", None)
    for listener in listeners:
        listener.wait_begins(workers)
    has_batch = False
    try:
        batch = original(iterator)
        has_batch = True
    finally:
        for listener in listeners:
            listener.wait_ends(has_batch=has_batch)
    return batch


_listeners: Listeners[LoaderListener] = Listeners(_tell)
