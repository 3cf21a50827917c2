"""The tracker protocol, and helpers that truemfu's trackers share.

A tracker is any object with the four methods of `Tracker`: pass such an object instead of a name. A lane
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
    """Raised by `flush`: the rows cannot be written now; the tracker keeps them for the next flush."""


def known(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The row without unknown values, which trackers cannot show."""
    return {key: value for key, value in metrics.items() if value is not None}


def writable(text: str) -> str:
    """The text without lone surrogates (from undecodable file names), which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


class Names:
    """Metric names that a tracker accepts: one for each of ours, all different.

    Some contain the name of a dataset, which is arbitrary text. `clean` makes a name acceptable; a name that
    would collide with an earlier one gets a checksum suffix.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._accepted: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._accepted:
            cleaned = self._clean(name)
            self._accepted[name] = cleaned if cleaned not in self._taken else f"{cleaned}_{checksum(name)}"
            self._taken.add(self._accepted[name])
        return self._accepted[name]


def checksum(name: str) -> str:
    """Eight hexadecimal digits that identify this name."""
    return f"{crc32(name.encode('utf-8', 'surrogatepass')):08x}"
