"""The plan of observations, in simulated runs with their own clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import pytest

from truemfu.monitor.step_flops.plan import ObservationPlan

CHECKS = [10, 24, 60, 100, 240, 400]


class Run:
    """A simulated run: each step takes its time, and its cost more when it is observed."""

    def __init__(
        self, frequency: int, *, seed: int, step_s: float, cost_s: float, spread: float = 0.0
    ) -> None:
        self.plan = ObservationPlan(frequency, start_s=5.0)
        self._draw, self._step_s, self._cost_s, self._spread = random.Random(seed), step_s, cost_s, spread
        self.now_s, self.step = 5.0, 0
        self.seen: list[int] = []
        self.spent_s: list[tuple[float, float]] = []

    def _about(self, seconds: float) -> float:
        return seconds * self._draw.uniform(1 - self._spread, 1 + self._spread)

    def advance(self, steps: int, each: Callable[[int, bool], None] = lambda step, seen: None) -> None:
        for _ in range(steps):
            self.step += 1
            is_seen = self.plan.is_due(self.step, self.now_s)
            took_s = self._about(self._step_s) * (30 if self.step == 1 else 1)
            if is_seen:
                extra_s = self._about(self._cost_s)
                self.now_s += took_s + extra_s
                self.plan.observed(self.step, extra_s + took_s * (self.step - len(self.seen) < 3), self.now_s)
                self.seen.append(self.step)
                self.spent_s.append((self.now_s, extra_s))
            else:
                self.now_s += took_s
                self.plan.shifted(took_s)
            each(self.step, is_seen)

    def share_after_the_first_minute(self, until_s: float) -> float:
        return sum(cost for at, cost in self.spent_s if 65.0 < at <= until_s) / (until_s - 5.0)


@pytest.mark.parametrize("frequency", [1, 50, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_observations_take_at_most_a_thousandth_of_a_long_run(frequency: int, seed: int) -> None:
    draw = random.Random(seed)
    step_s = draw.choice((0.02, 0.1, 0.7))
    run = Run(frequency, seed=seed, step_s=step_s, cost_s=step_s * draw.uniform(0.2, 5), spread=0.3)
    run.advance(30_000, lambda step, seen: run.plan.unknown_kind(step, "never known") if seed % 2 else None)
    late = [at for at, _ in run.spent_s if at > 65.0]
    assert late
    assert all(run.share_after_the_first_minute(at) <= 0.001 for at in late)


def test_two_steps_are_observed_without_a_reason_and_none_after_them_at_frequency_zero() -> None:
    run = Run(0, seed=1, step_s=0.1, cost_s=0.1)
    run.advance(20_000)
    assert run.seen == [1, 2]


def test_cheap_observations_follow_the_frequency() -> None:
    run = Run(500, seed=1, step_s=0.1, cost_s=0.01)
    run.advance(5_000)
    assert run.seen == [1, 2, *CHECKS, *range(500, 5_001, 500)]


def test_unknown_steps_take_a_quarter_of_the_first_minute_at_most() -> None:
    run = Run(0, seed=2, step_s=0.05, cost_s=0.05, spread=0.2)
    run.advance(900, lambda step, seen: run.plan.unknown_kind(step, "never known"))
    spent_s = 0.0
    for at, cost in run.spent_s[3:]:
        spent_s += cost
        assert at > 65.0 or spent_s <= 0.25 * (at - 5.0)
    assert len(run.seen) > 100


@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_similar_costs_observe_equal_or_nested_steps(seed: int) -> None:
    draw = random.Random(seed)
    step_s, frequency = draw.choice((0.05, 0.3)), draw.choice((50, 500))
    cost_s = step_s * draw.uniform(0.3, 4)
    ranks = [
        Run(frequency, seed=100 * seed + rank, step_s=step_s, cost_s=cost_s * factor, spread=0.05)
        for rank, factor in enumerate((1.0, 1.1))
    ]
    for run in ranks:
        run.advance(30_000)
    first, second = (run.seen for run in ranks)
    fewer, more = sorted((set(first), set(second)), key=len)
    assert len(fewer) > 2
    assert fewer <= more


@pytest.mark.parametrize(("first", "period"), [(16, 16), (7, 10), (500, 100)])
def test_a_kind_that_comes_periodically_is_found(first: int, period: int) -> None:
    run, known_at = Run(0, seed=3, step_s=0.2, cost_s=0.02), []

    def each(step: int, is_seen: bool) -> None:
        if step >= first and (step - first) % period == 0 and not known_at:
            if is_seen:
                known_at.append(step)
                run.plan.known_kind("evaluation")
            else:
                run.plan.unknown_kind(step, "evaluation")

    run.advance(3_000, each)
    assert known_at == [first + 2 * period]
    assert run.seen == [1, 2, *known_at]


def test_a_kind_without_a_period_is_found_while_the_share_allows_it() -> None:
    draw, run = random.Random(4), Run(0, seed=4, step_s=0.1, cost_s=0.01)
    unknown: set[Hashable] = {"rare"}

    def each(step: int, is_seen: bool) -> None:
        if unknown and draw.random() < 0.3:
            if is_seen:
                unknown.clear()
                run.plan.known_kind("rare")
            else:
                run.plan.unknown_kind(step, "rare")

    run.advance(500, each)
    assert not unknown
    observed = len(run.seen)
    run.advance(500, each)
    assert len(run.seen) == observed


def test_a_request_is_met_once() -> None:
    run = Run(0, seed=5, step_s=0.1, cost_s=0.05)
    run.advance(100)
    run.plan.ask("a module was replaced")
    run.advance(100)
    assert run.seen == [1, 2, 101]


def test_a_late_request_waits_for_a_step_that_all_ranks_choose() -> None:
    run = Run(0, seed=6, step_s=0.1, cost_s=0.05)
    run.advance(100)
    run.plan.ask("a module was replaced")
    run.advance(9_901)
    run.plan.ask("a module was replaced")
    run.advance(5_000)
    assert run.seen == [1, 2, 101, 10_240]


def test_a_lasting_shift_of_step_times_is_recognised_once() -> None:
    plan, draw = ObservationPlan(0, start_s=0.0), random.Random(7)

    def shifts(step_s: float, steps: int) -> int:
        return sum(plan.shifted(step_s * draw.uniform(0.9, 1.1)) for _ in range(steps))

    assert shifts(0.1, 500) == 0
    assert shifts(0.4, 10) == 0  # a pause of a few steps
    assert shifts(0.1, 500) == 0
    assert shifts(0.13, 500) == 1
    assert shifts(0.1, 500) == 1
    assert shifts(0.11, 500) == 0


def test_a_shift_asks_for_an_observation() -> None:
    run = Run(0, seed=8, step_s=0.1, cost_s=0.01)
    run.advance(200)
    run._step_s = 0.2
    run.advance(100)
    assert len(run.seen) == 3
    assert 215 <= run.seen[-1] <= 220


def test_a_new_shape_is_observed_at_once_while_the_share_allows_it() -> None:
    run = Run(0, seed=9, step_s=0.1, cost_s=0.1)
    run.advance(20)
    assert run.plan.wants_unknown(run.now_s)
    for _ in range(40):
        run.plan.observed(run.step, 0.1, run.now_s)
    assert not run.plan.wants_unknown(run.now_s)
