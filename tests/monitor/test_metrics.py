"""The arithmetic of a step: names, units, what is left out."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import msgspec
import pytest

from truemfu.monitor.metrics import StepAmounts, StepTime, Window, performance
from truemfu.monitor.ranks.role import RankRole
from truemfu.monitor.step_flops.source import StepFlops
from truemfu.monitor.totals import StepTotals
from truemfu.records import RunRecord, RunSummary
from truemfu.run_summary.sums import Reservoir
from truemfu.run_summary.texts import RunResults, figures

FLOPS = StepFlops(
    model_flops=2 * 10**12,
    hardware_flops=3 * 10**12,
    peak_flops_per_s=10e12,
    peak_source="override",
    method="closed form",
)
TIME = StepTime(steps=1, elapsed_s=0.5, data_wait_s=0.1)
STEP = StepAmounts(
    samples=4,
    tokens=2048,
    useful_tokens=1024.0,
    flops=FLOPS,
    warmup=False,
)
OWN = {
    "perf/step_time": 0.5,
    "perf/steps_per_second": 2.0,
    "perf/tokens_per_second_per_gpu": 4096.0,
    "perf/real_tokens_per_second_per_gpu": 2048.0,
    "perf/samples_per_second_per_gpu": 8.0,
    "perf/tflops_per_gpu": 4.0,
    "perf/padding_efficiency": 0.5,
    "perf/data_wait": 0.1,
    "perf/method": "closed form",
}


def test_a_row_of_a_single_process_holds_every_rate() -> None:
    assert performance(STEP, TIME) == OWN | {
        "perf/tokens_per_second": 4096.0,
        "perf/real_tokens_per_second": 2048.0,
        "perf/samples_per_second": 8.0,
        "perf/mfu": 0.4,
        "perf/mfu_percent": 40.0,
        "perf/hfu": pytest.approx(0.6),
        "perf/hfu_percent": pytest.approx(60.0),
    }


def test_a_row_of_a_job_holds_the_sums_over_its_ranks_and_this_gpus_own_rates() -> None:
    sums = {
        "tokens": 5000,
        "useful_tokens": 3000,
        "samples": 11,
        "model_flops": 9 * 10**12,
        "hardware_flops": 12 * 10**12,
        "peak_flops_per_s": 30 * 10**12,
    }
    in_job = dataclasses.replace(STEP, in_job=True, job=sums)
    own = OWN | {"perf/mfu_per_gpu": 0.4, "perf/hfu_per_gpu": pytest.approx(0.6)}
    assert performance(in_job, TIME) == own | {
        "perf/tokens_per_second": 10000.0,
        "perf/real_tokens_per_second": 6000.0,
        "perf/samples_per_second": 22.0,
        "perf/mfu": pytest.approx(0.6),
        "perf/mfu_percent": pytest.approx(60.0),
        "perf/hfu": pytest.approx(0.8),
        "perf/hfu_percent": pytest.approx(80.0),
    }
    assert performance(dataclasses.replace(STEP, in_job=True), TIME) == own


def test_executed_flops_of_different_methods_are_not_added_up() -> None:
    by_counters = dataclasses.replace(STEP, flops=dataclasses.replace(FLOPS, executed_method="counters"))
    assert STEP.shares["hardware_flops"] == 3 * 10**12
    assert by_counters.shares["hardware_flops by counters"] == 3 * 10**12
    job = {"hardware_flops": 6 * 10**12, "peak_flops_per_s": 20 * 10**12}
    assert "perf/hfu" not in performance(dataclasses.replace(by_counters, in_job=True, job=job), TIME)


def test_a_ranks_share_is_exact() -> None:
    in_group_of_three = dataclasses.replace(STEP, role=RankRole(flops_shared_by=3, tokens_shared_by=3))
    shared = in_group_of_three.shares
    assert shared["model_flops"] == Fraction(2 * 10**12, 3)
    assert shared["tokens"] == Fraction(2048, 3)
    assert shared["peak_flops_per_s"] == 10**13
    row = performance(in_group_of_three, TIME)
    assert row["perf/mfu"] == pytest.approx(performance(STEP, TIME)["perf/mfu"] / 3)
    assert row["perf/tflops_per_gpu"] == pytest.approx(performance(STEP, TIME)["perf/tflops_per_gpu"] / 3)
    later_stage = dataclasses.replace(STEP, role=RankRole(has_tokens=False))
    assert not [name for name in performance(later_stage, TIME) if "tokens" in name or "samples" in name]
    assert (later_stage.shares["tokens"], later_stage.shares["model_flops"]) == (0, 2 * 10**12)


def test_steps_that_were_not_logged_share_the_time() -> None:
    row = performance(STEP, TIME._replace(steps=5))
    assert row["perf/step_time"] == pytest.approx(0.1)
    assert row["perf/data_wait"] == pytest.approx(0.02)
    assert row["perf/mfu"] == 0.4


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        ({"elapsed_s": None}, "perf/step_time perf/mfu perf/tokens_per_second perf/tflops_per_gpu"),
        ({"elapsed_s": 0.0}, "perf/step_time perf/mfu perf/tokens_per_second perf/tflops_per_gpu"),
        ({"flops": None}, "perf/mfu perf/mfu_percent perf/hfu perf/tflops_per_gpu"),
        ({"flops": dataclasses.replace(FLOPS, peak_flops_per_s=None)}, "perf/mfu perf/hfu"),
        ({"tokens": None}, "perf/tokens_per_second perf/padding_efficiency"),
        ({"useful_tokens": None}, "perf/real_tokens_per_second perf/padding_efficiency"),
        ({"samples": None}, "perf/samples_per_second"),
        ({"data_wait_s": None}, "perf/data_wait"),
    ],
)
def test_what_is_not_known_is_left_out(change: dict[str, object], absent: str) -> None:
    of_time = {name: value for name, value in change.items() if name in TIME._fields}
    of_step = {name: value for name, value in change.items() if name not in of_time}
    row = performance(dataclasses.replace(STEP, **of_step), TIME._replace(**of_time))  # type: ignore[arg-type]
    assert not set(absent.split()) & set(row)
    assert all(value is not None for value in row.values())


def test_a_utilisation_above_one_is_not_clamped() -> None:
    assert performance(STEP, TIME._replace(elapsed_s=0.1))["perf/mfu"] == pytest.approx(2.0)


def test_a_warm_up_is_marked_and_out_of_the_medians() -> None:
    window = Window()
    slow = performance(dataclasses.replace(STEP, warmup=True), TIME._replace(elapsed_s=60.0))
    assert slow["perf/warmup"] is True
    window.add_all([slow])
    for elapsed_s in (0.5, 0.5, 1.0):
        window.add_all([performance(STEP, TIME._replace(elapsed_s=elapsed_s))])
    assert window.medians() == {"perf/step_time_median": 0.5, "perf/mfu_median": 0.4}


def test_the_window_forgets() -> None:
    window = Window(steps=3)
    for elapsed_s in (9.0, 9.0, 1.0, 2.0, 3.0):
        window.add_all([performance(STEP, TIME._replace(elapsed_s=elapsed_s))])
    assert window.medians()["perf/step_time_median"] == 2.0


def test_totals_are_medians_over_the_steps_after_warm_up() -> None:
    totals = StepTotals()
    totals.add(dataclasses.replace(STEP, warmup=True), [TIME._replace(elapsed_s=50.0)])
    totals.add(STEP, [TIME])
    totals.add(STEP, [TIME, TIME])
    run = totals.as_dict()
    assert run["steps"] == 4
    assert run["warmup_steps"] == 1
    assert run["median_step_time_s"] == 0.5
    assert run["median_mfu"] == 0.4
    assert run["median_tokens_per_second"] == 4096.0
    assert run["padding_lost"] == 0.5
    assert run["data_wait_share"] == pytest.approx(0.2)
    assert run["totals"]["model_flops"] == 4 * 2 * 10**12
    assert run["totals"]["tokens"] == 4 * 2048
    assert run["method"] == "closed form"
    assert run["median_steps"]["mfu"] == run["median_steps"]["step_time_s"] == 3


def test_a_measured_hfu_tells_in_how_many_steps_it_was_measured() -> None:
    totals = StepTotals()
    totals.add(STEP, [TIME] * 10)
    totals.add(
        dataclasses.replace(STEP, flops=dataclasses.replace(FLOPS, executed_method="hardware counters")),
        [TIME] * 4,
    )
    steps = totals.as_dict()["median_steps"]
    assert (steps["mfu"], steps["hfu"]) == (14, 4)
    summary = msgspec.convert(totals.as_dict(), RunSummary)
    hfu = {
        one.label: one.text for one in figures(RunResults(record=RunRecord(summary=summary), summary=summary))
    }
    assert hfu["HFU, median"].endswith("(the executed work, by hardware counters, measured in 4 of 14 steps)")


def test_a_run_of_warm_up_alone_says_so() -> None:
    totals = StepTotals()
    totals.add(dataclasses.replace(STEP, warmup=True), [TIME])
    run = totals.as_dict()
    assert run["median_step_time_s"] == 0.5
    assert run["medians_over"] == "all steps (none after warm-up)"


def test_a_run_without_steps_knows_nothing() -> None:
    run = StepTotals().as_dict()
    assert run["steps"] == 0
    assert run["median_mfu"] is None
    assert run["padding_lost"] is None


def test_a_reservoir_keeps_its_size_and_a_fair_median() -> None:
    reservoir = Reservoir(size=512)
    for first in range(0, 100_000, 100):
        reservoir.add([float(first + value) for value in range(100)])
    median = reservoir.median()
    assert len(reservoir._sample) == 512
    assert median is not None
    assert 40_000 < median < 60_000
