"""Keeps what a model prints in its forward pass from being printed again by a count."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Nothing that this thread writes to stdout appears; other threads write as before."""
    stdout, quiet = sys.stdout, _OthersOnly(sys.stdout)
    sys.stdout = quiet
    try:
        yield
    finally:
        if sys.stdout is quiet:
            sys.stdout = stdout


class _OthersOnly:
    """A stream that drops what the thread writes that made it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> Any:
        if threading.get_ident() == self._thread or self._stream is None:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
