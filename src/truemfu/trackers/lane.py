"""A thread for each tracker, so that one that is slow, hangs or raises delays nothing else.

    put ─► rows (bounded) ─► the lane's thread ─► tracker.log

The thread sleeps until `wake`, `flush` or `close`, or until a flush is due: until then rows wait. A full lane
drops its oldest row. A tracker that raises is switched off, with one warning, and the rows it did not get are
counted; one that raises `WriteLater` is flushed again later. The thread is a daemon and exists only in the
process that started it: a forked worker that inherits a lane writes nothing. Each tracker gets its own
copies, so one that changes them affects no other.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..errors import one_line
from .base import Tracker, WriteLater
from .wake import Wake

_RETRY_S = 5.0
"""How long to wait before a tracker that could not write is flushed again."""


class Lane:
    """Hands rows to one tracker, in order, from its own thread.

    With `flush_every_s` the tracker is also flushed automatically, once a row has waited for that long.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        *,
        capacity: int = 20_000,
        flush_every_s: float | None = None,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.error: str | None = None
        self._tracker = tracker
        self._notice = notice
        self._clock = clock
        self._capacity = capacity
        self._flush_every_s = flush_every_s
        self._flush_due_s: float | None = None
        self._rows: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=capacity)
        self._work = Wake()
        self._idle = threading.Condition()
        self._requested = 0
        self._flushed = 0
        self._put = 0
        self._taken = 0
        self._in_hand = 0
        self._unflushed = 0
        self._at_risk = 0
        self._summary: Mapping[str, Any] | None = None
        self._finish_requested_s: float | None = None
        self._is_off = False
        self._is_full = False
        self._is_postponed = False
        """Whether a write was postponed, with one warning."""
        self._is_closed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Start the thread, which first calls the tracker's `start`."""
        self._thread = threading.Thread(
            target=self._live, args=(deepcopy(dict(run)),), name=f"truemfu-{self.name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue a row for the tracker: never blocks, never raises. For one calling thread."""
        self.put_all([(step, metrics)])

    def put_all(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Queue rows for the tracker."""
        if not self._is_off:
            self._rows.extend(rows)
        self._put += len(rows)

    def wake(self) -> None:
        """Make the thread hand over the queued rows."""
        if not self._is_full and len(self._rows) == self._capacity:
            self._is_full = True
            self._notice(
                f"tracker {self.name} cannot keep up: {self._capacity:,} rows wait for it, "
                "the oldest are dropped; the local log has them"
            )
        self._work.set()

    def flush(self) -> None:
        """Request that all rows so far are handed over and flushed; returns at once."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            self._requested += 1
        self._work.set()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether every `flush` requested so far is done within this time."""
        if os.getpid() != self._pid:
            return True
        with self._idle:
            requested = self._requested
            return self._idle.wait_for(lambda: self._flushed >= requested or not self._is_alive(), timeout_s)

    def ask_to_finish(self, summary: Mapping[str, Any]) -> None:
        """Request that the remaining rows are handed over and the tracker finished; returns at once."""
        if self._finish_requested_s is None:
            self._finish_requested_s = self._clock()
        try:
            self._summary = deepcopy(dict(summary))
        except Exception as error:  # its rows are finished anyway
            self._summary = {}
            self._notice(f"tracker {self.name} gets no summary: {one_line(error)}")
        self._work.set()

    def close(self, summary: Mapping[str, Any], timeout_s: float) -> None:
        """Hand over the remaining rows and finish the tracker; always returns within the timeout."""
        if self._is_closed or os.getpid() != self._pid:
            return
        if self._thread is not None:
            self.ask_to_finish(summary)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                assert self._finish_requested_s is not None
                waited_s = round(self._clock() - self._finish_requested_s, 1)
                self._taken, self._at_risk = self._taken - self._at_risk, 0
                self._switch_off(
                    f"it did not finish within {waited_s:g} s", then="its remaining data is lost"
                )
        self._is_closed = True

    @property
    def lost_rows(self) -> int:
        """Queued rows that can no longer reach the tracker."""
        under_way = 0 if self._is_closed or self._is_off else len(self._rows) + self._in_hand
        return max(0, self._put - self._taken - under_way)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _live(self, run: Mapping[str, Any]) -> None:
        """The thread: exceptions of the tracker do not propagate."""
        try:
            self._tracker.start(run)
            while not self._is_off:
                self._work.wait(
                    None if self._flush_due_s is None else max(self._flush_due_s - self._clock(), 0)
                )
                # Read before the rows: rows queued before a flush or a close are then handed over before it.
                requested, summary = self._requested, self._summary
                self._hand_over()
                if (requested > self._flushed or self._flush_is_due()) and not self._is_off:
                    self._at_risk = self._unflushed
                    self._flush_tracker()
                    self._answer(requested)
                if summary is not None and not self._is_off:
                    self._at_risk = self._unflushed
                    self._tracker.finish(summary)
                    return
        except BaseException as problem:
            self._taken -= self._at_risk  # rows that were handed over but not written are lost too
            self._switch_off(one_line(problem), then="it is switched off, its further rows are lost")
        finally:
            self._answer(self._requested)

    def _flush_tracker(self) -> None:
        """Flush the tracker; if it keeps its rows for now, flush it again soon."""
        try:
            self._tracker.flush()
        except WriteLater as problem:
            self._flush_due_s = self._clock() + _RETRY_S
            if not self._is_postponed:
                self._notice(f"tracker {self.name} cannot write now, its rows are kept for later: {problem}")
            self._is_postponed = True
        else:
            self._unflushed = 0
            self._flush_due_s = None
        self._at_risk = 0

    def _flush_is_due(self) -> bool:
        now_s = self._clock()
        if self._flush_due_s is None and self._unflushed and self._flush_every_s is not None:
            self._flush_due_s = now_s + self._flush_every_s
        return self._flush_due_s is not None and now_s >= self._flush_due_s

    def _hand_over(self) -> None:
        rows, log = self._rows, self._tracker.log
        while rows and not self._is_off:
            self._in_hand = 1
            step, metrics = rows.popleft()
            log(step, dict(metrics))
            self._taken += 1
            self._in_hand = 0
            self._unflushed += 1

    def _switch_off(self, problem: str, *, then: str) -> None:
        if self._is_off:
            return
        self._is_off = True
        self._rows.clear()
        self.error = problem
        self._notice(f"tracker {self.name} failed: {problem}; {then}")

    def _answer(self, requested: int) -> None:
        with self._idle:
            self._flushed = requested
            self._idle.notify_all()
