"""Wakes a monitor thread from any context: like `threading.Event`, without a Python-level lock.

A signal handler may interrupt the main thread inside `Event.set`, which then holds the event's lock while the
handler waits: neither the thread that waits for the event nor another one that sets it can continue.
"""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class Wake:
    """Set by many threads, waited for by one."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Make the next `wait` return at once; safe inside a signal handler, and when interrupted by one."""
        if self._requests.empty():
            self._requests.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is set or the time is over; it is then unset."""
        with contextlib.suppress(Empty):
            self._requests.get(timeout=timeout_s)
            while True:
                self._requests.get_nowait()
