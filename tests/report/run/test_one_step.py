"""One step as lanes on the page of a run."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import caller

from truemfu.records import StepPart, TypicalStep
from truemfu.report.run.one_step import picture_of

PARTS = [
    ("pause", "evaluation", 0.1),
    ("pause", "generate", 0.2),
    ("other", None, 0.001),
    ("data_wait", None, 0.02),
    ("input", None, 0.01),
    ("no_grad", "generate", 0.3),
    ("no_grad", "reference", 0.05),
    ("no_grad", None, 0.01),
    ("forward", None, 0.1),
    ("backward", None, 0.15),
    ("clipping", None, 0.009),
    ("optimizer", None, 0.05),
]


def step_of(parts: list[tuple[str, str | None, float]], **more: Any) -> TypicalStep:
    found = [StepPart(phase=phase, work=work, seconds=seconds) for phase, work, seconds in parts]
    return TypicalStep(**{"step": 1200, "like": 30, "of": 60} | more, parts=found)


def test_lanes_are_in_order_with_their_times_and_shares() -> None:
    chart = picture_of(step_of(PARTS))
    assert chart is not None
    assert [(lane.name, lane.remark) for lane in chart.lanes] == [
        ("generate", "500.00 ms, 50.0 %"),
        ("reference", "50.00 ms, 5.0 %"),
        ("without gradients", "10.00 ms, 1.0 %"),
        ("train", "309.00 ms, 30.9 %"),
        ("wait", "30.00 ms, 3.0 %"),
        ("other", "1.00 ms, 0.1 %"),
        ("left out", "100.00 ms, 10.0 %"),
    ]
    assert list(chart.kinds.values()) == [
        "data wait",
        "input",
        "forward",
        "backward",
        "clipping",
        "optimizer",
    ]
    assert len(set(chart.kinds)) == 6
    assert chart.title == "Step 1,200"
    assert chart.ticks[100] == "1.000 s"
    assert [one.title for one in chart.lanes[0].segments] == [
        "generate: 200.00 ms, 20.0 %",
        "generate: 300.00 ms, 30.0 %",
    ]
    paused, plain = chart.lanes[0].segments
    assert paused.key != plain.key


def test_the_time_of_the_step_and_what_is_left_out_are_stated() -> None:
    chart = picture_of(step_of(PARTS))
    assert chart is not None
    assert chart.about.startswith("Step 1,200 took 700.00 ms, without 300.00 ms that are drawn but left out")
    assert "Such steps are 30 of 60 after warm-up." in chart.about
    assert "Lanes with the name of a model" in chart.about
    plain = picture_of(step_of([("forward", None, 0.5)], steps=10, like=5, of=5))
    assert plain is not None
    assert plain.about == (
        "Steps 1,191 to 1,200 took 500.00 ms. Its time is the median of recent steps of its kind."
    )


def test_bars_are_where_the_parts_are() -> None:
    draw = random.Random(0)
    parts = [(phase, work, draw.uniform(0.0, 1.0)) for phase, work, _ in draw.choices(PARTS, k=300)]
    chart = picture_of(step_of(parts))
    assert chart is not None
    bars = sorted((one.left, one.left + one.width) for lane in chart.lanes for one in lane.segments)
    assert len(bars) == len(parts)
    whole_s, begin_s = sum(seconds for _, _, seconds in parts), 0.0
    for (left, right), (_, _, seconds) in zip(bars, parts, strict=True):
        assert left == pytest.approx(1000 * begin_s / whole_s, abs=2)
        begin_s += seconds
        assert right == pytest.approx(1000 * begin_s / whole_s, abs=3)
    assert bars[-1][1] <= 1000


@pytest.mark.parametrize(
    "step",
    [
        None,
        TypicalStep(),
        step_of([("forward", None, 0.0)]),
        step_of([("forward", None, -1.0)]),
        step_of([("forward", None, 1e308), ("backward", None, 1e308)]),
    ],
)
def test_without_a_step_there_is_no_picture(step: TypicalStep | None) -> None:
    assert picture_of(step) is None


def test_a_model_with_the_name_of_a_lane_has_a_lane_of_its_own() -> None:
    chart = picture_of(
        step_of([("no_grad", "train", 0.1), ("forward", None, 0.1), ("no_grad", "other", 0.1)])
    )
    assert chart is not None
    assert {lane.name for lane in chart.lanes} == {"model train", "train", "model other"}


def test_phases_of_a_later_version_are_other_work() -> None:
    chart = picture_of(step_of([("sync", None, 1.0), ("pause", None, 1.0)]))
    assert chart is not None
    assert [lane.name for lane in chart.lanes] == ["other", "left out"]


def test_the_page_has_the_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"global_step": 1, "perf/step_time": 0.7}
    (tmp_path / "training_log.json").write_text(json.dumps([row]))
    parts = [*PARTS, ("no_grad", "<b>model", 0.1)]
    step = {
        "step": 7,
        "parts": [{"phase": phase, "work": work, "seconds": seconds} for phase, work, seconds in parts],
    }
    run = {"version": 1, "summary": {"steps": 1, "typical_step": step}}
    (tmp_path / "training_run.json").write_text(json.dumps(run))
    caller(capsys)("report", str(tmp_path))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (figure,) = re.findall(r'<figure class="chart lanes">.*?</figure>', page, re.DOTALL)
    assert figure.count("<rect") == figure.count("<title>") == len(parts)
    assert "<title>backward: 150.00 ms, 13.6 %</title>" in figure
    assert 'aria-label="train: 309.00 ms, 28.1 %"' in figure
    assert "<title>&lt;b&gt;model: 100.00 ms, 9.1 %</title>" in figure
    assert "<b>model" not in page
