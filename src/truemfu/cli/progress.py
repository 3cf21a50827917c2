"""What a command that runs the user's has reached, and after how many seconds, on stderr.

A terminal with a spinner is redrawn beside it; elsewhere there is a line from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .console import say

LINE_EVERY_S = 15.0
"""Seconds between two lines where nothing can be redrawn."""

_REDRAW_EVERY_S = 0.5


class Progress:
    """`show` redraws the text beside a spinner, where there is one."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show or (lambda text: say(text, err=True))
        self._every_s = _REDRAW_EVERY_S if show else LINE_EVERY_S
        self._began_s = self._shown_s = time.monotonic()
        self._stage = 0

    def update(self, reached: Callable[[], str], stage: int = 0) -> None:
        """Show what is reached if it is due; a new stage always is."""
        now_s = time.monotonic()
        if stage != self._stage or now_s - self._shown_s >= self._every_s:
            self._shown_s, self._stage = now_s, stage
            self._show(f"{reached()}, {now_s - self._began_s:.0f} s")
