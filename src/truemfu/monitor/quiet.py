"""When another thread can have Python without the training thread missing it: in a backward pass.

A backward pass runs in C++ and leaves Python's lock alone. Whoever works in that time delays nobody; whoever
works in a forward pass takes the lock from the thread that launches kernels, and a launch-bound run waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from torch.autograd import graph

_PAUSES_S = tuple(0.002 * 1.5**look for look in range(12))
"""Between looks: soon enough for steps of milliseconds, long enough in all for steps of half a second."""
_IN_VAIN = 5
"""Rows of looks that found no backward pass, after which nobody waits until one is seen."""
_RUNS_BACKWARD = graph._engine_run_backward.__code__


class Quiet:
    """Tells whether the thread that made it is in a backward pass."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._in_vain = 0

    def is_now(self) -> bool:
        """Whether the thread is in a backward pass."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and frame.f_code is _RUNS_BACKWARD

    def wait(self, is_hurried: Callable[[], bool]) -> None:
        """Wait for a backward pass, if one comes soon and nobody is in a hurry."""
        for pause_s in _PAUSES_S if self._in_vain < _IN_VAIN else (0.0,):
            if is_hurried():
                return
            if self.is_now():
                self._in_vain = 0
                return
            time.sleep(pause_s)
        self._in_vain += 1
