"""The progress of an audit: profiled kernels and elapsed seconds, on stderr.

    ncu's log, as it grows ─► kernels ─► a terminal: beside the spinner; elsewhere: a line from time to time

ncu writes a line for each kernel it profiles. How many there will be is not known beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..hardware.nsight.run import PROFILED
from ..text import counted
from .console import say

LINE_EVERY_S = 15.0
"""Seconds between two lines where nothing can be redrawn."""

_REDRAW_EVERY_S = 0.5
_PROFILED = PROFILED.encode()


class AuditProgress:
    """Follows the log of one run under ncu; `show` redraws the text beside a spinner, where there is one."""

    def __init__(self, log_file: Path, show: Callable[[str], None] | None) -> None:
        self._log_file = log_file
        self._show = show or (lambda text: say(text, err=True))
        self._every_s = _REDRAW_EVERY_S if show else LINE_EVERY_S
        self._began_s = self._shown_s = time.monotonic()

    def update(self) -> None:
        """Show the progress if it is due."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            kernels = self._kernels()
            profiled = f"{counted(kernels, 'kernel')} profiled" if kernels else "no kernel profiled yet"
            self._show(f"audit: {profiled}, {now_s - self._began_s:.0f} s")

    def _kernels(self) -> int:
        try:
            return self._log_file.read_bytes().count(_PROFILED)
        except OSError:  # ncu creates it when it starts
            return 0
