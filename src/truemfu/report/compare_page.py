"""A comparison as an HTML page: what was found, the ratios with their intervals as a chart, and the tables.

run      a bar for each figure        step time ├──■──┤        limit
sweep    a bar for each experiment                    1 (equal)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..text import shortened
from .chart import Tick, tick_text, values_axis
from .compare import FASTER, SLOWER, Comparison, Pair
from .compare_texts import LONGEST_NAME, TITLE, conclusions, figure_name, remarks, sides_of, tables_of
from .html import write_template
from .render import TextTable
from .tables import Column, Table, plain

_MOST_BARS = 64
_KINDS = {SLOWER: "slower", FASTER: "faster"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A ratio and its interval, in percent of the chart's width; `kind` selects the colour.

    `decides` is whether the limit is one of this figure: a step time.
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

    bars: Sequence[Bar]
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
        tables=_tables(comparison),
        remarks=remarks(comparison),
    )


def _bars(comparison: Comparison) -> Bars | None:
    """Ratios that have an interval; the verdict's colour is that of the step time, which decides it."""
    if comparison.kind == "run":
        rows = [(figure_name(figure), figure, pair) for pair in comparison.pairs for figure in pair.figures]
    else:
        rows = [(shortened(pair.name, LONGEST_NAME), pair.step_time, pair) for pair in comparison.pairs]
    known = [
        (name, figure.ratio, figure.low, figure.high, pair if figure is pair.step_time else None)
        for name, figure, pair in rows
        if figure.low is not None and figure.high is not None
    ]
    if not known:
        return None
    limit = comparison.max_regression
    marks = [1.0] if limit is None else [1.0, 1 + limit]
    shown = known[:_MOST_BARS]
    ends = [end for _, ratio, low, high, _ in shown for end in (ratio, low, high)]
    axis = values_axis([*ends, *marks], from_zero=False, cuts_spikes=False)
    return Bars(
        bars=[
            Bar(
                name=name,
                text=f"{ratio:.3f}",
                kind="" if decided is None else _kind(decided),
                decides=decided is not None,
                at_percent=100 * axis.part(ratio),
                low_percent=100 * axis.part(low),
                width_percent=100 * (axis.part(high) - axis.part(low)),
            )
            for name, ratio, low, high, decided in shown
        ],
        ticks=[Tick(percent=100 * axis.part(at), text=tick_text(at, axis.step)) for at in axis.ticks()],
        equal_percent=100 * axis.part(1.0),
        limit_percent=None if limit is None else 100 * axis.part(1 + limit),
        limit_text="" if limit is None else f"the limit, {1 + limit:.3g}",
        left_out=len(known) - len(shown),
    )


def _kind(pair: Pair) -> str:
    return "beyond" if pair.is_beyond_limit else _KINDS.get(pair.verdict, "")


def _tables(comparison: Comparison) -> list[tuple[str | None, Table]]:
    """Each table with its sentence; the step times of experiments are sorted by seconds, not by text."""
    tables = tables_of(comparison)
    found = [(table.sentence, _table(table)) for table in tables]
    if comparison.kind == "sweep":
        for row, pair in zip(found[0][1].rows, comparison.pairs, strict=True):
            assert isinstance(row, list)
            row[1] = replace(row[1], value=pair.step_time.a)
            row[2] = replace(row[2], value=pair.step_time.b)
    return found


def _table(table: TextTable) -> Table:
    return Table(
        title=table.title,
        columns=[
            Column(label=label, is_number=index > 0 and all(_is_figure(row[index]) for row in table.rows))
            for index, label in enumerate(table.columns)
        ],
        rows=[list(map(plain, row)) for row in table.rows],
    )


def _is_figure(text: str) -> bool:
    return text == "-" or text[:1].isdigit()
