"""Confidence intervals of medians, means and their ratios, from step times that depend on one another.

    series of a run ─► median_of, mean_of ─► Estimate ─┐
    series of another ─► the same          ─► Estimate ┴► ratio_of ─► RatioInterval

Consecutive steps are alike: a busy neighbour, a warm GPU or a slow loader lasts for many of them, so n steps
tell less than n independent ones. How much less is the long-run variance over the plain one. It is estimated
by batch means: the series is cut into consecutive batches, whose means vary as much as the slow changes make
them; what their correlation leaves is corrected as that of an AR(1) process. A bootstrap of blocks estimates
the same quantity with a thousand passes over the data instead of one, and needs random numbers.

The interval of a median is distribution-free: the share of steps above the median has a standard error, from
the long-run variance of that indicator, and the interval lies between the quantiles that this allows. A few
steps of any length do not move it. The interval of a ratio adds the distances of both sides in squares (Zou
and Donner's MOVER), on the logarithm: exchanging the sides inverts it. With four runs or more in all it comes
from the differences between runs instead.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

FEWEST_STEPS = 20
_MOST_BATCHES = 32
_LARGEST_CORRELATION = 0.9
_FEWEST_REPEATS = 4


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of one run with its confidence interval; all of them positive."""

    value: float
    low: float
    high: float
    steps: int
    independent_steps: float
    """As many independent steps would tell as much."""


@dataclass(frozen=True, kw_only=True)
class RatioInterval:
    """A figure of one side over that of the other, with its confidence interval."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float], confidence: float) -> Estimate:
    """The median of a series of at least `FEWEST_STEPS` positive numbers."""
    count, ordered = len(values), sorted(values)
    median = _quantile(ordered, 0.5)
    above = array("d", [(value > median) + 0.5 * (value == median) for value in values])
    spread = _spread_of_mean(above, at_least=0.25)
    reach = t_quantile(0.5 + confidence / 2, spread.degrees) * math.sqrt(spread.variance)
    return Estimate(
        value=median,
        low=_quantile(ordered, 0.5 - reach),
        high=_quantile(ordered, 0.5 + reach),
        steps=count,
        independent_steps=0.25 / spread.variance,
    )


def mean_of(values: Sequence[float], confidence: float) -> Estimate:
    """The mean of a series of at least `FEWEST_STEPS` positive numbers."""
    mean = fmean(values)
    plain = variance(values, mean)
    spread = _spread_of_mean(values, at_least=plain)
    reach = t_quantile(0.5 + confidence / 2, spread.degrees) * math.sqrt(spread.variance)
    return Estimate(
        value=mean,
        low=mean**2 / (mean + reach),  # symmetric on the logarithm, and positive
        high=mean + reach,
        steps=len(values),
        independent_steps=plain / spread.variance if plain else float(len(values)),
    )


def ratio_of(
    first: Sequence[Estimate], second: Sequence[Estimate], *, confidence: float, run_to_run: float
) -> RatioInterval:
    """The second over the first: geometric means over the runs of each.

    Where there are too few runs to show how much they differ, `run_to_run` is the assumed standard deviation
    between them, as a fraction.
    """
    sides = (first, second)
    logs = [[math.log(estimate.value) for estimate in side] for side in sides]
    means = [fmean(values) for values in logs]
    if shows_run_to_run(len(first), len(second)):
        down = up = _reach_of_repeats(logs, means, confidence)
    else:
        assumed = _NORMAL.inv_cdf(0.5 + confidence / 2) * run_to_run
        between = assumed * math.sqrt(1 / len(first) + 1 / len(second))
        to_low = [math.hypot(*(math.log(run.value / run.low) for run in side)) / len(side) for side in sides]
        to_high = [
            math.hypot(*(math.log(run.high / run.value) for run in side)) / len(side) for side in sides
        ]
        down = math.hypot(to_low[1], to_high[0], between)
        up = math.hypot(to_high[1], to_low[0], between)
    centre = means[1] - means[0]
    return RatioInterval(value=math.exp(centre), low=math.exp(centre - down), high=math.exp(centre + up))


def shows_run_to_run(first: int, second: int) -> bool:
    """Whether so many runs of each side show how much runs differ."""
    return first + second >= _FEWEST_REPEATS


def _reach_of_repeats(logs: Sequence[Sequence[float]], means: Sequence[float], confidence: float) -> float:
    """Half the interval of a ratio's logarithm: Student's t, with the variance of both sides pooled.

    What varies between runs and what varies within them are both in it.
    """
    degrees = sum(map(len, logs)) - 2
    squares = math.fsum((value - mean) ** 2 for side, mean in zip(logs, means, strict=True) for value in side)
    error = math.sqrt(squares / degrees * sum(1 / len(side) for side in logs))
    return t_quantile(0.5 + confidence / 2, degrees) * error


@dataclass(frozen=True)
class _Spread:
    """The variance of a series' mean, and the degrees of freedom of that estimate."""

    variance: float
    degrees: float


def _spread_of_mean(values: Sequence[float], *, at_least: float) -> _Spread:
    """How much the mean of a series would vary, by batch means.

    `at_least` is the variance of a value: steps are taken to tell no more than independent ones.
    """
    count = len(values)
    batches = min(_MOST_BATCHES, count // 2)
    edges = [index * count // batches for index in range(batches + 1)]
    means = [fmean(values[begin:end]) for begin, end in itertools.pairwise(edges)]
    centre = fmean(means)
    off = [mean - centre for mean in means]
    squares = math.fsum(x * x for x in off)
    if not squares:
        return _Spread(at_least / count, count - 1)
    found = math.fsum(x * y for x, y in itertools.pairwise(off)) / squares
    correlation = min(max(found + (1 + 3 * found) / batches, 0.0), _LARGEST_CORRELATION)  # Kendall's bias
    wider = (1 + correlation) / (1 - correlation)
    estimated = squares / (batches - 1) / batches * wider
    return _Spread(max(estimated, at_least / count), max((batches - 1) / wider, 1.0))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values; the first or the last where the share is outside 0 to 1."""
    place = min(max(share, 0.0), 1.0) * len(ordered) - 0.5
    lower = min(max(math.floor(place), 0), len(ordered) - 1)
    upper = min(lower + 1, len(ordered) - 1)
    part = min(max(place - lower, 0.0), 1.0)
    return ordered[lower] + part * (ordered[upper] - ordered[lower])


_NORMAL = NormalDist()


def t_quantile(share: float, degrees: float) -> float:
    """The quantile of Student's t for a share above one half (G. W. Hill, 1970, algorithm 396).

    Exact for one and two degrees of freedom, to 1e-3 relative above for shares up to 0.9999.
    """
    tail = 2 * (1 - share)
    if degrees < 2:  # between Cauchy and two degrees: the wider of the two
        return 1 / math.tan(tail * math.pi / 2)
    if degrees == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (degrees - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * degrees
    y = y_0 = (d * tail) ** (2 / degrees)
    if y > 0.05 + a:
        x = _NORMAL.inv_cdf(tail / 2)
        y = x * x
        if degrees < 5:
            c += 0.3 * (degrees - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        inner = (degrees + 6) / (degrees * y) - 0.089 * d - 0.822
        y *= 1 / (inner * (degrees + 2) * 3) + 0.5 / (degrees + 4)
        y = (y - 1) * (degrees + 1) / (degrees + 2) + 1 / y_0
    return math.sqrt(degrees * y)
