"""Tables for a terminal, Markdown and pages, whose script sorts, filters and copies them.

A cell has a text, and the value it is sorted and copied by if its text is not a plain number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_ENOUGH_TO_FILTER = 8
_STRONGEST_HEAT = 60
_WIDE = 8.0
"""Values that differ by more are coloured on a logarithmic scale."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """`unit` is that of the values, which CSV contains instead of the texts; `key` that of its series."""

    label: str
    unit: str = ""
    is_number: bool = True
    key: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    value: float | None = None
    heat: int | None = None
    """The strength of its background in percent, in a heat map."""
    kind: str = ""
    """Selects a style, such as that of a failure."""
    of_row: int | None = None
    """The row of the page's main table that has more about it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sentence: str | None = None
    """What the reader needs to know to interpret it."""
    keys: Sequence[int] | None = None
    """The series of each row."""
    places: Sequence[float] | None = None
    """Where a chart draws each row, in percent of its width."""

    @property
    def is_long(self) -> bool:
        return len(self.rows) > _ENOUGH_TO_FILTER

    @property
    def labels(self) -> list[str]:
        return [column.label for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The texts of its rows."""
        return [[cell.text for cell in row] for row in self.rows]


Field = tuple[Column, Callable[[Any], Cell]]
"""A column, and the cell that a row has in it."""


def table_of(
    title: str,
    rows: Iterable[Any],
    fields: Sequence[Field],
    *,
    sentence: str | None = None,
    keys: Sequence[int] | None = None,
) -> Table:
    """The table with a row for each of `rows`."""
    return Table(
        title=title,
        columns=[column for column, _ in fields],
        rows=[[cell(row) for _, cell in fields] for row in rows],
        sentence=sentence,
        keys=keys,
    )


def words(label: str, text: Callable[[Any], str], kind: str = "") -> Field:
    """A column of texts."""
    return Column(label=label, is_number=False), lambda row: Cell(text=text(row), kind=kind)


def digits(label: str, text: Callable[[Any], object]) -> Field:
    """A column of plain numbers, which are sorted and copied as they are shown."""
    return Column(label=label), lambda row: Cell(text=str(text(row)))


def measures(
    label: str,
    text: Callable[[float | None], str],
    value: Callable[[Any], float | None],
    unit: str = "",
) -> Field:
    """A column of values that are shown as `text` of them."""

    def cell(row: Any) -> Cell:
        found = value(row)
        return Cell(text=text(found), value=found)

    return Column(label=label, unit=unit), cell


def plain(text: str) -> Cell:
    return Cell(text=text)


def heated(rows: Sequence[Sequence[Cell]], *, is_less_better: bool = False) -> list[list[Cell]]:
    """The cells of a heat map with their colours, the larger the stronger; one without a value has none.

    Where small values are the good ones, the scale is reversed: the strongest cell is always the best.
    """
    known = [cell.value for row in rows for cell in row if cell.value is not None and cell.value > 0]
    low, high = min(known, default=0.0), max(known, default=0.0)
    is_log = low > 0 and high / low > _WIDE

    def heat(value: float) -> int:
        if high <= low:
            return _STRONGEST_HEAT // 2
        part = math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)
        return round(_STRONGEST_HEAT * (1 - part if is_less_better else part))

    return [[replace(cell, heat=heat(cell.value)) if cell.value else cell for cell in row] for row in rows]
