"""Waits for what a thread or a process brings about, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

FOREVER_S = 120.0


def wait_until(has_come: Callable[[], object], *, within_s: float = FOREVER_S) -> None:
    """Return once something has come about; an error where it never does."""
    ends_s = time.monotonic() + within_s
    while not has_come():
        assert time.monotonic() < ends_s, "it did not come about"
        time.sleep(0.01)
