"""The trail a worker leaves while it runs: one line of JSON as each phase begins.

The supervisor shows the last line live. When a worker dies without a word, the last line tells how far it
came and how much memory it held then.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from .. import plain_files
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
    """Add a line, at once, or raise an OSError: its path may have been removed, or its disk be full."""
    plain_files.append(path, msgspec.json.encode(progress) + b"\n")


def read_progress(path: Path) -> list[Progress]:
    """The lines so far, in order; none where there is no such file. A line being written is left out."""
    try:
        data = plain_files.read(path)
    except OSError:
        return []
    lines = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(msgspec.MsgspecError):  # a line cut short by a full disk
            lines.append(msgspec.json.decode(line, type=Progress))
    return lines
