"""Statistics of a trial: gains with intervals, verdicts, and how far losses are apart.

step times of a run ─► typical_step ─► Estimate ─┐
of the unchanged runs beside it       ─► Estimates ┴► ratio_of ─► Gain ─► verdict
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, geometric_mean

from ..remedies.facts import UNCHANGED
from ..remedies.table import NOTHING, ROUNDING
from ..report.compare.compare import CONFIDENCE, RUN_TO_RUN, RUN_TO_RUN_ON_CPU
from ..report.compare.intervals import FEWEST_STEPS, Estimate, mean_of, median_of, ratio_of
from ..text import share
from .record import GAINS, LOSES, UNCLEAR, LossDistance, TrialRun

_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 1e-2
"""How far apart losses may be if only the order of sums differs: products in fp32, and in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a remedy gains, as a share of the unchanged step, with its confidence interval."""

    step_time_s: float
    unchanged_s: float
    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Only an interval without zero shows anything."""
        return GAINS if self.low > 0 else LOSES if self.high < 0 else UNCLEAR


def beside(runs: Sequence[TrialRun], measured: Sequence[TrialRun]) -> list[TrialRun]:
    """The unchanged runs next before and next after some runs, each once, in order."""
    unchanged = [run for run in runs if run.name == UNCHANGED and run.failure is None]
    found: dict[int, TrialRun] = {}
    for run in measured:
        before = [other for other in unchanged if other.number < run.number][-1:]
        after = [other for other in unchanged if other.number > run.number][:1]
        found |= {other.number: other for other in (*before, *after)}
    return [found[number] for number in sorted(found)]


def typical_step(step_times_s: Sequence[float], *, workers: int) -> Estimate:
    """The median of the steps, or of the means of as many in a row as a loader has workers: these deliver in
    bursts. Of fewer steps than that takes, the mean.

    A median of single steps would miss waits that most steps do not have, and a mean of all would follow
    each disturbance of the machine.
    """
    length = max(1, workers)
    rows = [step_times_s[begin : begin + length] for begin in range(len(step_times_s) - length + 1)]
    if len(rows) < FEWEST_STEPS:
        return mean_of(step_times_s, CONFIDENCE)
    return median_of([fmean(row) for row in rows], CONFIDENCE)


def run_to_run(unchanged: Sequence[Estimate], *, on_cpu: bool) -> float:
    """The standard deviation between runs, as a fraction: the assumed one, or that of the unchanged runs.

    The larger of the two; without a slow change during the trial, since a remedy is compared with the runs
    beside it.
    """
    assumed = RUN_TO_RUN_ON_CPU if on_cpu else RUN_TO_RUN
    steps = [math.log(after.value / before.value) for before, after in pairwise(unchanged)]
    return max(assumed, math.sqrt(fmean(step**2 for step in steps) / 2)) if len(steps) > 1 else assumed


def gain_of(unchanged: Sequence[Estimate], changed: Sequence[Estimate], *, run_to_run: float) -> Gain:
    """The gain of some runs over the unchanged ones beside them."""
    ratio = ratio_of(unchanged, changed, confidence=CONFIDENCE, run_to_run=run_to_run)
    unchanged_s = geometric_mean(estimate.value for estimate in unchanged)
    return Gain(
        step_time_s=geometric_mean(estimate.value for estimate in changed),
        unchanged_s=unchanged_s,
        value=1 - ratio.value,
        low=1 - ratio.high,
        high=1 - ratio.low,
    )


def largest_difference(
    one: Sequence[float | None], other: Sequence[float | None]
) -> tuple[int, float] | None:
    """How many steps have both losses, and the largest relative difference; None without any."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    return len(pairs), max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs)


def unchanged_difference(runs: Sequence[Sequence[float | None]]) -> float | None:
    """The largest difference of the other unchanged runs from the first; None if there is none."""
    found = [largest_difference(runs[0], other) for other in runs[1:]]
    known = [difference for _, difference in filter(None, found)]
    return max(known, default=None)


def loss_distance(
    unchanged: Sequence[Sequence[float | None]], changed: Iterable[Sequence[float | None]]
) -> LossDistance | None:
    """How far the losses of some runs are from those of the first unchanged one; None if they are unknown."""
    found = [pair for run in changed if (pair := largest_difference(unchanged[0], run)) is not None]
    if not found:
        return None
    largest = max(difference for _, difference in found)
    return LossDistance(
        steps=min(steps for steps, _ in found),
        are_identical=largest == 0,
        largest_difference=largest,
        unchanged_difference=unchanged_difference(unchanged),
    )


def loss_warning(changes: str | None, losses: LossDistance | None, *, is_fp32: bool) -> str | None:
    """Whether losses are further apart than a remedy that changes so much explains; None if not."""
    if losses is None or losses.are_identical or losses.is_within_unchanged:
        return None
    limits = {NOTHING: 0.0, ROUNDING: _ROUNDING if is_fp32 else _ROUNDING_OF_HALF}
    if changes not in limits or losses.largest_difference <= limits[changes]:
        return None
    more = "although it should change nothing" if changes == NOTHING else "which is more than rounding"
    unchanged = (
        "" if losses.unchanged_difference is None else f" (unchanged: {share(losses.unchanged_difference)})"
    )
    return (
        f"its losses are {share(losses.largest_difference)} apart{unchanged}, {more}: other batches or other "
        "random numbers; compare a longer training"
    )
