"""Tables as a page shows them: sorted by a value, filtered by text, copied as Markdown or CSV by its script.

A cell has a text, and the value it is sorted and copied by if its text is not a plain number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ENOUGH_TO_FILTER = 8


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
    keys: Sequence[int] | None = None
    """The series of each row."""
    places: Sequence[float] | None = None
    """Where a chart draws each row, in percent of its width."""

    @property
    def is_long(self) -> bool:
        return len(self.rows) > _ENOUGH_TO_FILTER


def plain(text: str) -> Cell:
    return Cell(text=text)
