"""Phases of a run: their means, what limits a step, their picture, and what changed between two runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import caller

from truemfu.records import RunRecord, RunSummary
from truemfu.report.drawing.line_chart import Series, stacked_chart
from truemfu.report.run.load import load_run
from truemfu.report.run.log_summary import summary_of_log
from truemfu.run_summary.phases import limit_of_steps

STEP = {
    "data_wait": 0.01,
    "input": 0.002,
    "forward": 0.03,
    "backward": 0.05,
    "optimizer": 0.006,
    "other": 0.002,
}


def write_log(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "training_log.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    return folder


def row(number: int, phases: dict[str, float], **more: Any) -> dict[str, Any]:
    named = {f"perf/phase/{phase}": seconds for phase, seconds in phases.items()}
    return {"global_step": number, "perf/step_time": sum(phases.values()), **named, **more}


def limit(phases: dict[str, float], workers: int | None = None) -> str | None:
    return limit_of_steps(RunRecord(loader_workers=workers), RunSummary(phases_s=phases))


@pytest.mark.parametrize(
    ("changed", "workers", "text"),
    [
        ({"data_wait": 0.16}, 2, "input-bound: 64.0 % of a step waits for the loader (2 workers)"),
        ({"data_wait": 0.16}, 1, "input-bound: 64.0 % of a step waits for the loader (1 worker)"),
        ({"data_wait": 0.16}, None, "input-bound: 64.0 % of a step waits for the loader"),
        ({"input": 0.102}, 0, "input-bound: 51.0 % of a step lies between a batch and its forward pass"),
        ({"no_grad": 0.1}, 0, "bound by work without gradients: 50.0 % of a step"),
        ({"clipping": 0.094}, 0, "bound by the update of the weights: 51.5 % of a step"),
        ({"other": 0.102}, 0, "bound by the rest of the loop: 51.0 % of a step"),
        ({}, 4, "bound by the model: 80.0 % of a step is forward and backward passes, 10.0 % waits for the"),
    ],
)
def test_what_limits_a_step_has_its_evidence(
    changed: dict[str, float], workers: int | None, text: str
) -> None:
    found = limit(STEP | changed, workers)
    assert found is not None
    assert found.startswith(text)


def test_without_phases_nothing_limits_a_step() -> None:
    assert limit({}) is None
    assert limit({"forward": 0.0}) is None


def test_means_are_of_steps_after_warm_up_with_known_phases(tmp_path: Path) -> None:
    rows = [
        row(1, STEP, **{"perf/warmup": True}),
        row(2, STEP),
        row(3, STEP | {"no_grad": 0.04}),
        {"global_step": 4, "perf/step_time": 0.1, "perf/phases_unknown": "no forward pass was seen"},
    ]
    found = summary_of_log(load_run(write_log(tmp_path / "run", rows)).rows)
    assert found.phases_s == pytest.approx(STEP | {"no_grad": 0.02})
    assert found.phases_unknown == {"no forward pass was seen": 1}


def test_status_has_the_phases_and_what_limits_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_log(tmp_path / "run", [row(number, STEP | {"data_wait": 0.16}) for number in range(5)])
    run = caller(capsys)
    text = run("status", str(folder)).out
    assert "steps are             input-bound: 64.0 % of a step waits for the loader" in text
    assert "forward and backward  32.0 % (of a step: data wait 64.0 %, input 0.8 %, forward 12.0 %" in text
    found = json.loads(run("status", str(folder), "--json").out)
    assert found["phases_s"]["data_wait"] == pytest.approx(0.16)
    assert found["limit"].startswith("input-bound")


def test_status_says_why_there_are_no_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {"perf/step_time": 0.1, "perf/phases_unknown": "no backward pass was seen"}
    folder = write_log(tmp_path / "run", [{"global_step": number, **unknown} for number in range(5)])
    text = caller(capsys)("status", str(folder)).out
    assert "forward and backward  unknown (no backward pass was seen)" in text
    assert "steps are" not in text


# The picture.


@pytest.mark.parametrize("rows", [20, 2000])
def test_stacked_areas_end_at_the_sum_and_list_their_parts(rows: int) -> None:
    draw = random.Random(0)
    one = [draw.uniform(1, 2) for _ in range(rows)]
    other = [math.nan if at == 1 else 3.0 for at in range(rows)]
    chart = stacked_chart(
        "Parts", range(rows), [Series(name="a", values=one), Series(name="b", values=other)]
    )
    assert chart is not None
    lower, upper = (line.runs[0] for line in chart.lines)
    assert [bucket.low for bucket in upper] == [bucket.high for bucket in lower]
    assert all(bucket.low == 0 for bucket in lower)
    size = rows // len(lower)
    assert lower[-1].high == pytest.approx(sum(one[-size:]) / size)
    assert upper[-1].high == pytest.approx(sum(one[-size:]) / size + 3)
    assert chart.table.rows[-1][2].text == "3"


def test_rows_without_any_part_are_a_gap() -> None:
    values = [1.0, 1.0, math.nan, 1.0]
    chart = stacked_chart("Parts", range(4), [Series(name="a", values=values)])
    assert chart is not None
    assert [len(run) for run in chart.lines[0].runs] == [2, 1]
    assert stacked_chart("Parts", range(4), [Series(name="a", values=[math.nan] * 4)]) is None


def test_the_page_of_a_run_shows_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path / "run", [row(number, STEP) for number in range(30)])
    caller(capsys)("report", str(folder))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>Phases of a step, ms</b>" in page
    assert page.count('<path class="stacked"') == len(STEP)
    assert "Steps are bound by the model: 80.0 % of a step" in page


# Two runs.


def noisy_log(folder: Path, **times: float) -> Path:
    draw = random.Random(folder.name)
    return write_log(
        folder,
        [
            row(
                number,
                {phase: s * times.get(phase, 1.0) * draw.uniform(0.95, 1.05) for phase, s in STEP.items()},
            )
            for number in range(400)
        ],
    )


def test_a_comparison_names_the_phase_that_got_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = noisy_log(tmp_path / "a"), noisy_log(tmp_path / "b", backward=1.4, optimizer=0.5)
    run = caller(capsys)
    text = " ".join(run("compare", str(first), str(second)).out.split())
    assert "B is slower" in text
    assert "The phase that got slower most: backward, " in text
    assert "The phase that got faster most: optimizer, " in text
    found = json.loads(run("compare", str(first), str(second), "--json").out)
    (pair,) = found["pairs"]
    ratios = {one["name"]: one["ratio"] for one in pair["figures"]}
    assert ratios["phase_backward_s"] == pytest.approx(1.4, rel=0.02)
    assert ratios["phase_forward_s"] == pytest.approx(1.0, rel=0.02)


def test_equal_runs_have_no_phase_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = noisy_log(tmp_path / "a"), noisy_log(tmp_path / "b")
    assert "phase that got" not in caller(capsys)("compare", str(first), str(second)).out
