"""Doors: attributes of torch that answer one thread differently, and all others as ever.

Torch keeps some settings for the whole process. Where a count would set one of them, a door stands in for the
function that does: it looks at the thread that calls. For every other thread it calls torch's own function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_lock = threading.Lock()


class Door:
    """Replaces `name` of what `find` finds by `make(torch's own)`, as long as anybody is inside.

    Threads may come and go in any order: the first one puts the door up, the last one takes it down.
    """

    def __init__(self, find: Callable[[], Any], name: str, make: Callable[[Any], Any]) -> None:
        self._find, self._name, self._make = find, name, make
        self._inside = 0
        self._owner: Any = None
        self._own: Any = None

    def __enter__(self) -> None:
        with _lock:
            self._inside += 1
            owner = self._find()
            if self._owner is None and owner is not None and self._name in vars(owner):
                self._owner, self._own = owner, vars(owner)[self._name]
                door = self._make(self._own)
                never_traced(getattr(door, "__func__", door))
                setattr(owner, self._name, door)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            self._inside -= 1
            if not self._inside and self._owner is not None:
                setattr(self._owner, self._name, self._own)
                self._owner = self._own = None


def never_traced(function: Callable[..., Any]) -> None:
    """Keep the compiler from tracing a function that it meets in place of one of torch's own."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
