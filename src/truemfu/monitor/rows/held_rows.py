"""Rows of rank 0 that wait until all ranks have reported what they did in the same step.

    rows ── put ──► held ── release ──► row with the job's figures, or without them

A row is released in its order: once all ranks have reported its step, or after a limit, or when a caller
waits for rows, or when no report can be expected, since there never was a process group or its store failed.
A rank that was too late once is not waited for again until it reports. Without the amounts of all ranks the
figures of the job are unknown, never guessed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ..ranks.amounts import Amounts, StepKey
from ..ranks.job_view import JobView
from ..ranks.reporter import ROW_EVERY_S, send_every_s
from ..ranks.row_exchange import read_every_s
from ..ranks.this_rank import ThisRank

T = TypeVar("T")

HOLD_S = 2 * ROW_EVERY_S
"""After that time, and the time a message takes, a row is released without the figures of the job."""
_MOST_HELD = 5_000
_UNKNOWN = "the figures of the job are unknown for some steps"


class HeldRows(Generic[T]):
    """Lives on the row thread."""

    def __init__(
        self,
        ranks: ThisRank,
        job: JobView,
        notice: Callable[..., None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._job, self._notice, self._clock = ranks, job, notice, clock
        self._rows: deque[tuple[T, StepKey, float]] = deque()
        """Each with the time since which it is held."""
        self._release_at_s: float | None = None
        self._message_s = send_every_s(job.world_size) + read_every_s(job.world_size)

    def __len__(self) -> int:
        return len(self._rows)

    def release_in(self, seconds: float | None) -> None:
        """Release all rows after this time, reported by all ranks or not: no more of them will follow."""
        self._release_at_s = None if seconds is None else self._clock() + seconds

    def put(self, row: T, key: StepKey) -> None:
        """Hold a row."""
        self._rows.append((row, key, self._clock()))

    def release(self, *, is_awaited: bool) -> list[tuple[T, Amounts | None]]:
        """The rows that wait no longer, each with the sums over the other ranks, or None."""
        found: list[tuple[T, Amounts | None]] = []
        while self._rows:
            row, key, since_s = self._rows[0]
            others = self._job.step(key)
            if others is None:
                if (
                    self._job.is_waiting_for(key)
                    and self._ranks.expects_reports
                    and not self._is_over(since_s)
                ):
                    break
                self._report(key, is_awaited=is_awaited)
            self._rows.popleft()
            found.append((row, others))
        return found

    def _is_over(self, since_s: float) -> bool:
        now_s = self._clock()
        return (
            now_s > since_s + HOLD_S + self._message_s
            or (self._release_at_s is not None and now_s > self._release_at_s)
            or len(self._rows) > _MOST_HELD
        )

    def _report(self, key: StepKey, *, is_awaited: bool) -> None:
        missing = self._job.go_without(key)
        failure = self._ranks.store.failure
        if failure is not None:
            self._notice(f"{failure}; {_UNKNOWN}, first for step {key.step}", about="job figures")
        elif not self._ranks.is_connected:
            self._ranks.note(f"there was no process group to reach the other ranks; {_UNKNOWN}")
        elif is_awaited:
            self._ranks.note(f"some ranks did not report their last steps in time; {_UNKNOWN}")
        else:
            limit_s = HOLD_S + self._message_s
            text = f"{missing} did not report within {limit_s:.0f} s; {_UNKNOWN}, first for step {key.step}"
            self._notice(text, about="job figures")
