"""Tables for a terminal, Markdown and pages, whose script sorts, filters and copies them.

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


def text_table(
    title: str, labels: Sequence[str], rows: Sequence[Sequence[str]], sentence: str | None = None
) -> Table:
    """A table of texts: the first column names the row, the others are numbers."""
    return Table(
        title=title,
        columns=[Column(label=label, is_number=at > 0) for at, label in enumerate(labels)],
        rows=[list(map(plain, row)) for row in rows],
        sentence=sentence,
    )


def plain(text: str) -> Cell:
    return Cell(text=text)
