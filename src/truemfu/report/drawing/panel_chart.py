"""Small charts side by side on one scale: a panel for each sequence length, a position for each batch size.

Each series is a line through its values, with a vertical stroke from the low to the high end of each. As with
`line_chart`, the template draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .line_chart import SIDE, Axis, values_axis
from .tables import Cell, Column, Table

_SHIFTED = 0.25


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A value and the range around it, which may be the value itself."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, kw_only=True)
class PanelSeries:
    """Values by panel and position. `key` is what a page shows and hides it by."""

    name: str
    key: int
    values: Mapping[tuple[str, str], Spread]
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    positions: Sequence[str]
    first_row: int
    """Of the table: its rows are the positions of this panel."""


@dataclass(frozen=True, kw_only=True)
class PanelChart:
    """Everything a page needs to draw it."""

    title: str
    unit: str
    x_label: str
    series: Sequence[PanelSeries]
    panels: Sequence[Panel]
    y: Axis
    table: Table

    def points(self, one: PanelSeries, panel: Panel) -> Iterator[tuple[int, Spread, bool]]:
        """Each value with its place from the left, and whether it follows the one before without a gap.

        Series are drawn beside each other, so that equal values do not hide one another.
        """
        keys = sorted({each.key for each in self.series})
        shift = _SHIFTED * (keys.index(one.key) - (len(keys) - 1) / 2) / len(keys)
        follows = False
        for index, position in enumerate(panel.positions):
            spread = one.values.get((panel.title, position))
            if spread is not None:
                yield round(SIDE * (index + 0.5 + shift) / len(panel.positions)), spread, follows
            follows = spread is not None


def panel_chart(
    title: str,
    series: Sequence[PanelSeries],
    *,
    unit: str,
    x_label: str,
    text: Callable[[Spread], str],
    panels: Sequence[str],
    positions: Sequence[str],
) -> PanelChart | None:
    """The chart; None without any value."""
    shown = [one for one in series if one.values]
    if not shown:
        return None
    every = [spread for one in shown for spread in one.values.values()]
    drawn: list[Panel] = []
    rows: list[list[Cell]] = []
    places: list[float] = []
    for panel in panels:
        own = [at for at in positions if any((panel, at) in one.values for one in shown)]
        drawn.append(Panel(title=panel, positions=own, first_row=len(rows)))
        rows += [
            [Cell(text=panel), Cell(text=at), *(_cell(one, panel, at, text) for one in shown)] for at in own
        ]
        places += [round(100 * (index + 0.5) / len(own), 2) for index in range(len(own))]
    columns = [
        Column(label="panel", is_number=False),
        Column(label=x_label),
        *(Column(label=one.name, unit=unit, key=one.key) for one in shown),
    ]
    return PanelChart(
        title=title,
        unit=unit,
        x_label=x_label,
        series=shown,
        panels=drawn,
        y=values_axis([end for spread in every for end in (spread.low, spread.high)], True, False),
        table=Table(title=title, columns=columns, rows=rows, places=places),
    )


def _cell(one: PanelSeries, panel: str, at: str, text: Callable[[Spread], str]) -> Cell:
    spread = one.values.get((panel, at))
    return Cell(text="-") if spread is None else Cell(text=text(spread), value=spread.middle)
