"""A comparison as an HTML page: what was found, the ratios with their intervals as a chart, and the tables.

run      a bar for each figure        step time ├──■──┤        limit
sweep    a bar for each experiment                    1 (equal)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...text import shortened
from ..drawing.html import write_template
from ..drawing.line_chart import Axis, values_axis
from .compare import FASTER, SLOWER, Comparison, Pair
from .texts import LONGEST_NAME, TITLE, conclusions, figure_name, remarks, sides_of, tables_of

_MOST_BARS = 64
_NARROWEST = (0.99, 1.01)
_WIDEST = 4.0
"""Ratios further from 1 are drawn at the edge; their number is beside them."""
_KINDS = {SLOWER: "slower", FASTER: "faster"}


class RatioBar(NamedTuple):
    """A ratio and its interval."""

    name: str
    ratio: float
    low: float
    high: float
    decided: Pair | None
    """The limit applies to a median step time alone."""

    @property
    def kind(self) -> str:
        """Selects the colour."""
        if self.decided is None:
            return ""
        return "beyond" if self.decided.is_beyond_limit else _KINDS.get(self.decided.verdict, "")

    @property
    def weight(self) -> tuple[bool, float]:
        """What is beyond the limit is drawn first, then what differs most."""
        return self.kind == "beyond", abs(math.log(_within(self.ratio)))


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The chart; `limit` is the ratio that must not be exceeded."""

    bars: Sequence[RatioBar]
    axis: Axis
    limit: float | None
    left_out: int

    def percent(self, ratio: float) -> float:
        """The position of a ratio, in percent of the chart's width."""
        return self.axis.across(_within(ratio)) / 10


def write_comparison_page(path: Path, comparison: Comparison) -> Path:
    """Write the comparison to `path` and return the path."""
    return write_template(
        path,
        "compare_page.html.jinja",
        title=TITLE,
        lead=", ".join(sides_of(comparison)),
        verdict=conclusions(comparison),
        chart=_bars(comparison),
        tables=tables_of(comparison),
        remarks=remarks(comparison),
    )


def _bars(comparison: Comparison) -> Bars | None:
    """Ratios that have an interval; the verdict's colour is that of the step time, which decides it."""
    if comparison.kind == "run":
        rows = [(figure_name(figure), figure, pair) for pair in comparison.pairs for figure in pair.figures]
    else:
        rows = [(shortened(pair.name, LONGEST_NAME), pair.step_time, pair) for pair in comparison.pairs]
    known = [
        RatioBar(name, figure.ratio, figure.low, figure.high, pair if figure is pair.step_time else None)
        for name, figure, pair in rows
        if figure.low is not None and figure.high is not None
    ]
    if not known:
        return None
    most_telling = sorted(range(len(known)), key=lambda at: known[at].weight, reverse=True)[:_MOST_BARS]
    shown = [known[at] for at in sorted(most_telling)]
    limit = None if comparison.max_regression is None else 1 + comparison.max_regression
    ends = [_within(end) for each in shown for end in (each.ratio, each.low, each.high)]
    marks = _NARROWEST if limit is None else (*_NARROWEST, _within(limit))
    axis = values_axis([*ends, *marks], from_zero=False, cuts_spikes=False)
    return Bars(bars=shown, axis=axis, limit=limit, left_out=len(known) - len(shown))


def _within(ratio: float) -> float:
    """The ratio, or the end of the widest chart."""
    return min(max(ratio, 1 / _WIDEST), _WIDEST)
