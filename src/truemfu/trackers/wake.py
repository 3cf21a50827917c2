"""Wakes a thread of ours, from anywhere: what `threading.Event` does, without a lock of Python's.

A signal's handler may interrupt the main thread inside `Event.set`, which then holds the event's lock for as
long as the handler waits: neither the thread that waits for the event nor another one that sets it gets on.
"""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class Wake:
    """Set by many threads, waited for by one."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Have the next `wait` return at once; safe in and under a signal's handler."""
        if self._asked.empty():
            self._asked.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is set, or for so long; it is then no longer set."""
        with contextlib.suppress(Empty):
            self._asked.get(timeout=timeout_s)
            while True:
                self._asked.get_nowait()
