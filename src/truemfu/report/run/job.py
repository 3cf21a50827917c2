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
from .log_rows import LogRows, peak_flops_per_s

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
    flops: float = 0.0
    """Of one device."""
    unknown: int = 0
    """Steps whose FLOPs or time are unknown."""

    def add(self, rows: LogRows, until_step: float, *, from_there: bool) -> None:
        rates = rows.column("tflops_per_gpu")
        for step, step_s, tflops in zip(rows.steps, rows.column("step_time_s"), rates, strict=True):
            if (step >= until_step) == from_there:
                self.steps += 1
                self.seconds += 0.0 if isnan(step_s) else step_s
                if isnan(step_s) or isnan(tflops):
                    self.unknown += 1
                else:
                    self.flops += 1e12 * tflops * step_s


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
    begins = [start.process_began_at_s or start.began_at_s for start in starts]
    ends = [
        max(begin, _end_of(start, written_at_s if start is starts[-1] else None))
        for start, begin in zip(starts, begins, strict=True)
    ]
    limits = [
        min((min(later.steps) for later in rows[number + 1 :] if later), default=float("inf"))
        for number in range(len(rows))
    ]
    counted = [_Sums() for _ in starts]
    parts = dict.fromkeys((COUNTED, REPEATED, START_UP, QUEUED, *_PAUSES), 0.0)
    for start, own, sums, begin, limit in zip(starts, rows, counted, begins, limits, strict=True):
        again = _Sums()
        sums.add(own, limit, from_there=False)
        again.add(own, limit, from_there=True)
        parts[COUNTED] += sums.seconds
        parts[REPEATED] += again.seconds
        parts[START_UP] += max(0.0, start.began_at_s - begin)
        for name, column in _PAUSES.items():
            parts[name] += sum(seconds for seconds in own.column(column) if not isnan(seconds))
    queued_s = max(0.0, begins[0] - (starts[0].allocation_began_at_s or begins[0]))
    parts[QUEUED] = queued_s
    up = [end - begin for begin, end in zip(begins, ends, strict=True)]
    up[0] += queued_s
    gaps = [max(0.0, begin - end) for end, begin in zip(ends, begins[1:], strict=False)]
    is_held = [
        one.allocation is not None and one.allocation == two.allocation for one, two in pairwise(starts)
    ]
    held = [
        seconds + (gap if known else 0.0)
        for seconds, gap, known in zip(up, [*gaps, 0.0], [*is_held, True], strict=True)
    ]
    with_gaps = [seconds + gap for seconds, gap in zip(up, [*gaps, 0.0], strict=True)]
    parts[REST] = max(0.0, sum(up) - sum(parts.values()))
    parts[BETWEEN] = sum(gaps)

    devices = [start.devices for start in starts]
    good = sum(n * sums.seconds for n, sums in zip(devices, counted, strict=True))
    flops = sum(n * sums.flops for n, sums in zip(devices, counted, strict=True))
    peaks = (peak_flops_per_s(own) for own in reversed(rows))
    peak, why = next((found for found in peaks if found is not None), None), None
    unknown = sum(sums.unknown for sums in counted)
    if unknown:
        why = f"the FLOPs of {unknown:,} of {sum(sums.steps for sums in counted):,} steps are unknown"
    elif peak is None:
        why = "no peak is known"

    def figures(seconds: Sequence[float]) -> Held:
        device_s = sum(n * own for n, own in zip(devices, seconds, strict=True))
        return Held(
            seconds=sum(seconds),
            goodput=good / device_s if device_s else None,
            job_mfu=None if why is not None or peak is None or not device_s else flops / peak / device_s,
        )

    return Job(
        starts=tuple(
            _shown(start, own, sums, begin, end, is_last=start is starts[-1])
            for start, own, sums, begin, end in zip(starts, rows, counted, begins, ends, strict=True)
        ),
        parts=tuple((name, seconds) for name, seconds in parts.items() if seconds > 0),
        held=figures(held),
        with_gaps=figures(with_gaps) if sum(held) < sum(with_gaps) else None,
        step_mfu=None if why is not None or peak is None or not good else flops / peak / good,
        mfu_unknown=why,
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
