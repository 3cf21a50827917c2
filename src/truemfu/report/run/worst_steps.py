"""The slowest steps of a run, and why each took longer than the median: by what its row recorded.

A cause that is measured in seconds explains a step if it accounts for at least half of the time beyond the
median. Warm-up and compilation are marks of the step itself. Without either, the cause is unknown: what
happened beside the step is only mentioned.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...records import RunSummary
from ...text import duration
from ..drawing.tables import Field, Table, digits, measures, table_of, words
from .log_rows import PAUSES, LogRow, LogRows

UNKNOWN_CAUSE = "unknown"
TITLE = "The slowest steps"
_MOST = 10
_SLOW = 1.5
_ENOUGH = 0.5
_FIRST_STEPS = 3
"""These count as warm-up; a later one with the same mark compiled something or was profiled."""


@dataclass(frozen=True, kw_only=True)
class WorstStep:
    step: int
    seconds: float
    times_median: float
    cause: str
    details: str


def worst_steps(rows: LogRows, summary: RunSummary) -> list[WorstStep]:
    """The slowest steps that took 1.5 times the median or more, the slowest first."""
    times = rows.column("step_time_s")
    typical = summary.median_step_time_s
    if not typical:
        return []
    slowest = heapq.nlargest(
        _MOST, (at for at, seconds in enumerate(times) if seconds >= _SLOW * typical), key=times.__getitem__
    )
    if not slowest:
        return []
    usual = {name: _usual(rows, name) for name in ("data_wait_s", "between_steps_s")}
    return [_worst(rows[at], at, typical, usual) for at in slowest]


FIELDS: tuple[Field, ...] = (
    digits("step", lambda worst: f"{worst.step:,}"),
    measures("time", duration, lambda worst: worst.seconds, unit="s"),
    measures("times the median", lambda times: f"{times:.1f}", lambda worst: worst.times_median),
    words("cause", lambda worst: worst.cause),
)
"""What tables show of a `WorstStep`."""


def worst_table(worst: Sequence[WorstStep]) -> Table:
    """The slowest steps of a run."""
    details = words("evidence", lambda worst: worst.details, kind="text")
    return table_of(TITLE, worst, [*FIELDS, details])


def _usual(rows: LogRows, name: str) -> float:
    """The median of the seconds that steps spend on something; 0 if most steps have none."""
    known = list(filter(math.isfinite, rows.column(name))) if rows.has(name) else []
    return statistics.median(known) if 2 * len(known) > len(rows) else 0.0


def _worst(row: LogRow, at: int, typical: float, usual: dict[str, float]) -> WorstStep:
    seconds = row.step_time_s or 0.0
    cause, details = _cause(row, at, seconds - typical, usual)
    return WorstStep(
        step=row.global_step, seconds=seconds, times_median=seconds / typical, cause=cause, details=details
    )


def _cause(row: LogRow, at: int, excess: float, usual: dict[str, float]) -> tuple[str, str]:
    if row.is_observed:
        return "observed", "the step's operators were observed to count FLOPs; medians do not include it"
    if (waited := row.data_wait_s) is not None and waited - usual["data_wait_s"] >= _ENOUGH * excess:
        return "data wait", f"{duration(waited)} of it waiting for data"
    if row.is_warmup:
        if at < _FIRST_STEPS:
            return "warm-up", "one of the first steps of the log"
        return "compile", "something was compiled or profiled in this step"
    if row.straggler_excess_s is not None and row.straggler_excess_s >= _ENOUGH * excess:
        return (
            "straggler",
            f"rank {row.straggler_rank:.0f} was {duration(row.straggler_excess_s)} later than the others",
        )
    if (between := row.between_steps_s) is not None and between - usual[
        "between_steps_s"
    ] >= _ENOUGH * excess:
        what = f" and {row.forwards_between_steps:,} forward passes" if row.forwards_between_steps else ""
        return "pause", f"{duration(between)}{what} between steps, in no known pause"
    if paused := _paused(row):
        return UNKNOWN_CAUSE, f"after {' and '.join(paused)}, whose time is not part of the step"
    return UNKNOWN_CAUSE, "no logged cause explains half of the extra time"


def _paused(row: LogRow) -> Sequence[str]:
    seconds = {kind: getattr(row, name) for kind, name in PAUSES.items()}
    return [f"{kind} ({duration(spent)})" for kind, spent in seconds.items() if spent]
