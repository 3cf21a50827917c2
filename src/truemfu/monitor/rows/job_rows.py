"""Rows of a rank in a job: each step is reported, and rank 0 waits for what the others did in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ..metrics import LastAmounts, StepAmounts, StepTime
from ..notices import Notices
from ..ranks.amounts import Exact
from ..ranks.job_sums import JobStep
from ..ranks.reporter import RankReporter
from ..ranks.this_rank import ThisRank
from ..step_note import StepPosition
from .held_rows import HeldRows

_SHORTEST_PAUSE_S = 0.1
T = TypeVar("T")


class JobRows(Generic[T]):
    """Lives on the row thread of each rank; only rank 0 holds rows back."""

    def __init__(self, rank: ThisRank, reporter: RankReporter, notices: Notices) -> None:
        self._rank, self._reporter = rank, reporter
        self._ready: list[tuple[T, StepAmounts]] = []
        self._held: HeldRows[tuple[T, StepAmounts]] | None = None
        if rank.job is not None:
            self._held = HeldRows(rank, rank.job, notices)
        self._last = LastAmounts()
        self._last_sums: tuple[JobStep, dict[str, Exact], JobStep] | None = None

    @property
    def held(self) -> int:
        """How many rows wait for other ranks."""
        return 0 if self._held is None else len(self._held)

    @property
    def due_in_s(self) -> float:
        """Seconds until the next report."""
        return max(_SHORTEST_PAUSE_S, self._reporter.due_in_s)

    def release_in(self, seconds: float | None) -> None:
        """Release all rows after this time, reported by all ranks or not: no more of them will follow."""
        if self._held is not None:
            self._held.release_in(seconds)

    def put(self, row: T, position: StepPosition, amounts: StepAmounts, took: StepTime) -> None:
        """Report what this rank did in a step; the row is released in its order."""
        key = self._reporter.add(
            *position,
            took.elapsed_s,
            took.data_wait_s,
            paused_s=sum(took.left_out_s.values()),
            is_warmup=amounts.warmup,
            amounts=amounts.shares,
        )
        if self._held is None:
            self._ready.append((row, amounts))
        else:
            self._held.put((row, amounts), key)

    def release(self, *, is_awaited: bool) -> Sequence[tuple[T, StepAmounts]]:
        """The rows that are due, with the amounts of the whole job where all ranks have reported."""
        if self._held is None:
            ready, self._ready = self._ready, []
            return ready
        if is_awaited and self._held:
            self._rank.store.read_soon()
        return [
            (row, self._in_job(amounts, others))
            for (row, amounts), others in self._held.release(is_awaited=is_awaited)
        ]

    def tick(self, *, is_awaited: bool) -> None:
        """Send what is due."""
        self._reporter.tick(now=is_awaited)

    def metrics(self) -> dict[str, Any]:
        """On rank 0: the metrics of the job's ranks."""
        return {} if self._rank.job is None else self._rank.job.metrics()

    def _in_job(self, amounts: StepAmounts, others: JobStep | None) -> StepAmounts:
        """The amounts with the sums over all ranks; the last step's object if it is the same."""
        job = None
        if others is not None:
            last, shares = self._last_sums, amounts.shares
            if last is None or last[0] is not others or last[1] is not shares:
                sums = {name: total + shares[name] for name, total in others.sums.items() if name in shares}
                self._last_sums = last = others, shares, JobStep(sums)
            job = last[2]
        return self._last.same_as(replace(amounts, job=job))
