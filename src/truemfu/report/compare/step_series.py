"""The step times and rates of a run after warm-up, from the columns of its log.

The steps are those of the run's own medians: all after warm-up that have a time. Pauses, counts and profiling
are not part of a step's time, so the steps after them stay.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..run.log_rows import PHASES, LogRows
from ..run.log_summary import peak_flops_per_s


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How much a step processes, of samples or tokens: the median, and where the middle 80 % of steps are."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """The steps after warm-up, in order; of a rate, the steps that have it."""

    step_times_s: Sequence[float]
    tokens_per_s: Sequence[float] = ()
    samples_per_s: Sequence[float] = ()
    mfu: Sequence[float] = ()
    tokens: StepSize | None = None
    samples: StepSize | None = None
    peak_flops_per_s: float | None = None
    """Of one device, by the last row that shows it."""
    peak_memory_bytes: int | None = None
    phases_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of the steps whose phases are known; 0 where a step does not have one."""
    steps_per_row: int = 1
    """The usual number of steps from one row to the next."""


def series_of(rows: LogRows) -> StepSeries:
    """The series of a log."""
    times = rows.column("step_time_s")
    is_warmup = rows.column("is_warmup")
    kept = array(
        "q", [at for at, seconds in enumerate(times) if 0 < seconds < math.inf and not is_warmup[at]]
    )
    tokens, samples = rows.column("tokens_per_second"), rows.column("samples_per_second")
    gaps = [rows.steps[j] - rows.steps[i] for i, j in itertools.pairwise(kept)]
    peaks = list(filter(math.isfinite, rows.column("memory_peak_bytes")))
    return StepSeries(
        step_times_s=array("d", [times[at] for at in kept]),
        tokens_per_s=_known(tokens, kept),
        samples_per_s=_known(samples, kept),
        mfu=_known(rows.column("mfu"), kept),
        tokens=_size(tokens, times, kept),
        samples=_size(samples, times, kept),
        peak_flops_per_s=peak_flops_per_s(rows),
        peak_memory_bytes=int(max(peaks)) if peaks else None,
        phases_s=_phases(rows, kept),
        steps_per_row=round(median(gaps)) if gaps else 1,
    )


def _known(values: Sequence[float], kept: Sequence[int]) -> array[float]:
    return array("d", [values[place] for place in kept if 0 < values[place] < math.inf])


def _phases(rows: LogRows, kept: Sequence[int]) -> dict[str, array[float]]:
    known = [at for at in kept if math.isfinite(rows.column(PHASES["forward"])[at])]
    columns = {phase: rows.column(value) for phase, value in PHASES.items() if rows.has(value)}
    return {
        phase: array("d", [column[at] if math.isfinite(column[at]) else 0.0 for at in known])
        for phase, column in columns.items()
    }


def _size(rates: Sequence[float], times: Sequence[float], kept: Sequence[int]) -> StepSize | None:
    """A step's size is its rate times its time."""
    sizes = sorted(rates[place] * times[place] for place in kept if 0 < rates[place] < math.inf)
    if not sizes:
        return None
    low, middle, high = (sizes[int(share * (len(sizes) - 1))] for share in (0.1, 0.5, 0.9))
    return StepSize(median=middle, low=low, high=high)
