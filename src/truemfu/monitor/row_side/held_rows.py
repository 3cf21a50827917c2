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
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..ranks.job import Job
from ..ranks.job_sums import JobStep
from ..ranks.reporter import ROW_EVERY_S, send_every_s
from ..ranks.row_exchange import read_every_s

T = TypeVar("T")

HOLD_S = 2 * ROW_EVERY_S
"""After that time, and the time a message takes, a row is released without the figures of the job."""
SAVE_HOLD_S = 1.0
"""How long a caller that saves waits for other ranks, from when its own steps are ready on.

Ranks that save as well report at once.
"""
_MOST_HELD = 5_000


@dataclass(frozen=True)
class _Held(Generic[T]):
    row: T
    era: int
    step: int
    stride: int
    since_s: float


class HeldRows(Generic[T]):
    """Lives on the row thread."""

    def __init__(
        self,
        job: Job,
        *,
        is_connected: Callable[[], bool],
        expects_reports: Callable[[], bool],
        notice: Callable[..., None],
        note: Callable[[str], None],
        failure: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._clock = job, clock
        self._is_connected, self._expects_reports = is_connected, expects_reports
        self._notice, self._note, self._failure = notice, note, failure
        self._rows: deque[_Held[T]] = deque()
        self._release_at_s: float | None = None
        self._message_s = send_every_s(job.world_size) + read_every_s(job.world_size)

    def __len__(self) -> int:
        return len(self._rows)

    def release_in(self, seconds: float | None) -> None:
        """Release all rows after this time, reported by all ranks or not: no more of them will follow."""
        self._release_at_s = None if seconds is None else self._clock() + seconds

    def put(self, row: T, era: int, step: int, stride: int) -> None:
        """Hold a row."""
        self._rows.append(_Held(row, era, step, stride, self._clock()))

    def release(self, *, is_awaited: bool) -> list[tuple[T, JobStep | None]]:
        """The rows that wait no longer, each with the sums over the other ranks, or None."""
        if not self._rows:
            return []
        now_s = self._clock()
        expects_reports = self._expects_reports()
        found: list[tuple[T, JobStep | None]] = []
        while self._rows:
            held = self._rows[0]
            waiting = self._job.waiting_for(held.era, held.step)
            if waiting and expects_reports and not self._is_over(held, now_s):
                break
            self._rows.popleft()
            if waiting:
                self._job.give_up(waiting)
            others = self._job.step(held.era, held.step, held.stride)
            if others is None:
                self._report(held.step, is_awaited=is_awaited)
            found.append((held.row, others))
        return found

    def _is_over(self, held: _Held[T], now_s: float) -> bool:
        return (
            now_s > held.since_s + HOLD_S + self._message_s
            or (self._release_at_s is not None and now_s > self._release_at_s)
            or len(self._rows) > _MOST_HELD
        )

    def _report(self, step: int, *, is_awaited: bool) -> None:
        missing = self._job.is_incomplete(step)
        then = f"the figures of the job are unknown for some steps, first for step {step}"
        failure = self._failure()
        if failure is not None:
            self._notice(f"{failure}; {then}", about="job figures")
        elif not self._is_connected():
            self._note(f"there was no process group to reach the other ranks; {_without_step(then)}")
        elif is_awaited:
            self._note(f"some ranks did not report their last steps in time; {_without_step(then)}")
        else:
            limit_s = HOLD_S + self._message_s
            self._notice(f"{missing} did not report within {limit_s:.0f} s; {then}", about="job figures")


def _without_step(text: str) -> str:
    """A note is kept once by its text: the summary's scope has the step."""
    return text.partition(", first")[0]
