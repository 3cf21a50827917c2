"""Gains of simulated trials: their intervals contain the truth, and nothing is recommended that loses."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from truemfu.remedies.facts import UNCHANGED
from truemfu.trial.choice import best_of_each, recommended_of
from truemfu.trial.figures import (
    Gain,
    beside,
    gain_of,
    largest_difference,
    loss_distance,
    loss_warning,
    run_to_run,
    typical_step,
    unchanged_difference,
)
from truemfu.trial.plan import turns
from truemfu.trial.record import GAINS, LOSES, TOGETHER, UNCLEAR, LossDistance, TrialCase, TrialRun

RUN_TO_RUN, STEP_TO_STEP = 0.01, 0.03


def simulated(draw: random.Random, gains: dict[str, float], rounds: int, steps: int = 40) -> list[TrialRun]:
    """The runs of a trial, whose unchanged step takes 50 ms on a machine with noise of both kinds."""
    names = [UNCHANGED, *(name for turn in range(rounds) for name in turns(list(gains), turn))]
    runs = []
    for number, name in enumerate(names, start=1):
        step_s = 0.05 * (1 - gains.get(name, 0.0)) * math.exp(draw.gauss(0, RUN_TO_RUN))
        times = [step_s * math.exp(draw.gauss(0, STEP_TO_STEP)) for _ in range(steps)]
        runs.append(TrialRun(number=number, name=name, seconds=10, step_times_s=times))
    return runs


def gain_in(runs: list[TrialRun], name: str) -> Gain:
    changed = [run for run in runs if run.name == name]
    unchanged = [run for run in runs if run.name == UNCHANGED]
    *estimates, all_unchanged = (
        [typical_step(run.step_times_s, workers=0) for run in side]
        for side in (beside(runs, changed), changed, unchanged)
    )
    return gain_of(*estimates, run_to_run=run_to_run(all_unchanged, on_cpu=False))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_intervals_contain_true_gains_and_nothing_that_loses_is_shown_to_gain(rounds: int) -> None:
    draw = random.Random(rounds)
    contained, false_gains, total = 0, 0, 0
    for _ in range(150):
        truth = {name: draw.choice([0.0, 0.0, draw.uniform(-0.3, 0.4)]) for name in "abcd"}
        runs = simulated(draw, truth, rounds)
        for name, gain in truth.items():
            found = gain_in(runs, name)
            contained += found.low <= gain <= found.high
            false_gains += found.verdict == GAINS and gain <= 0
            if gain < -0.15:
                assert found.verdict != GAINS
            total += 1
    assert 0.93 <= contained / total <= 0.99
    assert false_gains / total < 0.03


def test_on_a_machine_whose_speed_changes_nothing_is_shown_by_one_run() -> None:
    """As seen on a host with other work: unchanged steps of 31 to 40 ms, and a remedy between two of them."""
    seconds = [0.0372, 0.0321, 0.0319, 0.0311, 0.0314, 0.0401, 0.0379]
    names = [UNCHANGED] * 4 + ["attention"] + [UNCHANGED] * 2
    runs = [
        TrialRun(number=number, name=name, seconds=10, step_times_s=[step_s] * 40)
        for number, (name, step_s) in enumerate(zip(names, seconds, strict=True), start=1)
    ]
    assert gain_in(runs, "attention").verdict == UNCLEAR
    steady = [msgspec.structs.replace(run, step_times_s=[0.035] * 40) for run in runs]
    steady[4] = runs[4]
    assert gain_in(steady, "attention").verdict == GAINS


def test_a_clear_gain_and_a_clear_loss_are_shown_in_two_rounds() -> None:
    runs = simulated(random.Random(0), {"faster": 0.3, "slower": -0.3, "same": 0.0}, rounds=2)
    verdicts = {name: gain_in(runs, name).verdict for name in ("faster", "slower", "same")}
    assert verdicts == {"faster": GAINS, "slower": LOSES, "same": UNCLEAR}
    faster = gain_in(runs, "faster")
    assert faster.value == pytest.approx(0.3, abs=0.02)
    assert faster.step_time_s == pytest.approx((1 - faster.value) * faster.unchanged_s)


def test_each_remedy_is_compared_with_the_unchanged_runs_beside_it() -> None:
    runs = simulated(random.Random(0), dict.fromkeys("abcde", 0.0), rounds=2)
    order = [run.name for run in runs]
    a, b, c, d, e, u = *"abcde", UNCHANGED
    assert order == [u, a, b, u, c, d, u, e, u, e, d, u, c, b, u, a, u]
    neighbours = {name: beside(runs, [run for run in runs if run.name == name]) for name in "ae"}
    assert [run.number for run in neighbours["a"]] == [1, 4, 15, 17]
    assert [run.number for run in neighbours["e"]] == [7, 9, 12]


def test_a_failed_unchanged_run_is_beside_nothing() -> None:
    failed = TrialRun(number=3, name=UNCHANGED, seconds=1, failure="ended by SIGKILL")
    runs = [run for run in simulated(random.Random(0), {"a": 0.0}, rounds=1) if run.number < 3]
    assert [run.number for run in beside([*runs, failed], runs[1:])] == [1]


def test_bursts_of_waits_count_with_their_mean_and_disturbances_do_not() -> None:
    steps = [0.01 + (0.08 if step % 4 == 0 else 0.0) for step in range(40)]
    steps[7] += 5.0
    assert typical_step(steps, workers=4).value == pytest.approx(0.03)
    assert typical_step(steps, workers=0).value == pytest.approx(0.01)


def test_a_host_that_is_slow_at_first_changes_nothing() -> None:
    """As seen where compiled code was loaded from the cache: its processes were still being started."""
    steps = [0.581, 0.541, 0.385, 0.545, 0.548, 0.399, 0.441] + 33 * [0.097]
    for workers in (0, 4):
        assert typical_step(steps, workers=workers).value == pytest.approx(0.097)


@pytest.mark.parametrize("workers", range(1, 33))
@pytest.mark.parametrize("steps", [20, 30, 40, 200])
def test_bursts_of_any_number_of_workers_count_with_their_mean(workers: int, steps: int) -> None:
    times = [0.01 + (0.01 * workers if step % workers == 0 else 0.0) for step in range(steps)]
    found = typical_step(times, workers=workers)
    few = steps - workers + 1 < 20
    mean = sum(times) / steps
    assert found.value == pytest.approx(mean if few else 0.02)


def test_losses_are_compared_step_by_step() -> None:
    assert largest_difference([2.0, 1.0, None], [2.0, 1.1, 3.0]) == (2, pytest.approx(0.1 / 1.1))
    assert largest_difference([None], [1.0]) is None
    assert largest_difference([0.0, -1.0], [0.0, 1.0]) == (2, 2.0)
    assert unchanged_difference([[1.0], [1.0], [1.5]]) == pytest.approx(1 / 3)
    assert unchanged_difference([[1.0]]) is None
    same = loss_distance([[2.0, 1.0], [2.0, 1.0]], [[2.0, 1.0], [2.0, 1.0]])
    assert same is not None
    assert (same.are_identical, same.unchanged_difference, same.is_within_unchanged) == (True, 0.0, True)
    apart = loss_distance([[2.0, 1.0], [2.0, 1.5]], [[2.0, 1.1]])
    assert apart is not None
    assert not apart.are_identical
    assert apart.is_within_unchanged
    assert loss_distance([[1.0]], [[None]]) is None


@pytest.mark.parametrize(
    ("changes", "apart", "unchanged", "is_fp32", "said"),
    [
        ("nothing", 1e-7, 0.0, True, "although it should change nothing"),
        ("nothing", 1e-7, 1e-7, True, None),
        ("nothing", 0.0, 0.0, True, None),
        ("nothing", 0.1, None, True, "its losses are 10.0 % apart, although"),
        ("rounding", 9e-4, 0.0, True, None),
        ("rounding", 2e-3, 0.0, True, "which is more than rounding"),
        ("rounding", 2e-3, 0.0, False, None),
        ("rounding", 0.02, 0.0, False, "which is more than rounding"),
        ("precision", 0.5, 0.0, True, None),
    ],
)
def test_losses_that_a_remedy_should_not_change_are_a_warning(
    changes: str, apart: float, unchanged: float | None, is_fp32: bool, said: str | None
) -> None:
    losses = LossDistance(
        steps=30, are_identical=not apart, largest_difference=apart, unchanged_difference=unchanged
    )
    found = loss_warning(changes, losses, is_fp32=is_fp32)
    assert found is None if said is None else said in (found or "")
    assert loss_warning(changes, None, is_fp32=is_fp32) is None


def case(name: str, verdict: str, gain: float | None = None, remedies: list[str] | None = None) -> TrialCase:
    return TrialCase(name=name, title=name, verdict=verdict, reason="", gain=gain, remedies=remedies or [])


def test_of_remedies_that_exclude_each_other_the_better_one_goes_together() -> None:
    cases = [
        case("compile", GAINS, 0.2),
        case("compile_blocks", GAINS, 0.25),
        case("cuda_graphs", "failed"),
        case("fused_optimizer", GAINS, 0.05),
        case("foreach_optimizer", GAINS, 0.02),
        case("tf32", LOSES, -0.3),
        case("autocast_bf16", UNCLEAR, 0.4),
    ]
    assert best_of_each(cases) == ["compile_blocks", "fused_optimizer"]


def test_what_is_recommended_has_gained_as_it_is_recommended() -> None:
    cases = [case("compile", GAINS, 0.2), case("fused_optimizer", GAINS, 0.05), case("tf32", LOSES, -0.1)]
    names = ["compile", "fused_optimizer"]
    assert recommended_of(cases, case(TOGETHER, GAINS, 0.24, names)) == names
    assert recommended_of(cases, case(TOGETHER, GAINS, 0.1, names)) == ["compile"]
    assert recommended_of(cases, case(TOGETHER, UNCLEAR, 0.3, names)) == ["compile"]
    assert recommended_of(cases, case(TOGETHER, "failed", None, names)) == ["compile"]
    assert recommended_of(cases, None) == ["compile"]
    assert recommended_of(cases[2:], None) == []
