"""What a tracker is, and what those of truemfu share.

A tracker is any object with the four methods of `Tracker`: pass one of your own in place of a name. A lane
calls it from one thread, so it needs no lock, may be slow, and may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from zlib import crc32


class Tracker(Protocol):
    """Takes the rows of a run: `start` once, `log` and `flush` many times, `finish` once."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Once, before the first row: what is known of the run, as plain JSON data."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row: numbers, strings, booleans, or None where unknown; a number may be NaN or infinite."""

    def flush(self) -> None:
        """Write what was logged so far."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Once, after the last row: write everything, close."""


class WriteLater(Exception):
    """Raised by `flush`: the rows cannot be written now, are kept by the tracker and wait for the next."""


def known(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The row without what is unknown: no tracker draws None."""
    return {key: value for key, value in metrics.items() if value is not None}


def writable(text: str) -> str:
    """The text without halves of surrogate pairs, as undecodable file names hold: they cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


class Names:
    """Metric names as a tracker takes them: each of ours has one, and no two have the same.

    The name of a dataset is part of some, and a user may call one whatever they like. `clean` makes a name
    acceptable; a second name that would come out like an earlier one gets a checksum behind it.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._theirs: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._theirs:
            cleaned = self._clean(name)
            self._theirs[name] = cleaned if cleaned not in self._taken else f"{cleaned}_{checksum(name)}"
            self._taken.add(self._theirs[name])
        return self._theirs[name]


def checksum(name: str) -> str:
    """Eight letters that tell this name from others."""
    return f"{crc32(name.encode('utf-8', 'surrogatepass')):08x}"
