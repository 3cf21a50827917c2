"""What a job got out of the devices it held, over all starts of its run.

    starts of the run file ─► the time that was held ─┐
    rows of each start     ─► steps that counted ─────┴─► goodput, job MFU, and where the rest went

A start that begins at step n takes back what earlier starts did from step n on: their rows from there were
done again, or are lost. A killed start ended with the last write to its log. The time between two starts was
held for certain if both were in one allocation of a scheduler; else there are figures with it and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from math import isnan

from ...records import RunStart
from .log_rows import LogRows

_PAUSES = {
    "evaluation": "evaluation_s",
    "checkpoints": "checkpoint_s",
    "generation": "generation_s",
    "other pauses": "other_pause_s",
}
COUNTED = "steps that counted"
REPEATED = "steps done again or lost"
START_UP = "start-up, up to the first batch"
QUEUED = "from the allocation to the first process"
REST = "rest: before the first step and after the last, steps not on disk"
BETWEEN = "between starts"
_AFTER_SIGNAL_S = 5.0
"""A program that writes its log for longer has gone on."""


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """One start as the views show it."""

    began_at: str
    seconds: float
    ended: str
    first_step: int | None
    last_step: int | None
    steps: int
    counted: int
    """Steps that no later start did again."""
    where: str


@dataclass(frozen=True, kw_only=True)
class Held:
    """Shares of the time that was held, weighted by the devices of each start; None where unknown."""

    seconds: float
    goodput: float | None
    job_mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """All starts of a run."""

    starts: tuple[JobStart, ...]
    parts: tuple[tuple[str, float], ...]
    """Seconds of each part of the time from the first start to the last end."""
    held: Held
    """The time that was held for certain."""
    with_gaps: Held | None
    """With the time between starts too; None if there is none, or if it is held for certain."""
    step_mfu: float | None
    """The mean of the steps that counted."""
    mfu_unknown: str | None


@dataclass
class _Sums:
    steps: int = 0
    seconds: float = 0.0
    at_peak_s: float = 0.0
    """How long the FLOPs would take at the peak of all devices."""
    without_mfu: int = 0
    without_flops: int = 0

    def add(self, rows: LogRows, until_step: float, *, from_there: bool) -> None:
        """Add the rows before this step, or those from it on; a row may stand for several steps."""
        names = ("step_time_s", "mfu", "tflops_per_gpu")
        before: int | None = None
        for step, step_s, mfu, tflops in zip(rows.steps, *map(rows.column, names), strict=True):
            number = step - before if before is not None and step > before else 1
            before = step
            if (step >= until_step) != from_there:
                continue
            self.steps += number
            self.seconds += 0.0 if isnan(step_s) else number * step_s
            if isnan(step_s) or isnan(mfu):
                self.without_mfu += number
                self.without_flops += number * (isnan(step_s) or isnan(tflops))
            else:
                self.at_peak_s += number * step_s * mfu


def positions_of(starts: Sequence[RunStart]) -> list[int]:
    """Where the rows of each start begin in the log: one without rows begins where the next does."""
    found, following = [], 1 << 62
    for start in reversed(starts):
        following = following if start.log_begins_at is None else min(following, start.log_begins_at)
        found.append(following)
    return found[::-1]


def job_of(starts: Sequence[RunStart], rows: Sequence[LogRows], written_at_s: float | None) -> Job | None:
    """The figures of the whole job; None without recorded starts. `written_at_s` is that of the log."""
    if not starts or len(rows) != len(starts):
        return None
    limits = _first_steps_after(rows)
    counted = [_Sums() for _ in starts]
    parts = dict.fromkeys((COUNTED, REPEATED, START_UP, QUEUED, *_PAUSES), 0.0)
    begins: list[float] = []
    ends: list[float] = []
    of_one = [_is_same(one, two) for one, two in pairwise(starts)]
    for number, (start, own, sums, limit) in enumerate(zip(starts, rows, counted, limits, strict=True)):
        again = _Sums()
        sums.add(own, limit, from_there=False)
        again.add(own, limit, from_there=True)
        paused = {
            name: sum(seconds for seconds in own.column(column) if not isnan(seconds))
            for name, column in _PAUSES.items()
        }
        before = ends[-1] if ends else 0.0  # a process may have several runs one after another
        process_s = min(start.began_at_s, max(start.process_began_at_s or start.began_at_s, before))
        begin = process_s
        if start.allocation_began_at_s is not None and not (number and of_one[number - 1]):
            begin = min(process_s, max(start.allocation_began_at_s, before))
        seen_s = sums.seconds + again.seconds + sum(paused.values())
        last_write_s = written_at_s if start is starts[-1] else None
        parts[COUNTED] += sums.seconds
        parts[REPEATED] += again.seconds
        parts[START_UP] += start.began_at_s - process_s
        parts[QUEUED] += process_s - begin
        for name, seconds in paused.items():
            parts[name] += seconds
        begins.append(begin)
        ends.append(max(_end_of(start, last_write_s), start.began_at_s + seen_s))
    up = [end - begin for begin, end in zip(begins, ends, strict=True)]
    held, with_gaps = list(up), list(up)
    gaps = [max(0.0, begin - end) for end, begin in zip(ends, begins[1:], strict=False)]
    for number, (gap, is_held) in enumerate(zip(gaps, of_one, strict=True)):
        with_gaps[number] += gap
        held[number] += gap * is_held
    parts[REST] = max(0.0, sum(up) - sum(parts.values()))
    parts[BETWEEN] = sum(gaps)

    devices = [start.devices for start in starts]
    good = sum(n * sums.seconds for n, sums in zip(devices, counted, strict=True))
    at_peak = sum(n * sums.at_peak_s for n, sums in zip(devices, counted, strict=True))
    why = None
    if without := sum(sums.without_mfu for sums in counted):
        of_all = f"{without:,} of {sum(sums.steps for sums in counted):,} steps"
        has_flops = not any(sums.without_flops for sums in counted)
        why = "no peak is known" if has_flops else f"the FLOPs of {of_all} are unknown"

    def figures(seconds: Sequence[float]) -> Held:
        device_s = sum(n * own for n, own in zip(devices, seconds, strict=True))
        return Held(
            seconds=sum(seconds),
            goodput=good / device_s if device_s else None,
            job_mfu=None if why is not None or not device_s else at_peak / device_s,
        )

    return Job(
        starts=tuple(
            _shown(start, own, sums, begin, end, is_last=start is starts[-1])
            for start, own, sums, begin, end in zip(starts, rows, counted, begins, ends, strict=True)
        ),
        parts=tuple((name, seconds) for name, seconds in parts.items() if seconds > 0),
        held=figures(held),
        with_gaps=figures(with_gaps) if sum(held) < sum(with_gaps) else None,
        step_mfu=None if why is not None or not good else at_peak / good,
        mfu_unknown=why,
    )


def _first_steps_after(rows: Sequence[LogRows]) -> list[float]:
    """For each start the first step of all later ones."""
    found, first = [], float("inf")
    for own in reversed(rows):
        found.append(first)
        first = min(first, min(own.steps, default=first))
    return found[::-1]


def _is_same(one: RunStart, two: RunStart) -> bool:
    """Whether both were in one allocation; a job that Slurm has queued again has another begin."""
    return (
        one.allocation is not None
        and one.allocation == two.allocation
        and one.allocation_began_at_s == two.allocation_began_at_s
    )


def _end_of(start: RunStart, written_at_s: float | None) -> float:
    if start.ended_at_s is not None:
        return start.ended_at_s
    known = (start.signal_at_s, start.last_write_at_s, written_at_s, start.began_at_s)
    return max(at_s for at_s in known if at_s is not None)


def _shown(
    start: RunStart, rows: LogRows, counted: _Sums, begin: float, end: float, *, is_last: bool
) -> JobStart:
    devices = start.device or "device unknown"
    if start.devices > 1:
        devices = f"{start.devices} × {devices}"
    return JobStart(
        began_at=f"{datetime.fromtimestamp(begin, timezone.utc):%Y-%m-%d %H:%M:%S}",
        seconds=end - begin,
        ended=_how(start, end, is_last=is_last),
        first_step=min(rows.steps) if rows else None,
        last_step=max(rows.steps) if rows else None,
        steps=len(rows),
        counted=counted.steps,
        where=devices if start.host is None else f"{devices}, {start.host}",
    )


def _how(start: RunStart, end: float, *, is_last: bool) -> str:
    if start.ended_by is not None:
        is_memory = "outofmemory" in start.ended_by.lower().replace(" ", "")
        return f"out of memory: {start.ended_by}" if is_memory else start.ended_by
    if start.ended_at_s is not None:
        return "finished" if start.signal_at_s is None else "finished, after SIGTERM or SIGHUP"
    if start.signal_at_s is not None and end - start.signal_at_s < _AFTER_SIGNAL_S:
        return "SIGTERM or SIGHUP"
    return "running, or killed" if is_last else "killed"
