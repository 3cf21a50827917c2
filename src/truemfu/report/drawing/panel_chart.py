"""Small charts side by side on one scale: a panel for each sequence length, a position for each batch size.

Each series is a line through its values, with a vertical stroke from the low to the high end of each. As in
`chart`, the drawing is a square that is stretched to its place; its texts are set by the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .line_chart import SIDE, Axis, Tick, tick_text, values_axis
from .tables import Cell, Column, Table

MOST_PANELS = 36
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
class PanelLine:
    key: int
    path: str
    whiskers: str
    dots: str
    is_dashed: bool


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    lines: Sequence[PanelLine]
    x_ticks: Sequence[Tick]
    first_row: int
    """Of the table: its rows are the positions of this panel."""
    rows: int


@dataclass(frozen=True, kw_only=True)
class PanelChart:
    title: str
    unit: str
    x_label: str
    panels: Sequence[Panel]
    y_ticks: Sequence[Tick]
    table: Table
    left_out: int
    """Panels that are not drawn; the table has their values."""


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
    y = values_axis([end for spread in every for end in (spread.low, spread.high)], True, False)
    # Series are drawn beside each other, so that equal values do not hide one another.
    keys = sorted({one.key for one in shown})
    shifts = [_SHIFTED * (keys.index(one.key) - (len(keys) - 1) / 2) / len(keys) for one in shown]
    drawn: list[Panel] = []
    rows: list[list[Cell]] = []
    places: list[float] = []
    for panel in panels:
        own = [at for at in positions if any((panel, at) in one.values for one in shown)]
        x = {at: (index + 0.5) / len(own) for index, at in enumerate(own)}
        drawn.append(
            Panel(
                title=panel,
                lines=[
                    _line(one, panel, {at: place + shift / len(own) for at, place in x.items()}, y)
                    for one, shift in zip(shown, shifts, strict=True)
                ],
                x_ticks=[Tick(percent=100 * place, text=at) for at, place in x.items()],
                first_row=len(rows),
                rows=len(own),
            )
        )
        rows += [
            [Cell(text=panel), Cell(text=at), *(_cell(one, panel, at, text) for one in shown)] for at in own
        ]
        places += [round(100 * x[at], 2) for at in own]
    columns = [
        Column(label="panel", is_number=False),
        Column(label=x_label),
        *(Column(label=one.name, unit=unit, key=one.key) for one in shown),
    ]
    return PanelChart(
        title=title,
        unit=unit,
        x_label=x_label,
        panels=drawn[:MOST_PANELS],
        y_ticks=[Tick(percent=100 * (1 - y.part(v)), text=tick_text(v, y.step)) for v in y.ticks()],
        table=Table(title=title, columns=columns, rows=rows, places=places),
        left_out=max(0, len(drawn) - MOST_PANELS),
    )


def _cell(one: PanelSeries, panel: str, at: str, text: Callable[[Spread], str]) -> Cell:
    spread = one.values.get((panel, at))
    return Cell(text="-") if spread is None else Cell(text=text(spread), value=spread.middle)


def _line(one: PanelSeries, panel: str, x: Mapping[str, float], y: Axis) -> PanelLine:
    strokes: list[list[str]] = [[]]
    whiskers, dots = [], []
    for at, place in x.items():
        spread = one.values.get((panel, at))
        if spread is None:
            strokes.append([])
            continue
        left = f"{SIDE * place:.0f}"
        low, middle, high = (
            f"{SIDE * (1 - y.part(value)):.1f}" for value in (spread.low, spread.middle, spread.high)
        )
        strokes[-1].append(f"{left} {middle}")
        dots.append(f"M{left} {middle}l0 0")
        if low != high:
            whiskers.append(f"M{left} {low}V{high}")
    return PanelLine(
        key=one.key,
        path="".join(f"M{'L'.join(points)}" for points in strokes if len(points) > 1),
        whiskers="".join(whiskers),
        dots="".join(dots),
        is_dashed=one.is_dashed,
    )
