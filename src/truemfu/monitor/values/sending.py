"""When device values are sent to the host: by the training thread, or for it by a thread of the monitor."""

from __future__ import annotations

import threading
import time

from ...errors import one_line
from ..notices import Notices
from ..timing.between_steps import BetweenSteps
from ..timing.clock import CudaClock, HostClock
from .host_values import HostValues

_MAX_HOLD_S = 6.0
"""After that the row thread sends held values; the training thread has done so unless its step is long."""
_LOCK_TIMEOUT_S = 0.3
_BUSY_TIMEOUT_S = 5.0
"""How long `send_all` waits for a call of the monitor on the training thread to return."""


class ValueSender:
    """Sends what the training thread holds; safe on any thread, under `training_lock`."""

    def __init__(
        self,
        values: HostValues,
        clock: HostClock | CudaClock,
        between: BetweenSteps,
        training_lock: threading.RLock,
        notices: Notices,
    ) -> None:
        self._values, self._clock, self._between = values, clock, between
        self._lock, self._notices = training_lock, notices

    def send_all(self) -> bool:
        """Send the values that the rows so far need; whether that succeeded."""
        if not self._lock.acquire(timeout=_BUSY_TIMEOUT_S):
            self._notices(
                f"the training thread has not returned from a call of the monitor for {_BUSY_TIMEOUT_S:g} s: "
                "only complete rows are written"
            )
            return False
        try:
            if threading.get_ident() != self._between.thread:
                return self._send_behind_training()
            self._values.flush()
        except Exception as error:
            self._notices(f"values that are still on the device cannot be fetched: {one_line(error)}")
            return False
        finally:
            self._lock.release()
        return True

    def send_overdue(self) -> bool:
        """Send values that were held too long; whether there were any."""
        oldest_s = self._values.oldest_s
        is_overdue = oldest_s is not None and time.perf_counter() - oldest_s > _MAX_HOLD_S
        return is_overdue and self.send_if_free()

    def send_if_free(self) -> bool:
        """Send the values unless the training thread is busy with them."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            return False
        try:
            return self._send_behind_training()
        finally:
            self._lock.release()

    def _send_behind_training(self) -> bool:
        """On another thread: queue the copies after the training's work; False during a capture."""
        with self._clock.on_other_thread() as is_possible:
            if is_possible:
                self._values.flush()
            return is_possible
