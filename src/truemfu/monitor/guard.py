"""Whether the monitor still works, and what becomes of an exception in it: a warning, never the training's.

working ──► broken: a part raised, or the process was forked    ──► steps are counted as lost
        ──► closed: by the user, at exit, or never open (TRUEMFU_DISABLED=1)
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

from ..environment import is_disabled
from . import forks
from .notices import Notices


class Guard:
    """The state that every entry of the monitor checks before it works."""

    def __init__(self, notices: Notices, *, when_broken: Callable[[], None]) -> None:
        self._notices, self._when_broken = notices, when_broken
        self.is_closed = self.is_disabled = is_disabled()
        self.is_broken = False
        self.steps_lost = 0
        """Steps that never reached the run: the monitor failed, or was already switched off."""
        self.lock = threading.RLock()
        """Guards the training thread's state, which threads of the monitor read at times."""
        self.forks = forks.number
        """The monitored process, as a number of forks since this package was imported."""
        self._at_exit: Callable[[], None] | None = None
        self._at_end_of_child: Finalize | None = None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the monitored one."""
        return forks.number != self.forks

    def adopt_process(self) -> None:
        """The run starts in this process."""
        self.forks = forks.number

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a part of the monitor; an exception becomes one warning and does not propagate."""
        if self.is_broken or self.is_disabled:
            return None
        try:
            with self.lock:
                return work(*args)
        except Exception as error:
            self.switch_off(error)
            return None

    def switch_off(self, error: Exception) -> None:
        """A part of the monitor raised: nothing is measured from now on."""
        self.is_broken = True
        self._notices(
            f"the monitor failed and is switched off, training continues: {type(error).__name__}: {error}"
        )
        with contextlib.suppress(Exception):
            self._when_broken()

    def refuses_step(self, *, has_run: bool) -> bool:
        """Whether a step is not logged; warns, or counts it, unless the monitor is disabled."""
        if self.is_disabled:
            return True
        if self.is_broken:
            self.steps_lost += not self.is_closed
            return True
        if self.is_closed:
            self._notices("log_step was called after close(): the step is not logged")
            return True
        if has_run and self.is_forked:
            self.is_broken = True
            self._notices("this process was forked from the monitored one: its steps are not logged")
            return True
        return False

    def close_at_exit(self, close: Callable[[], None]) -> None:
        """Have the monitor closed when the process ends."""
        if self.is_disabled:
            return
        self._at_exit = close
        atexit.register(close)
        if parent_process() is not None:  # a child of multiprocessing may end without `atexit`
            self._at_end_of_child = Finalize(None, close, exitpriority=0)

    def begin_closing(self) -> bool:
        """Whether the monitor is to be closed now: it is open, in this process."""
        if self.is_closed or self.is_forked:
            return False
        self.is_closed = True
        self._notices.in_closing(atexit.unregister, self._at_exit)
        if self._at_end_of_child is not None:
            self._notices.in_closing(self._at_end_of_child.cancel)
        return True
