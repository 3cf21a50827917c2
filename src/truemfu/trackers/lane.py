"""A thread for each tracker, so that one that is slow, hangs or raises holds up nobody.

    put ─► rows (bounded) ─► the lane's thread ─► tracker.log

The thread sleeps until `wake`, `flush` or `close`, or until rows are to be flushed: rows put without one of
them wait. A full lane drops its oldest row. A tracker that raises is switched off, with one warning, and what
it did not get is counted; one that keeps its rows because it cannot write now is asked again. The thread is a
daemon and exists only in the process that started it: a forked worker that inherits a lane writes nothing.
What a tracker is given is its own copy: one that changes it changes it for no other.
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

_AGAIN_S = 5.0
"""Until a tracker that could not write is asked again."""


class Lane:
    """Hands rows to one tracker, in order, from a thread of its own.

    With `flush_every_s` the tracker is also told to write by itself, once a row has waited for that long.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        *,
        capacity: int = 20_000,
        flush_every_s: float | None = None,
        notice: Callable[[str], None],
    ) -> None:
        self.name = name
        self.error: str | None = None
        self._tracker = tracker
        self._notice = notice
        self._capacity = capacity
        self._flush_every_s = flush_every_s
        self._flush_due_s: float | None = None
        self._rows: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=capacity)
        self._work = Wake()
        self._idle = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._put = 0
        self._taken = 0
        self._in_hand = 0
        self._unflushed = 0
        self._at_risk = 0
        self._summary: Mapping[str, Any] | None = None
        self._finish_asked_s: float | None = None
        self._is_off = False
        self._is_full = False
        self._is_put_off = False
        """Whether the tracker could not write once; that is said once."""
        self._is_closed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Start the thread, which first tells the tracker about the run."""
        self._thread = threading.Thread(
            target=self._live, args=(deepcopy(dict(run)),), name=f"truemfu-{self.name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Leave a row for the tracker: never blocks, never raises. One thread puts."""
        self.put_all([(step, metrics)])

    def put_all(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Leave rows for the tracker."""
        if not self._is_off:
            self._rows.extend(rows)
        self._put += len(rows)

    def wake(self) -> None:
        """Let the thread hand over what was put."""
        if not self._is_full and len(self._rows) == self._capacity:
            self._is_full = True
            self._notice(
                f"tracker {self.name} cannot keep up: {self._capacity:,} rows wait for it, "
                "the oldest are dropped; the local log has them"
            )
        self._work.set()

    def flush(self) -> None:
        """Ask for all rows put so far to be handed over and flushed; returns at once."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            self._asked += 1
        self._work.set()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether every `flush` asked for so far has been answered within this time."""
        if os.getpid() != self._pid:
            return True
        with self._idle:
            asked = self._asked
            return self._idle.wait_for(lambda: self._answered >= asked or not self._is_alive(), timeout_s)

    def ask_to_finish(self, summary: Mapping[str, Any]) -> None:
        """Let the thread hand over the rest and finish the tracker; returns at once."""
        if self._finish_asked_s is None:
            self._finish_asked_s = time.monotonic()
        try:
            self._summary = deepcopy(dict(summary))
        except Exception as error:  # its rows are finished all the same
            self._summary = {}
            self._notice(f"tracker {self.name} gets no summary: {one_line(error)}")
        self._work.set()

    def close(self, summary: Mapping[str, Any], timeout_s: float) -> None:
        """Hand over the rest, finish the tracker; back within the timeout, whatever the tracker does."""
        if self._is_closed or os.getpid() != self._pid:
            return
        if self._thread is not None:
            self.ask_to_finish(summary)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                assert self._finish_asked_s is not None
                waited_s = round(time.monotonic() - self._finish_asked_s, 1)
                self._taken, self._at_risk = self._taken - self._at_risk, 0
                self._switch_off(f"it did not finish within {waited_s:g} s", then="what it still had is lost")
        self._is_closed = True

    @property
    def lost_rows(self) -> int:
        """Rows that were put and did not reach the tracker, nor can any more."""
        under_way = 0 if self._is_closed or self._is_off else len(self._rows) + self._in_hand
        return max(0, self._put - self._taken - under_way)

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _live(self, run: Mapping[str, Any]) -> None:
        """The thread: nothing the tracker raises leaves it."""
        try:
            self._tracker.start(run)
            while not self._is_off:
                self._work.wait(
                    None if self._flush_due_s is None else max(self._flush_due_s - time.monotonic(), 0)
                )
                # Read before the rows: what was put before a flush or a close is then handed over before it.
                asked, summary = self._asked, self._summary
                self._hand_over()
                if (asked > self._answered or self._flush_is_due()) and not self._is_off:
                    self._at_risk = self._unflushed
                    self._flush_tracker()
                    self._answer(asked)
                if summary is not None and not self._is_off:
                    self._at_risk = self._unflushed
                    self._tracker.finish(summary)
                    return
        except BaseException as problem:
            self._taken -= self._at_risk  # what was taken and could not be written is lost too
            self._switch_off(one_line(problem), then="it is switched off, its rows are lost from here on")
        finally:
            self._answer(self._asked)

    def _flush_tracker(self) -> None:
        """Let the tracker write; one that keeps its rows for now is asked again soon."""
        try:
            self._tracker.flush()
        except WriteLater as problem:
            self._flush_due_s = time.monotonic() + _AGAIN_S
            if not self._is_put_off:
                self._notice(f"tracker {self.name} cannot write now, its rows are kept: {problem}")
            self._is_put_off = True
        else:
            self._unflushed = 0
            self._flush_due_s = None
        self._at_risk = 0

    def _flush_is_due(self) -> bool:
        now_s = time.monotonic()
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

    def _answer(self, asked: int) -> None:
        with self._idle:
            self._answered = asked
            self._idle.notify_all()
