"""A chart's lines lie where their values are, and what thinning and cutting leave out is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from truemfu.report.drawing.html import write_template
from truemfu.report.drawing.line_chart import (
    BUCKETS,
    MOST_ROWS,
    Chart,
    Series,
    line_chart,
    thinned,
    thinning,
    tick_text,
)

Points = list[list[tuple[float, float]]]


def chart_of(values: list[float | None], *, from_zero: bool = True) -> Chart:
    chart = line_chart(
        "t", range(1, len(values) + 1), [Series(name="t", values=values)], unit="ms", from_zero=from_zero
    )
    assert chart is not None
    return chart


def points_of(chart: Chart) -> Points:
    """Each stroke of the first line as its points."""
    return [
        [(chart.x.across(bucket.step), chart.y.down(bucket.middle)) for bucket in run]
        for run in chart.lines[0].runs
    ]


def test_ticks_of_steps_are_whole_numbers() -> None:
    for steps in range(2, 300):
        ticks = list(chart_of([1.0] * steps).x.ticks.values())
        assert len(ticks) >= 2
        assert all(text.isdecimal() for text in ticks), ticks


def test_a_line_goes_through_its_values_and_ends_on_the_ticks() -> None:
    chart = chart_of([0.0, 10.0, 20.0, 40.0])
    assert {text: chart.y.down(value) for value, text in chart.y.ticks.items()} == {
        "0": 1000,
        "10": 750,
        "20": 500,
        "30": 250,
        "40": 0,
    }
    assert points_of(chart) == [[(0, 1000), (333.3, 750), (666.7, 500), (1000, 0)]]
    assert {text: chart.x.across(value) for value, text in chart.x.ticks.items()} == {
        "1": 0,
        "2": 333.3,
        "3": 666.7,
        "4": 1000,
    }
    assert (chart.beyond, chart.is_thinned) == (None, False)


def test_what_is_not_known_is_a_gap_and_a_lone_value_a_dot(tmp_path: Path) -> None:
    chart = chart_of([1.0, 2.0, None, 4.0, float("nan")])
    tables = {"figures": chart.table, "facts": chart.table}
    page = write_template(tmp_path / "page.html", "runs_page.html.jinja", charts=[chart], **tables)
    paths = re.findall(r'class="stroke" d="([^"]*)"', page.read_text(encoding="utf-8"))
    assert paths == ["M0.0 750.0L250.0 500.0M750.0 0.0l0 0"]


def test_without_any_value_there_is_no_chart() -> None:
    nothing = [Series(name="a", values=[None]), Series(name="b", values=[float("inf")])]
    assert line_chart("t", [1], nothing) is None


def test_a_spike_is_at_the_edge_and_said_but_no_mountain_is_cut() -> None:
    chart = chart_of([10.0] * 50 + [9000.0] + [10.0] * 49)
    assert chart.beyond == "1 value is above the chart, up to 9,000 ms at step 51."
    assert list(chart.y.ticks.values())[-1] == "15"
    assert min(y for _, y in points_of(chart)[0]) == 0
    assert chart_of([float(value) for value in range(100)]).beyond is None


def test_what_is_no_accident_is_not_cut() -> None:
    losses = [Series(name="loss", values=[11.0, 6.0, *[1.0 + 0.001 * index for index in range(198)]])]
    assert line_chart("t", range(200), losses, from_zero=False) != (
        whole := line_chart("t", range(200), losses, from_zero=False, cuts_spikes=False)
    )
    assert whole is not None
    assert whole.beyond is None
    assert max(whole.y.ticks) >= 11


def test_a_long_log_keeps_its_extremes_in_fewer_points() -> None:
    values: list[float | None] = [100.0 + index % 7 for index in range(20_000)]
    values[12_345] = 20.0
    buckets = [bucket for bucket in thinned(range(20_000), values) if bucket is not None]
    assert len(buckets) == BUCKETS
    assert min(bucket.low for bucket in buckets) == 20.0
    assert {bucket.high for bucket in buckets} == {106.0}
    assert {bucket.middle for bucket in buckets} <= {102.0, 102.5, 103.0, 103.5, 104.0}
    chart = chart_of(values)
    assert chart.is_thinned
    assert [len(run) for run in chart.lines[0].runs] == [BUCKETS]
    assert thinning(20_000) == (
        "20,000 rows in groups of 80: the line is the median of each group, the band behind it the range "
        "from lowest to highest."
    )


def test_a_short_log_is_drawn_as_it_is() -> None:
    assert len(thinned(range(MOST_ROWS), [1.0] * MOST_ROWS)) == MOST_ROWS
    assert thinning(MOST_ROWS) is None


@pytest.mark.parametrize("from_zero", [True, False])
@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [-3.0], [1e299, -1e299], [1e16, 1e16 + 2], [0.0, 5e-324], [1e-9, 2e-9]]
)
def test_odd_ranges_have_ticks_and_stay_inside(values: list[float | None], from_zero: bool) -> None:
    chart = chart_of(values, from_zero=from_zero)
    texts = list(chart.y.ticks.values())
    assert 2 <= len(texts) <= 7
    assert len(set(texts)) == len(texts) or values[0] == 1e16
    for stroke in points_of(chart):
        assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in stroke)


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(12.5, 2.5, "12.5"), (20_000, 5000, "20,000"), (-0.02, 0.01, "−0.02"), (3e-9, 1e-9, "3e-09")],
)
def test_a_tick_has_the_decimals_it_needs(value: float, step: float, text: str) -> None:
    assert tick_text(value, step) == text


def test_a_line_on_top_of_another_has_gaps_through_which_that_is_seen() -> None:
    own, same, apart = [1.0, 2.0, 3.0, 4.0], [9.0, 2.0, 3.0, 9.0], [5.0, 6.0, 5.0, 6.0]
    chart = line_chart(
        "Loss", range(4), [Series(name=str(key), values=v) for key, v in enumerate((own, same, apart))]
    )
    assert chart is not None
    assert [line.dashes for line in chart.lines] == ["6.0 12.0", "", ""]
