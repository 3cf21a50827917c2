"""Compares two runs, two groups of repeated runs, or two sweeps: figures of B over those of A.

    Side A, Side B ─► pairs: the runs, or experiments of one name ─► Pair: ComparedFigure … ─► Comparison

A pair is slower when the interval of its median step time, B over A, is above 1. It is beyond the limit when,
in addition, the ratio is above 1 + limit. Everything else (rates, MFU, memory, the mean) is shown beside it
and decides nothing, so that a pair has one chance of a false alarm and not five. The intervals of a sweep
hold together: with m experiments each has the confidence 1 − 0.05 / m.

One run each cannot show how much runs differ from one another. The interval then includes an assumed standard
deviation between runs; with four runs in all it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Literal

import msgspec

from ...errors import UsageError
from ...run_summary.texts import PARTLY_ESTIMATED
from ...text import some_of
from ..run.log_rows import PHASES
from .intervals import FEWEST_STEPS, Estimate, mean_of, median_of, ratio_of, shows_run_to_run
from .load import (
    MeasuredRun,
    Side,
    have_same_peak,
    refuse_if_different,
    unchecked_facts,
    version_differences,
)
from .step_series import StepSeries

CONFIDENCE = 0.95
RUN_TO_RUN = 0.01
"""With runs that differ by this much, one run of each reports about 3 % of equal pairs as slower and misses
about 6 % of slow-downs by 5 %; with runs that differ less, fewer of both."""
RUN_TO_RUN_ON_CPU = 0.015
"""By so much equal runs on a CPU differed, with nothing else on the machine (compare_noise_alone.json)."""

SLOWER, FASTER, UNCLEAR = "slower", "faster", "no difference shown"


_SMALLEST_PHASE = 0.001
"""Of a step: a phase with less on either side is left out."""


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides; over repeated runs a and b are the medians of the runs' figures."""

    name: str
    """step_time_median_s, step_time_mean_s, tokens_per_s, samples_per_s, mfu, peak_memory_bytes, or
    phase_<name>_s with the mean seconds of a phase in a step."""
    a: float
    b: float
    ratio: float
    """B over A."""
    low: float | None = None
    """The confidence interval; None where there is none, as of a peak."""
    high: float | None = None
    mark_a: str = ""
    """Behind the figure of A, if it is an MFU of which steps are estimated."""
    mark_b: str = ""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs, two groups of runs, or the same experiment of two sweeps."""

    name: str
    """Of the experiment; "run" for runs."""
    runs_a: int
    runs_b: int
    steps_a: int
    """After warm-up, over all runs."""
    steps_b: int
    independent_steps_a: float
    """As many independent steps tell as much about the median as these."""
    independent_steps_b: float
    verdict: str
    """Of the median step time: "slower", "faster" or "no difference shown"."""
    smallest_shown: float
    """The smallest slow-down that this data could have shown, as a fraction."""
    is_beyond_limit: bool
    is_unsure: bool
    """Whether no difference was shown, and a slow-down by the limit could not have been."""
    figures: list[ComparedFigure]
    """The median step time first."""

    @property
    def step_time(self) -> ComparedFigure:
        return self.figures[0]


class Unmatched(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment without enough step times on both sides."""

    name: str
    a: str
    """Its status there, with the reason: "ok", "cuda_oom: …", "not in this sweep"."""
    b: str
    is_failure: bool
    """Whether it succeeded in A and failed in B."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison; its field names are the keys of the JSON."""

    a: str
    b: str
    kind: Literal["run", "sweep"]
    """What a and b are."""
    confidence: float
    """Of all intervals together."""
    max_regression: float | None
    """The limit as a fraction; None without one."""
    run_to_run: float | None
    """The assumed standard deviation from run to run; None where repeated runs show it."""
    pairs: list[Pair]
    unmatched: list[Unmatched]
    notes: list[str]
    is_within_limit: bool
    """False if a pair is beyond the limit, or with a limit an experiment of A failed in B."""

    @property
    def unsure(self) -> list[Pair]:
        """Pairs whose data is too noisy, or too little, for the limit."""
        return [pair for pair in self.pairs if pair.is_unsure]


def compare(
    first: Side, second: Side, *, max_regression: float | None = None, run_to_run: float | None = None
) -> Comparison:
    """Compare two sides; a UsageError if there is nothing to compare, or it would mean nothing.

    `run_to_run` is the assumed standard deviation between equal runs; None: the one of their device.
    """
    if first.is_sweep != second.is_sweep:
        one, other = (f"{side.path} is {'a sweep' if side.is_sweep else 'a run'}" for side in (first, second))
        raise UsageError(f"cannot compare: {one} and {other}")
    groups = _groups(first, second)
    if run_to_run is None:
        on_cpu = any(one.is_on_cpu for _, own, others in groups for one in (*own, *others))
        run_to_run = RUN_TO_RUN_ON_CPU if on_cpu else RUN_TO_RUN
    confidence = 1 - (1 - CONFIDENCE) / len(groups)
    judge = _Judge(confidence=confidence, max_regression=max_regression, run_to_run=run_to_run)
    pairs = [judge.pair(name, own, others) for name, own, others in groups]
    unmatched = _unmatched(first, second)
    is_within = not any(pair.is_beyond_limit for pair in pairs)
    if max_regression is not None:
        is_within = is_within and not any(experiment.is_failure for experiment in unmatched)
    assumes = not all(shows_run_to_run(len(own), len(others)) for _, own, others in groups)
    return Comparison(
        a=str(first.path),
        b=str(second.path),
        kind="sweep" if first.is_sweep else "run",
        confidence=CONFIDENCE,
        max_regression=max_regression,
        run_to_run=run_to_run if assumes else None,
        pairs=pairs,
        unmatched=unmatched,
        notes=list(dict.fromkeys([*first.notes, *second.notes, *_notes(groups)])),
        is_within_limit=is_within,
    )


_Group = tuple[str, Sequence[MeasuredRun], Sequence[MeasuredRun]]
"""A name, and what was measured under it in A and in B."""


def _groups(first: Side, second: Side) -> list[_Group]:
    """What is compared with what, after all checks."""
    groups: list[_Group]
    if not first.is_sweep:
        groups = [("run", first.runs, second.runs)]
    else:
        groups = [
            (name, [own], [other])
            for name, own in first.experiments.items()
            if isinstance(own, MeasuredRun) and isinstance(other := second.experiments.get(name), MeasuredRun)
        ]
        if not groups:
            raise UsageError(
                f"cannot compare: no experiment succeeded in both {first.path} and {second.path}; "
                f"A has {some_of([*first.experiments], _NAMES_SHOWN) or 'none'}, "
                f"B has {some_of([*second.experiments], _NAMES_SHOWN) or 'none'}"
            )
        if any(map(_is_long_enough, groups)):  # the others are listed as not compared
            groups = list(filter(_is_long_enough, groups))
    for _, own, others in groups:
        for measured in (*own, *others):
            if why := _too_short(measured):
                raise UsageError(f"cannot compare: {measured.where} has {why}")
        for measured in (*own[1:], *others):
            refuse_if_different(own[0], measured)
    return groups


_NAMES_SHOWN = 3


def _is_long_enough(group: _Group) -> bool:
    return not any(_too_short(measured) for measured in (*group[1], *group[2]))


def _too_short(measured: MeasuredRun) -> str | None:
    steps = len(measured.series.step_times_s)
    if steps >= FEWEST_STEPS:
        return None
    return f"{steps} steps with a time after warm-up, and at least {FEWEST_STEPS} are needed"


class _Judge:
    """Compares one pair after the other, with the same confidence and limit."""

    def __init__(self, *, confidence: float, max_regression: float | None, run_to_run: float) -> None:
        self._confidence, self._limit, self._run_to_run = confidence, max_regression, run_to_run

    def pair(self, name: str, own: Sequence[MeasuredRun], others: Sequence[MeasuredRun]) -> Pair:
        sides = ([measured.series for measured in own], [measured.series for measured in others])
        medians = [[median_of(one.step_times_s, self._confidence) for one in side] for side in sides]
        step_time = self._figure("step_time_median_s", *medians)
        assert step_time.low is not None
        assert step_time.high is not None
        verdict = SLOWER if step_time.low > 1 else FASTER if step_time.high < 1 else UNCLEAR
        is_beyond = self._limit is not None and verdict == SLOWER and step_time.ratio > 1 + self._limit
        smallest = step_time.ratio / step_time.low - 1
        figures = [
            step_time,
            self._estimated("step_time_mean_s", sides, lambda series: series.step_times_s, mean_of),
            self._estimated("tokens_per_s", sides, lambda series: series.tokens_per_s)
            or self._estimated("samples_per_s", sides, lambda series: series.samples_per_s),
        ]
        if all(have_same_peak(own[0], measured) for measured in (*own, *others)):
            mfu = self._estimated("mfu", sides, lambda series: series.mfu)
            marks = {"mark_a": _mark(own), "mark_b": _mark(others)}
            figures.append(None if mfu is None else msgspec.structs.replace(mfu, **marks))
        figures.append(_memory(sides))
        figures += [self._phase(phase, sides) for phase in PHASES]
        return Pair(
            name=name,
            runs_a=len(own),
            runs_b=len(others),
            steps_a=sum(estimate.steps for estimate in medians[0]),
            steps_b=sum(estimate.steps for estimate in medians[1]),
            independent_steps_a=sum(estimate.independent_steps for estimate in medians[0]),
            independent_steps_b=sum(estimate.independent_steps for estimate in medians[1]),
            verdict=verdict,
            smallest_shown=smallest,
            is_beyond_limit=is_beyond,
            is_unsure=self._limit is not None and verdict == UNCLEAR and smallest > self._limit,
            figures=[figure for figure in figures if figure is not None],
        )

    def _phase(self, phase: str, sides: tuple[list[StepSeries], list[StepSeries]]) -> ComparedFigure | None:
        """The mean seconds of a phase in a step; the intervals of all phases hold together.

        None where a run has too few steps with phases, or the phase takes next to no time on a side.
        """
        judge = _Judge(
            confidence=1 - (1 - self._confidence) / len(PHASES),
            max_regression=None,
            run_to_run=self._run_to_run,
        )
        for series in (*sides[0], *sides[1]):
            spent_s, all_s = sum(series.phases_s.get(phase, ())), sum(map(sum, series.phases_s.values()))
            if spent_s <= _SMALLEST_PHASE * all_s:
                return None
        return judge._estimated(PHASES[phase], sides, lambda series: series.phases_s[phase], mean_of)

    def _estimated(
        self,
        name: str,
        sides: tuple[list[StepSeries], list[StepSeries]],
        values: Callable[[StepSeries], Sequence[float]],
        estimate: Callable[[Sequence[float], float], Estimate] = median_of,
    ) -> ComparedFigure | None:
        """A figure with its interval; None where a run has too few values."""
        if any(len(values(series)) < FEWEST_STEPS for side in sides for series in side):
            return None
        own, others = ([estimate(values(series), self._confidence) for series in side] for side in sides)
        return self._figure(name, own, others)

    def _figure(self, name: str, own: Sequence[Estimate], others: Sequence[Estimate]) -> ComparedFigure:
        ratio = ratio_of(own, others, confidence=self._confidence, run_to_run=self._run_to_run)
        a = geometric_mean([estimate.value for estimate in own])
        return ComparedFigure(
            name=name, a=a, b=a * ratio.value, ratio=ratio.value, low=ratio.low, high=ratio.high
        )


def _mark(runs: Sequence[MeasuredRun]) -> str:
    """The mark of an MFU over several runs."""
    marks = {measured.mfu_mark for measured in runs}
    return marks.pop() if len(marks) == 1 else PARTLY_ESTIMATED


def _memory(sides: tuple[list[StepSeries], list[StepSeries]]) -> ComparedFigure | None:
    """The highest peak of each side; None if that of a run is unknown."""
    peaks = [[series.peak_memory_bytes for series in side] for side in sides]
    a, b = (max((peak for peak in side if peak), default=None) if all(side) else None for side in peaks)
    return ComparedFigure(name="peak_memory_bytes", a=a, b=b, ratio=b / a) if a and b else None


def _unmatched(first: Side, second: Side) -> list[Unmatched]:
    """Experiments that have no step times, or too few, on at least one side."""
    absent = "not in this sweep"
    rows = []
    for name in dict.fromkeys((*first.experiments, *second.experiments)):
        own, other = first.experiments.get(name, absent), second.experiments.get(name, absent)
        status = [each if isinstance(each, str) else _too_short(each) or "ok" for each in (own, other)]
        if status == ["ok", "ok"]:
            continue
        rows.append(
            Unmatched(
                name=name,
                a=status[0],
                b=status[1],
                is_failure=isinstance(own, MeasuredRun) and isinstance(other, str) and other != absent,
            )
        )
    return rows


def _notes(groups: Sequence[_Group]) -> list[str]:
    notes: list[str] = []
    for _, own, others in groups:
        for measured in (*own, *others):
            notes += measured.notes
        notes += [f"versions differ: {text}" for text in version_differences(own[0], others[0])]
        if unchecked := unchecked_facts(own[0], others[0]):
            notes.append(f"known on one side only, not checked: {', '.join(unchecked)}")
        if not all(have_same_peak(own[0], measured) for measured in (*own, *others)):
            notes.append("MFU is not compared: the two sides have different peaks")
    return notes
