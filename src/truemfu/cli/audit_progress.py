"""The progress of an audit: profiled kernels and elapsed seconds, on stderr.

    ncu's log, as it grows ─► kernels ─► a terminal: one line, rewritten; elsewhere: a line from time to time

ncu writes a line for each kernel it profiles. How many there will be is not known beforehand.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from ..hardware.nsight.run import PROFILED
from ..text import printable

LINE_EVERY_S = 15.0
"""Seconds between two lines if stderr is not a terminal."""

_REDRAW_EVERY_S = 0.5
_PROFILED = PROFILED.encode()
_CLEAR_LINE = "\r\x1b[K"


class AuditProgress:
    """Follows the log of one run under ncu."""

    def __init__(self, log_file: Path, stream: TextIO | None = None) -> None:
        self._log_file, self._stream = log_file, stream or sys.stderr
        self._is_live = self._stream.isatty()
        self._every_s = _REDRAW_EVERY_S if self._is_live else LINE_EVERY_S
        self._began_s = self._shown_s = time.monotonic()
        self._read_bytes, self._rest = 0, b""
        self._has_line = False
        self.kernels = 0

    def update(self) -> None:
        """Read ncu's new lines, and show the progress if it is due."""
        self._read()
        now_s = time.monotonic()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        text = f"audit: {self._words()}, {now_s - self._began_s:.0f} s"
        self._write(f"{_CLEAR_LINE}{text}" if self._is_live else f"{text}\n")
        self._has_line = self._is_live

    def say(self, text: str) -> None:
        """A message on a separate line."""
        self.clear()
        self._write(f"{printable(text)}\n")

    def clear(self) -> None:
        """Remove the live line."""
        if self._has_line:
            self._write(_CLEAR_LINE)
            self._has_line = False

    def _words(self) -> str:
        if not self.kernels:
            return "no kernel profiled yet"
        return f"{self.kernels:,} kernel{'s' * (self.kernels > 1)} profiled"

    def _read(self) -> None:
        try:
            with self._log_file.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:  # ncu creates it when it starts
            return
        self._read_bytes += len(data)
        text = self._rest + data
        self.kernels += text.count(_PROFILED)
        self._rest = text[-len(_PROFILED) + 1 :]

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
