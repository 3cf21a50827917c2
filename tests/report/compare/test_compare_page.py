"""The chart of a comparison: which ratios it draws, and where."""

from __future__ import annotations

import math
from typing import Any

import pytest

from truemfu.report.compare.compare import ComparedFigure, Comparison, Pair, Unmatched
from truemfu.report.compare.page import Bars, _bars
from truemfu.report.compare.texts import tables_of


def pair(name: str, *figures: ComparedFigure, is_beyond: bool = False) -> Pair:
    return Pair(
        name=name, runs_a=1, runs_b=1, steps_a=100, steps_b=100, independent_steps_a=90.0,
        independent_steps_b=80.0, verdict="slower" if is_beyond else "no difference shown",
        is_beyond_limit=is_beyond, smallest_shown=0.05, is_unsure=False, figures=list(figures),
    )  # fmt: skip


def step_time(ratio: float, low: float | None = None, high: float | None = None) -> ComparedFigure:
    return ComparedFigure(name="step_time_median_s", a=0.1, b=0.1 * ratio, ratio=ratio, low=low, high=high)


def comparison(*pairs: Pair, **values: Any) -> Comparison:
    given: dict[str, Any] = {
        "a": "a", "b": "b", "kind": "sweep", "confidence": 0.95, "max_regression": None, "run_to_run": None,
        "unmatched": [], "notes": [], "is_within_limit": True,
    }  # fmt: skip
    return Comparison(pairs=list(pairs), **given | values)


def drawn(found: Comparison) -> Bars:
    chart = _bars(found)
    assert chart is not None
    return chart


def test_a_ratio_is_between_the_ends_of_its_interval_and_equality_is_where_it_belongs() -> None:
    chart = drawn(comparison(pair("one", step_time(1.1, 1.05, 1.15)), max_regression=0.025))
    (bar,) = chart.bars
    assert chart.limit == 1.025
    assert chart.percent(1) < chart.percent(chart.limit) < chart.percent(bar.low) < chart.percent(bar.ratio)
    assert chart.percent(bar.ratio) < chart.percent(bar.high)


def test_of_many_experiments_those_that_differ_most_are_drawn_in_their_order() -> None:
    equal = [pair(f"equal {at}", step_time(1.0, 0.9, 1.1)) for at in range(70)]
    slow = pair("slow", step_time(1.06, 1.02, 1.1), is_beyond=True)
    fast = pair("fast", step_time(0.5, 0.4, 0.6))
    chart = drawn(comparison(*equal, fast, slow, max_regression=0.05))
    names = [bar.name for bar in chart.bars]
    assert (len(names), chart.left_out) == (64, 8)
    assert names[-2:] == ["fast", "slow"]
    assert [bar.kind for bar in chart.bars[-1:]] == ["beyond"]


@pytest.mark.parametrize(
    "ends", [(1e6, 1e5, 1e7), (1e-9, 0.0, 1e-3), (math.inf, 1.0, math.inf), (1.0, 1 - 1e-9, 1 + 1e-9)]
)
def test_no_ratio_leaves_the_chart_or_takes_the_room_of_the_others(ends: tuple[float, float, float]) -> None:
    usual = pair("usual", step_time(1.0, 0.9, 1.1))
    chart = drawn(comparison(pair("odd", step_time(*ends)), usual, max_regression=10.0))
    for bar in chart.bars:
        assert 0 <= chart.percent(bar.low) <= chart.percent(bar.ratio) <= chart.percent(bar.high) <= 100
    assert chart.percent(chart.bars[1].high) - chart.percent(chart.bars[1].low) > 1
    assert len(set(chart.axis.ticks.values())) == len(chart.axis.ticks) >= 3


def test_figures_without_an_interval_have_no_bar() -> None:
    memory = ComparedFigure(name="peak_memory_bytes", a=1.0, b=2.0, ratio=2.0)
    chart = drawn(comparison(pair("run", step_time(1.0, 0.9, 1.1), memory), kind="run"))
    assert [bar.name for bar in chart.bars] == ["step time, median"]
    assert _bars(comparison(pair("run", step_time(1.0), memory), kind="run")) is None
    assert _bars(comparison()) is None


def test_step_times_are_sorted_and_copied_as_seconds_and_texts_as_texts() -> None:
    missing = Unmatched(name="gone", a="12 steps with a time after warm-up", b="ok", is_failure=False)
    found = comparison(pair("one", step_time(1.1, 1.0, 1.2)), unmatched=[missing])
    times, _, not_compared = tables_of(found)
    assert [column.is_number for column in times.columns] == [False, True, True, True, False, False, False]
    assert [column.unit for column in times.columns] == ["", "s", "s", "", "", "", ""]
    assert [cell.value for cell in times.rows[0][:3]] == [None, 0.1, pytest.approx(0.11)]
    assert not any(column.is_number for column in not_compared.columns)
