"""Verdicts say what the figures say, leave out what is not known, and never mix unlike machines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from markup import bare

from truemfu.records import CaseResult, Environment, RunRecord, RunSummary, Status
from truemfu.report.run.load import load_run
from truemfu.report.run.log_rows import LogRow, LogRows
from truemfu.report.run.log_summary import results_of
from truemfu.report.run.page import write_run_page
from truemfu.report.run.side_by_side import write_runs_page
from truemfu.report.run.verdict import verdict
from truemfu.report.run.worst_steps import worst_steps
from truemfu.report.sweep import verdict as sweep_verdict
from truemfu.report.sweep.groups import groups_of
from truemfu.report.sweep.load import load_sweep
from truemfu.report.sweep.page import write_sweep_page
from truemfu.report.sweep.summary import summarize
from truemfu.run_summary.texts import RunResults, cost

MakeResult = Callable[..., CaseResult]


def of_sweep(results: list[CaseResult], write_sweep: Callable[..., Path]) -> tuple[str, dict[str, str]]:
    sentences, unknown = sweep_verdict.verdict(summarize(load_sweep(write_sweep(results))))
    return " ".join(sentences), dict(unknown)


def test_a_sweep_names_the_fastest_the_cost_of_privacy_and_what_did_not_fit(
    matrix: list[CaseResult], write_sweep: Callable[..., Path]
) -> None:
    text, unknown = of_sweep(matrix, write_sweep)
    assert text.startswith(
        "StandardTrainer is the fastest trainer at all 2 points that several trainers finished; the next one "
        "takes 2.50 to 4.00 times as long."
    )
    assert (
        "Cost of privacy with DPGhostClippingTrainer: 3.35 times (2.50 to 4.50) the step time of "
        "StandardTrainer and 1.34 times (1.20 to 1.50) the memory, over 2 points." in text
    )
    assert "Highest MFU: 50.2 % of 989.4 TFLOP/s, HFU 50.2 %, by StandardTrainer at batch 8" in text
    assert "Out of memory: DPSGDTrainer at batch 8, sequence 512 (batch 6 fits" in text
    assert unknown == {}


def test_a_lead_within_the_error_is_no_lead(
    make_result: MakeResult, write_sweep: Callable[..., Path]
) -> None:
    close = [make_result(step_time_s=0.0360), make_result("DPSGDTrainer", step_time_s=0.0361)]
    text, _ = of_sweep(close, write_sweep)
    assert text.startswith("No trainer is clearly the fastest at most points that several trainers finished.")


def test_what_did_not_run_never_hides_what_did(
    make_result: MakeResult, write_sweep: Callable[..., Path]
) -> None:
    (finished,) = summarize(load_sweep(write_sweep([make_result()]))).experiments
    waiting = msgspec.structs.replace(finished, name="next", device=None, end="not run", step_time_s=None)
    other_model = msgspec.structs.replace(waiting, model="small")
    groups = groups_of([finished, other_model])
    assert [(group.title, len(group.experiments)) for group in groups] == [("1b", 1), ("small", 1)]
    (group,) = groups_of([finished, msgspec.structs.replace(waiting, model=None)])
    assert len(group.experiments) == 2


def test_what_a_sweep_cannot_say_has_a_reason(
    make_result: MakeResult, write_sweep: Callable[..., Path]
) -> None:
    results = [make_result(device="cpu"), make_result("DPSGDTrainer", 8, device="cpu")]
    text, unknown = of_sweep(results, write_sweep)
    assert unknown == {
        "the fastest trainer": "no two trainers finished the same point",
        "the cost of privacy with DPSGDTrainer": "DPSGDTrainer and StandardTrainer finished no common point",
        "MFU": "no peak is known for this device: set TRUEMFU_PEAK_TFLOPS",
    }
    assert text == "Every experiment finished; nothing ran out of memory."


def test_unlike_devices_are_in_charts_of_their_own(
    make_result: MakeResult, write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    there = elsewhere(device_name="NVIDIA H100")
    results = [make_result(), make_result("DPSGDTrainer", environment=there)]
    summary = summarize(load_sweep(write_sweep(results)))
    groups = groups_of(summary.experiments)
    assert [len(group.experiments) for group in groups] == [1, 1]
    assert summary.against_baseline == []
    page = bare(write_sweep_page(tmp_path / "page.html", summary).read_text("utf-8"))
    assert "<h2>Where it is fast: NVIDIA H100</h2>" in page


def test_hosts_with_the_same_device_share_a_chart_and_are_named(
    make_result: MakeResult, write_sweep: Callable[..., Path]
) -> None:
    results = [make_result(), make_result("DPSGDTrainer", environment=elsewhere(host="other"))]
    summary = summarize(load_sweep(write_sweep(results)))
    assert [len(group.experiments) for group in groups_of(summary.experiments)] == [2]
    assert [row.trainer for row in summary.against_baseline] == ["DPSGDTrainer"]
    assert summary.hosts == ["host", "other"]


def elsewhere(*, device_name: str = "NVIDIA H200", host: str = "host") -> Environment:
    return Environment(device_name=device_name, python="3.12.3", versions={}, host=host, git_commit=None)


def test_an_experiment_without_a_device_is_shown_with_the_others(
    make_result: MakeResult, write_sweep: Callable[..., Path]
) -> None:
    lost = make_result("DPSGDTrainer", end=Status.SIGNAL, environment=None, measured=None)
    (group,) = groups_of(summarize(load_sweep(write_sweep([make_result(), lost]))).experiments)
    assert [row.end for _, row in group.experiments] == ["ok", "signal"]


def rows_with(**slow: Any) -> LogRows:
    usual = [
        LogRow(global_step=step, step_time_s=0.1, data_wait_s=0.01, is_warmup=step <= 3)
        for step in range(1, 50)
    ]
    return LogRows([*usual, LogRow(global_step=50, **({"step_time_s": 1.1, "data_wait_s": 0.01} | slow))])


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ({"data_wait_s": 0.9}, "data wait"),
        ({"is_warmup": True}, "compile"),
        ({"is_warmup": True, "is_observed": True}, "observed"),
        ({"straggler_rank": 3, "straggler_excess_s": 0.8}, "straggler"),
        ({"between_steps_s": 0.9}, "pause"),
        ({"evaluation_s": 30.0}, "unknown"),
        ({"data_wait_s": 0.3}, "unknown"),
        ({"straggler_rank": -1, "straggler_excess_s": 0.0}, "unknown"),
    ],
)
def test_a_slow_step_has_the_cause_that_explains_half_of_it(slow: dict[str, Any], cause: str) -> None:
    (worst,) = worst_steps(rows_with(**slow), RunSummary(median_step_time_s=0.1))
    assert (worst.step, worst.cause, round(worst.times_median)) == (50, cause, 11)


def test_a_run_without_slow_steps_or_values_says_so() -> None:
    rows = LogRows([LogRow(global_step=1, step_time_s=0.1)])
    summary = RunSummary(median_step_time_s=0.1, method="closed form")
    sentences, unknown = verdict(
        RunResults(record=RunRecord(), summary=summary), worst_steps(rows, summary), None
    )
    assert sentences == ["A step takes 100.00 ms (median).", "No step took 1.5 times as long as the median."]
    assert [what for what, _ in unknown] == ["MFU", "where the rest of the peak went", "data wait"]


def test_a_million_tokens_cost_price_times_gpus_over_the_rate() -> None:
    summary = RunSummary(median_tokens_per_second=100_000)
    eight = RunRecord(device="NVIDIA H100", world_size=8, scope="job of 8 ranks, summed")
    assert cost(RunResults(record=eight, summary=summary), 2.25).value == "$0.05"
    alone = RunRecord(device="NVIDIA H100", world_size=8, scope="rank 0 of 8 alone")
    for record in (alone, RunRecord(device="cpu", world_size=1), RunRecord(device="NVIDIA H100")):
        found = cost(RunResults(record=record, summary=summary), 2.25)
        assert (found.is_known, bool(found.remark)) == (False, True)
    assert not cost(RunResults(record=eight, summary=RunSummary()), 2.25).is_known


def test_runs_on_unlike_devices_share_the_chart_of_their_losses_only(
    run_folder: Path, change_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    one = load_run(run_folder)
    change_run(lambda run: run.update(device="NVIDIA H200"))
    page = write_runs_page(tmp_path / "runs.html", [one, load_run(run_folder)]).read_text("utf-8")
    titles = [part.split("</b>")[0] for part in page.split("<figcaption><b>")[1:]]
    assert titles[0] == "Loss"
    assert [title.split(", ")[1] for title in titles[1:]] == ["cpu", "NVIDIA H200"] * 2
    assert "The runs used different devices (cpu, NVIDIA H200)" in page


def test_two_runs_have_a_ratio_for_each_figure_and_the_faster_one_is_named(
    run_folder: Path, change_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def slower(run: dict[str, Any]) -> None:
        run["summary"].update(median_tokens_per_second=None, median_samples_per_second=50.0)

    def faster(run: dict[str, Any]) -> None:
        run["summary"].update(median_tokens_per_second=None, median_samples_per_second=75.0)

    change_run(slower)
    first = load_run(run_folder)
    change_run(faster)
    page = write_runs_page(tmp_path / "runs.html", [first, load_run(run_folder)]).read_text("utf-8")
    text = bare(page)
    assert re.search(r"Highest median samples/s: \S+ with 75; \S+ 50\.", text)
    assert "The ratio is" in text
    row = page.split('<td class="left">samples/s</td>')[1].split("</tr>")[0]
    assert re.findall(r"<td>(.*?)</td>", row) == ["50", "75", "1.500"]
    three = bare(write_runs_page(tmp_path / "3.html", [first, first, first]).read_text("utf-8"))
    assert ">ratio<" not in three


def test_an_mfu_that_is_partly_estimated_is_marked_wherever_it_is_shown(
    run_folder: Path, change_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    methods = {"count of observed steps": 15, "estimate": 5}
    change_run(lambda run: run["summary"].update(methods=methods))
    run = load_run(run_folder)
    page = bare(write_run_page(tmp_path / "run.html", run).read_text("utf-8"))
    lead, sentence = re.search(r'class="lead">(.*?)</p>', page), verdict(results_of(run), [], None)[0][0]
    assert lead is not None
    assert re.search(r"MFU \S+ % \(partly estimated\)", lead[1])
    assert re.search(r"MFU \S+ % \(partly estimated\)", sentence)
    assert "the model&#39;s work, estimated from its structure in 5 of 20 steps, else by the count" in page
    assert "<b>MFU and HFU (partly estimated), %</b>" in page
    assert "count of observed steps (15 steps), estimate (5 steps)" in page
    rate = re.search(r"model FLOP/s, median</span>.*?<small>(.*?)</small>", page)
    assert rate is not None
    assert "estimated from its structure in 5 of 20 steps" in rate[1]
    side_by_side = write_runs_page(tmp_path / "runs.html", [run, run]).read_text("utf-8")
    row = side_by_side.split('<td class="left">MFU, median</td>')[1].split("</tr>")[0]
    assert row.count("(partly estimated)") == 2
    chart = side_by_side.split("<b>MFU, %</b>")[1].split("</figcaption>")[0]
    assert chart.count("(partly estimated)") == 2
    rates = side_by_side.split('<td class="left">model FLOP/s, median</td>')[1].split("</tr>")[0]
    assert rates.count("(partly estimated)") == 2
    assert re.search(
        r"The median MFU is the same in all runs that have one: \S+ % \(partly estimated\)", side_by_side
    )
