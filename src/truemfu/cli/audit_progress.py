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
from ..text import counted, printable

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
        self._has_line = False

    def update(self) -> None:
        """Show the progress if it is due."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        kernels = self._kernels()
        profiled = f"{counted(kernels, 'kernel')} profiled" if kernels else "no kernel profiled yet"
        text = f"audit: {profiled}, {now_s - self._began_s:.0f} s"
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

    def _kernels(self) -> int:
        try:
            return self._log_file.read_bytes().count(_PROFILED)
        except OSError:  # ncu creates it when it starts
            return 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
