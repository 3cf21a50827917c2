"""What a job got out of the devices it held, over all starts of its run.

    starts of the run file ─► the time that was held ─┐
    rows of each start     ─► steps that counted ─────┴─► goodput, job MFU, and where the rest went

A start that begins at step n takes back what earlier starts did from step n on: their rows from there were
done again, or are lost. A killed start ended with the last write to its log. The time between two starts was
held for certain if both were in one allocation of a scheduler; else there are figures with it and without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from math import isnan

from ...records import RunStart
from .log_rows import PAUSES, LogRows

COUNTED = "steps that counted"
REPEATED = "steps done again or lost"
START_UP = "start-up, up to the first batch"
QUEUED = "from the allocation to the first process"
REST = "rest: before the first step and after the last, steps not on disk"
BETWEEN = "between starts"
_PAUSED = "pauses: {kind}"
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
    estimated_steps: int
    """Of the steps that counted, those whose FLOPs are estimated."""
    unknown: str | None
    """Why job MFU is unknown, and goodput, if that is."""


@dataclass
class _Sums:
    """Of some of a start's steps."""

    steps: int = 0
    seconds: float = 0.0
    at_peak_s: float = 0.0
    """How long the FLOPs would take at the peak of all devices."""
    without_time: int = 0
    without_flops: int = 0
    without_mfu: int = 0
    estimated: int = 0
    """Steps whose FLOPs are estimated."""

    def add(self, number: int, step_s: float, mfu: float, tflops: float, method: str | None) -> None:
        """Steps of this mean time; NaN is unknown."""
        self.steps += number
        self.estimated += number * (method == "estimate")
        if isnan(step_s):
            self.without_time += number
        else:
            self.seconds += number * step_s
        self.without_flops += number * isnan(tflops)
        if isnan(mfu):
            self.without_mfu += number
        elif not isnan(step_s):
            self.at_peak_s += number * step_s * mfu


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A start with its time and its steps."""

    start: RunStart
    rows: LogRows
    counted: _Sums
    again: _Sums
    paused_s: Mapping[str, float]
    held_from_s: float
    """The begin of its allocation, or else of its process."""
    process_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.held_from_s


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
    spans = _spans(starts, rows, written_at_s)
    held, with_gaps = [span.seconds for span in spans], [span.seconds for span in spans]
    for number, (span, after) in enumerate(pairwise(spans)):
        gap_s = max(0.0, after.held_from_s - span.ended_s)
        with_gaps[number] += gap_s
        held[number] += gap_s * _is_same(span.start, after.start)
    unknown = _unknown([span.counted for span in spans])
    devices = [span.start.devices for span in spans]
    good = sum(n * span.counted.seconds for n, span in zip(devices, spans, strict=True))
    at_peak = sum(n * span.counted.at_peak_s for n, span in zip(devices, spans, strict=True))
    is_known = unknown is None and good > 0
    is_timed = good > 0 and not any(span.counted.without_time for span in spans)

    def figures(seconds: Sequence[float]) -> Held:
        device_s = sum(n * own for n, own in zip(devices, seconds, strict=True))
        return Held(
            seconds=sum(seconds),
            goodput=good / device_s if is_timed else None,
            job_mfu=at_peak / device_s if is_known else None,
        )

    return Job(
        starts=tuple(_shown(span, is_last=span is spans[-1]) for span in spans),
        parts=tuple(part for part in _parts(spans, sum(with_gaps)).items() if part[1] > 0),
        held=figures(held),
        with_gaps=figures(with_gaps) if sum(held) < sum(with_gaps) else None,
        step_mfu=at_peak / good if is_known else None,
        estimated_steps=sum(span.counted.estimated for span in spans),
        unknown=unknown,
    )


def _spans(starts: Sequence[RunStart], rows: Sequence[LogRows], written_at_s: float | None) -> list[_Span]:
    spans: list[_Span] = []
    for start, own, until_step in zip(starts, rows, _first_steps_after(rows), strict=True):
        counted, again = _sums(own, until_step)
        paused_s = {
            kind: sum(seconds for seconds in own.column(column) if not isnan(seconds))
            for kind, column in PAUSES.items()
        }
        before = spans[-1].ended_s if spans else 0.0  # a process may have several runs one after another
        process_s = min(start.began_at_s, max(start.process_began_at_s or start.began_at_s, before))
        held_from_s = process_s
        if start.allocation_began_at_s is not None and not (spans and _is_same(spans[-1].start, start)):
            held_from_s = min(process_s, max(start.allocation_began_at_s, before))
        seen_s = counted.seconds + again.seconds + sum(paused_s.values())
        last_write_s = written_at_s if start is starts[-1] else None
        span = _Span(
            start=start,
            rows=own,
            counted=counted,
            again=again,
            paused_s=paused_s,
            held_from_s=held_from_s,
            process_s=process_s,
            ended_s=max(_end_of(start, last_write_s), start.began_at_s + seen_s),
        )
        spans.append(span)
    return spans


def _sums(rows: LogRows, until_step: float) -> tuple[_Sums, _Sums]:
    """Of the steps before this one, and of those from it on; a row may stand for several steps."""
    counted, again = _Sums(), _Sums()
    columns = map(rows.column, ("step_time_s", "mfu", "tflops_per_gpu", "method"))
    before: int | None = None
    for step, *values in zip(rows.steps, *columns, strict=True):
        number = step - before if before is not None and step > before else 1
        (counted if step < until_step else again).add(number, *values)
        before = step
    return counted, again


def _unknown(counted: Sequence[_Sums]) -> str | None:
    """Why the MFU of these steps is unknown."""
    steps = sum(sums.steps for sums in counted)
    if not steps:
        return "no step is on disk"
    for what, without in (
        ("times", sum(sums.without_time for sums in counted)),
        ("FLOPs", sum(sums.without_flops for sums in counted)),
    ):
        if without:
            return f"the {what} of {without:,} of {steps:,} steps are unknown"
    return "no peak is known" if any(sums.without_mfu for sums in counted) else None


def _parts(spans: Sequence[_Span], whole_s: float) -> dict[str, float]:
    """What became of the time from the first start to the last end."""
    up_s = sum(span.seconds for span in spans)
    parts = {
        COUNTED: sum(span.counted.seconds for span in spans),
        REPEATED: sum(span.again.seconds for span in spans),
        START_UP: sum(span.start.began_at_s - span.process_s for span in spans),
        QUEUED: sum(span.process_s - span.held_from_s for span in spans),
        **{_PAUSED.format(kind=kind): sum(span.paused_s[kind] for span in spans) for kind in PAUSES},
    }
    return {**parts, REST: max(0.0, up_s - sum(parts.values())), BETWEEN: whole_s - up_s}


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


def _shown(span: _Span, *, is_last: bool) -> JobStart:
    start, steps = span.start, span.rows.steps
    devices = start.device or "device unknown"
    if start.devices > 1:
        devices = f"{start.devices} × {devices}"
    return JobStart(
        began_at=f"{datetime.fromtimestamp(span.held_from_s, timezone.utc):%Y-%m-%d %H:%M:%S}",
        seconds=span.seconds,
        ended=_how(start, span.ended_s, is_last=is_last),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        steps=span.counted.steps + span.again.steps,
        counted=span.counted.steps,
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
