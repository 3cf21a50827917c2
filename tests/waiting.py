"""Waits for what a thread or a process brings about, however busy the machine is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREVER_S = 120.0


def wait_until(has_come: Callable[[], object], *, within_s: float = FOREVER_S) -> None:
    """Return once something has come about; an error where it never does."""
    ends_s = time.monotonic() + within_s
    while not has_come():
        assert time.monotonic() < ends_s, "it did not come about"
        time.sleep(0.01)


def rows_so_far(log: Path) -> list[dict[str, Any]]:
    """The rows of a log that is being written; none while part of a write is all that can be read."""
    try:
        found: list[dict[str, Any]] = json.loads(log.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return found
