"""Intervals contain the truth as often as they claim, also of steps that depend on one another."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from made_runs import correlated, noisy

from truemfu.report.compare.intervals import Estimate, mean_of, median_of, ratio_of, t_quantile


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    # Student's table, and three values of scipy.stats.t.ppf
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.975, 6, 2.44691),
        (0.975, 31, 2.03951),
        (0.995, 19, 2.86093),
        (0.9995, 10, 4.58689),
    ],
)
def test_quantiles_of_student(share: float, degrees: float, expected: float) -> None:
    assert t_quantile(share, degrees) == pytest.approx(expected, rel=1e-4)


def test_quantiles_never_grow_with_degrees_of_freedom() -> None:
    found = [t_quantile(0.975, degrees / 10) for degrees in range(10, 500)]
    assert all(one >= other - 1e-9 for one, other in itertools.pairwise(found))


Estimator = Callable[[list[float], float], Estimate]


@pytest.mark.parametrize(("estimate", "truth"), [(median_of, 1.0), (mean_of, math.exp(0.05**2 / 2))])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_an_interval_contains_the_truth(estimate: Estimator, truth: float, correlation: float) -> None:
    draw = random.Random(1)
    found = [estimate(correlated(draw, 600, correlation=correlation, spread=0.05), 0.95) for _ in range(200)]
    assert sum(one.low <= truth <= one.high for one in found) >= 0.93 * len(found)


def test_correlated_steps_tell_less_than_independent_ones() -> None:
    draw = random.Random(2)
    alone = median_of(correlated(draw, 1000, correlation=0.0, spread=0.05), 0.95)
    alike = median_of(correlated(draw, 1000, correlation=0.95, spread=0.05), 0.95)
    assert alone.independent_steps > 300
    assert alike.independent_steps < 100
    assert alike.high / alike.low > alone.high / alone.low


def test_a_few_steps_of_any_length_do_not_move_the_median() -> None:
    times = noisy(500)
    stalled = [seconds * (1e6 if step % 50 == 0 else 1) for step, seconds in enumerate(times)]
    plain, with_stalls = median_of(times, 0.95), median_of(stalled, 0.95)
    assert with_stalls.high == pytest.approx(plain.high, rel=0.005)
    assert mean_of(stalled, 0.95).value > 1000 * plain.value


def test_equal_steps_have_an_interval_of_no_width() -> None:
    for estimate in (median_of, mean_of):
        found = estimate([0.5] * 20, 0.95)
        assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


def test_exchanging_the_sides_inverts_the_ratio() -> None:
    one, other = median_of(noisy(100), 0.95), median_of(noisy(100, 0.11, seed=1), 0.95)
    there = ratio_of([one], [other], confidence=0.95, run_to_run=0.01)
    back = ratio_of([other], [one], confidence=0.95, run_to_run=0.01)
    assert (1 / there.high, 1 / there.value, 1 / there.low) == pytest.approx(
        (back.low, back.value, back.high)
    )


def test_an_assumed_deviation_between_runs_widens_the_interval_by_root_two() -> None:
    exact = Estimate(value=1.0, low=1.0, high=1.0, steps=20, independent_steps=20)
    found = ratio_of([exact], [exact], confidence=0.95, run_to_run=0.01)
    assert math.log(found.high) == pytest.approx(1.95996 * 0.01 * math.sqrt(2), rel=1e-4)


def test_repeated_runs_are_compared_by_students_t() -> None:
    first, second = [1.00, 1.02, 0.99], [1.10, 1.08, 1.11]
    exact = [
        [Estimate(value=value, low=value, high=value, steps=20, independent_steps=20) for value in side]
        for side in (first, second)
    ]
    found = ratio_of(*exact, confidence=0.95, run_to_run=0.5)  # not used: the runs show it
    logs = [[math.log(value) for value in side] for side in (first, second)]
    pooled = math.sqrt(sum(statistics.variance(side) for side in logs) / 2 * (2 / 3))
    centre = statistics.mean(logs[1]) - statistics.mean(logs[0])
    assert math.log(found.value) == pytest.approx(centre)
    assert math.log(found.low) == pytest.approx(centre - 2.77645 * pooled, rel=1e-4)


def test_three_runs_in_all_average_what_is_assumed() -> None:
    exact = Estimate(value=1.0, low=1.0, high=1.0, steps=20, independent_steps=20)
    found = ratio_of([exact, exact], [exact], confidence=0.95, run_to_run=0.01)
    assert math.log(found.high) == pytest.approx(1.95996 * 0.01 * math.sqrt(1.5), rel=1e-4)
