"""The trail a worker leaves while it runs: one line of JSON as each phase begins.

The supervisor shows the last line live. When a worker dies without a word, the last line tells how far it
came and how much memory it held then.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from ..records import Phase


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A phase begins. Memory is the peak so far; the GPU's is None without one."""

    phase: Phase
    at_s: float
    """On the wall clock."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    fits: bool | None = None
    """A probe's answer, in its last line."""


def append_progress(path: Path, progress: Progress) -> None:
    """Add a line, at once. A disk that is full costs the trail, not the experiment."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(progress) + b"\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # the log may be on the same full disk
            print(f"note: {path} cannot be written: {error.strerror}", file=sys.stderr)


def read_progress(path: Path) -> list[Progress]:
    """The lines so far, in order; none where there is no file. A line being written is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(msgspec.MsgspecError):  # a line cut short by a full disk
            lines.append(msgspec.json.decode(line, type=Progress))
    return lines
