"""A thread for each tracker, so that one that is slow, hangs or raises delays nothing else.

    put ─► rows (bounded) ─► the lane's thread ─► tracker.log

The thread sleeps until `wake`, `flush` or `close`, or until a flush is due: until then rows wait. A full lane
drops its oldest row. A tracker that raises is switched off, with one warning, and the rows it did not get are
counted; one that raises `WriteLater` is flushed again later. The thread is a daemon and exists only in the
process that started it: a forked worker that inherits a lane writes nothing. Each tracker gets its own
copies, so one that changes them affects no other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..errors import one_line
from .base import Tracker, WriteLater
from .wake import Wake

_RETRY_S = 5.0
"""How long to wait before a tracker that could not write is flushed again."""


class _Rows:
    """The rows of a lane, and what became of them; a row that comes when it is full replaces the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=capacity)
        self._put = self._taken = self.unflushed = 0
        self._in_hand = 0
        """Rows that the tracker is taking or writing."""
        self.is_over = False
        """Whether no row can reach the tracker any more."""

    @property
    def is_full(self) -> bool:
        return len(self._waiting) == self.capacity

    @property
    def lost(self) -> int:
        under_way = 0 if self.is_over else len(self._waiting) + self._in_hand
        return max(0, self._put - self._taken - under_way)

    def put(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        if not self.is_over:
            self._waiting.extend(rows)
        self._put += len(rows)

    def hand_over(self, log: Callable[[int, Mapping[str, Any]], None]) -> None:
        while self._waiting and not self.is_over:
            self._in_hand = 1
            step, metrics = self._waiting.popleft()
            log(step, dict(metrics))
            self._taken += 1
            self._in_hand = 0
            self.unflushed += 1

    @contextlib.contextmanager
    def at_risk(self) -> Iterator[None]:
        """While the tracker writes what it has: if that raises or hangs, those rows are lost."""
        unwritten = self._in_hand = self.unflushed
        self._taken -= unwritten
        yield
        self._taken += unwritten
        self._in_hand = 0

    def give_up(self) -> None:
        if not self._in_hand:  # between two calls of the tracker: it will not write what it has
            self._taken -= self.unflushed
            self.unflushed = 0
        self.is_over = True
        self._waiting.clear()


class _Flushes:
    """When the tracker is to be flushed: on request, and `every_s` after a row that has not been."""

    def __init__(self, every_s: float | None, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._due_s: float | None = None
        self._idle = threading.Condition()
        self.requested = self._done = 0

    def request(self) -> None:
        with self._idle:
            self.requested += 1

    def answer(self, requested: int) -> None:
        with self._idle:
            self._done = requested
            self._idle.notify_all()

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Whether every request so far is answered within this time, or nobody is left to do so."""
        with self._idle:
            requested = self.requested
            return self._idle.wait_for(lambda: self._done >= requested or is_over(), timeout_s)

    def is_due(self, requested: int, *, has_unflushed: bool) -> bool:
        now_s = self._clock()
        if self._due_s is None and has_unflushed and self._every_s is not None:
            self._due_s = now_s + self._every_s
        return requested > self._done or (self._due_s is not None and now_s >= self._due_s)

    def again_in(self, seconds: float | None) -> None:
        """The tracker was flushed: when to do it again without a request, None for not before another row."""
        self._due_s = None if seconds is None else self._clock() + seconds

    @property
    def until_due_s(self) -> float | None:
        return None if self._due_s is None else max(self._due_s - self._clock(), 0)


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
        self._tracker, self._notice, self._clock = tracker, notice, clock
        self._rows, self._flushes = _Rows(capacity), _Flushes(flush_every_s, clock)
        self._work = Wake()
        self._summary: Mapping[str, Any] | None = None
        self._finish_requested_s: float | None = None
        self._is_closed = False
        self._was_full = self._is_postponed = False
        """What happened, with one warning each."""
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
        self._rows.put(rows)

    def wake(self) -> None:
        """Make the thread hand over the queued rows."""
        if not self._was_full and self._rows.is_full:
            self._was_full = True
            self._notice(
                f"tracker {self.name} cannot keep up: {self._rows.capacity:,} rows are waiting, and "
                "the oldest are dropped; the local log has all rows"
            )
        self._work.set()

    def flush(self) -> None:
        """Request that all rows so far are handed over and flushed; returns at once."""
        if os.getpid() == self._pid:
            self._flushes.request()
            self._work.set()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether every `flush` requested so far is done within this time."""
        return os.getpid() != self._pid or self._flushes.wait(lambda: not self._is_alive(), timeout_s)

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
                self._switch_off(
                    f"it did not finish within {waited_s:g} s", then="its remaining data is lost"
                )
        self._is_closed = self._rows.is_over = True

    @property
    def lost_rows(self) -> int:
        """Queued rows that can no longer reach the tracker."""
        return self._rows.lost

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _live(self, run: Mapping[str, Any]) -> None:
        """The thread: exceptions of the tracker do not propagate."""
        rows, flushes = self._rows, self._flushes
        try:
            self._tracker.start(run)
            while not rows.is_over:
                self._work.wait(flushes.until_due_s)
                # Read before the rows: rows queued before a flush or a close are then handed over before it.
                requested, summary = flushes.requested, self._summary
                rows.hand_over(self._tracker.log)
                if flushes.is_due(requested, has_unflushed=rows.unflushed > 0) and not rows.is_over:
                    self._flush_tracker()
                    flushes.answer(requested)
                if summary is not None and not rows.is_over:
                    with rows.at_risk():
                        self._tracker.finish(summary)
                    return
        except BaseException as problem:
            self._switch_off(one_line(problem), then="it is switched off, its further rows are lost")
        finally:
            flushes.answer(flushes.requested)

    def _flush_tracker(self) -> None:
        """Flush the tracker; if it keeps its rows for now, flush it again soon."""
        with self._rows.at_risk():
            try:
                self._tracker.flush()
            except WriteLater as problem:
                self._flushes.again_in(_RETRY_S)
                if not self._is_postponed:
                    self._notice(
                        f"tracker {self.name} cannot write now; its rows are kept for later: {problem}"
                    )
                self._is_postponed = True
            else:
                self._rows.unflushed = 0
                self._flushes.again_in(None)

    def _switch_off(self, problem: str, *, then: str) -> None:
        if self.error is None:
            self.error = problem
            self._rows.give_up()
            self._notice(f"tracker {self.name} failed: {problem}; {then}")
