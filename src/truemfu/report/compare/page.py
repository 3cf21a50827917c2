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
from ..drawing.line_chart import Tick, tick_text, values_axis
from .compare import FASTER, SLOWER, Comparison, Pair
from .texts import LONGEST_NAME, TITLE, conclusions, figure_name, remarks, sides_of, tables_of

_MOST_BARS = 64
_NARROWEST = (0.99, 1.01)
_WIDEST = 4.0
"""Ratios further from 1 are drawn at the edge; their number is beside them."""
_KINDS = {SLOWER: "slower", FASTER: "faster"}


@dataclass(frozen=True, kw_only=True)
class RatioBar:
    """A ratio and its interval, in percent of the chart's width; `kind` selects the colour.

    `decides`: the limit applies to it, since it is a median step time.
    """

    name: str
    text: str
    kind: str
    decides: bool
    at_percent: float
    low_percent: float
    width_percent: float


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The chart; the percents are where a ratio of 1 and the limit are."""

    bars: Sequence[RatioBar]
    ticks: Sequence[Tick]
    equal_percent: float
    limit_percent: float | None
    limit_text: str
    left_out: int


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
        _Drawn(name, figure.ratio, figure.low, figure.high, pair if figure is pair.step_time else None)
        for name, figure, pair in rows
        if figure.low is not None and figure.high is not None
    ]
    if not known:
        return None
    most_telling = sorted(range(len(known)), key=lambda at: known[at].weight, reverse=True)[:_MOST_BARS]
    shown = [known[at] for at in sorted(most_telling)]
    limit = comparison.max_regression
    ends = [_within(end) for each in shown for end in (each.ratio, each.low, each.high)]
    marks = _NARROWEST if limit is None else (*_NARROWEST, _within(1 + limit))
    axis = values_axis([*ends, *marks], from_zero=False, cuts_spikes=False)

    def percent(ratio: float) -> float:
        return 100 * axis.part(_within(ratio))

    return Bars(
        bars=[
            RatioBar(
                name=each.name,
                text=f"{each.ratio:.3f}" if each.ratio < 100 else f"{each.ratio:,.0f}",
                kind="" if each.decided is None else _kind(each.decided),
                decides=each.decided is not None,
                at_percent=percent(each.ratio),
                low_percent=percent(each.low),
                width_percent=percent(each.high) - percent(each.low),
            )
            for each in shown
        ],
        ticks=[Tick(percent=100 * axis.part(at), text=tick_text(at, axis.step)) for at in axis.ticks()],
        equal_percent=percent(1.0),
        limit_percent=None if limit is None else percent(1 + limit),
        limit_text="" if limit is None else f"the limit, {1 + limit:.6g}",
        left_out=len(known) - len(shown),
    )


class _Drawn(NamedTuple):
    name: str
    ratio: float
    low: float
    high: float
    decided: Pair | None

    @property
    def weight(self) -> tuple[bool, float]:
        """What is beyond the limit is drawn first, then what differs most."""
        is_beyond = self.decided is not None and self.decided.is_beyond_limit
        return is_beyond, abs(math.log(_within(self.ratio)))


def _within(ratio: float) -> float:
    """The ratio, or the end of the widest chart."""
    return min(max(ratio, 1 / _WIDEST), _WIDEST)


def _kind(pair: Pair) -> str:
    return "beyond" if pair.is_beyond_limit else _KINDS.get(pair.verdict, "")
