"""The monitor's thread: takes the steps that were logged, and has them made into rows.

    training thread ── put(StepNote) ──► StepQueue ──► row thread ──► Rows: a row ──► trackers

It wakes every few seconds and processes all new steps, so that it rarely takes the GIL. The training thread
only appends to a bounded queue; if rows fall behind, steps that it cannot take are counted as lost.

The training thread sends the device values of a few seconds together. If its next step does not come in time,
they are sent from here, so that their steps are on disk within ten seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch

from ...errors import one_line
from ...trackers.wake import Wake
from ..notices import Notices
from ..step_note import StepNote
from ..timing.clock import allow_queries_during_capture
from ..values.sending import ValueSender
from .rows import Rows

_WAKE_EVERY_S = 3.0
_ARRIVES_S = 0.2
"""Values sent from the device have arrived after this time."""
_FAILING_S = 1.0
_POLL_S = 0.005
_TAKE_DOWN_S = 0.1
SAVE_HOLD_S = 1.0
"""How long a caller that saves waits for other ranks, from when its own steps are ready on.

Ranks that save as well report at once.
"""


class RowThread:
    """Owns the thread; `put` and `wake` are for the training thread."""

    def __init__(self, rows: Rows, sender: ValueSender, device: torch.device, notices: Notices) -> None:
        self._rows, self._sender, self._device, self._notices = rows, sender, device, notices
        self._wake = Wake()
        self._stopping = self._is_awaited = False
        self._failing_since_s: float | None = None
        self.own_time_s = 0.0
        self._thread = threading.Thread(target=self._run, name="truemfu-rows", daemon=True)
        self._thread.start()

    def put(self, note: StepNote) -> None:
        """Enqueue a step; never waits."""
        self._rows.put(note)
        if note.extras.observed is not None:  # the sooner its count is known, the sooner rows are written
            try:
                self._wake.set()
            except Exception:  # it wakes by itself in a few seconds
                return

    def finish_pending(self, timeout_s: float, *, hold_s: float | None = None) -> bool:
        """Wait until every step so far is a row; False if that takes longer than `timeout_s`.

        Rows wait for other ranks for `hold_s`, and then go without the figures of the job. Without `hold_s`
        other ranks have a second; rows may follow later.
        """
        self._rows.release_in(hold_s)
        queue = self._rows.queue
        wanted = queue.taken
        deadline = time.perf_counter() + timeout_s
        processed_s: float | None = None
        try:
            while queue.finished < wanted:
                self._is_awaited = True
                self._wake.set()
                now_s = time.perf_counter()
                if now_s > deadline or not self._thread.is_alive() or self._fails_for_good(now_s):
                    return False
                if processed_s is None and queue.processed >= wanted:
                    processed_s = now_s
                if hold_s is None and processed_s is not None and now_s > processed_s + SAVE_HOLD_S:
                    return True
                time.sleep(_POLL_S)
            return True
        finally:
            self._is_awaited = False

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        ends_s = time.perf_counter() + timeout_s
        while self._thread.is_alive() and (left_s := ends_s - time.perf_counter()) > 0:
            # A second Ctrl-C: ending Python now would abort the process from inside torch.
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join(left_s)
        # After the join torch still destroys its thread state, which needs the interpreter.
        time.sleep(_TAKE_DOWN_S)

    @property
    def stranded_steps(self) -> int:
        """Steps that will never become rows, since the thread has ended."""
        queue = self._rows.queue
        return 0 if self._thread.is_alive() else queue.taken - queue.finished

    def _fails_for_good(self, now_s: float) -> bool:
        since_s = self._failing_since_s
        return since_s is not None and now_s - since_s > _FAILING_S

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._notices(f"the monitor's thread could not be set up: {one_line(error)}")
        is_sent = False
        while not self._stopping:
            began = time.thread_time()
            try:
                self._wake.wait(_ARRIVES_S if is_sent else min(_WAKE_EVERY_S, self._rows.due_in_s))
                is_sent = self._sender.send_overdue()
                self._rows.process(is_awaited=self._is_awaited)
                self._failing_since_s = None
            except BaseException as error:  # the device fails, or the model's code raises SystemExit
                self._failing_since_s = self._failing_since_s or time.perf_counter()
                self._notices(f"steps cannot be processed: {one_line(error)}")
            self.own_time_s += time.thread_time() - began

    def _prepare(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else this thread would open a context on device 0
            allow_queries_during_capture()
