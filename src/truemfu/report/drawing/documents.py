"""A summary or a comparison as Markdown, without active link, image or HTML, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ...text import on_one_line, printable
from .tables import Table

_ACTIVE_IN_MARKDOWN = re.compile(
    r"""
    [\\`*<|\[\]~&]                 # code, emphasis, HTML, cells, links and images, entities
    | (?<![^\W_])_ | _(?![^\W_])   # emphasis; `bs4_seq512` is left as it is
    | :(?=//) | (?<=www)\.         # addresses that become links automatically
    """,
    re.VERBOSE | re.IGNORECASE,
)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Text of an exception or a name, escaped so that it has no effect."""
    return _ACTIVE_IN_MARKDOWN.sub(r"\\\g<0>", on_one_line(text))


def markdown_text(text: str) -> str:
    """The same at the start of a line: no heading, quote or list."""
    return re.sub(r"^[#>+-]", r"\\\g<0>", _cell(text))


def markdown_document(
    title: str,
    lines: Iterable[str],
    tables: Iterable[Table],
    notes: Iterable[str],
    *,
    more: Iterable[str] = (),
) -> str:
    """Title, lines, tables and notes; `more` is Markdown that comes before the notes."""
    first = [f"# {title}", *map(markdown_text, lines), *_tables(tables)]
    return "\n\n".join([*first, *more, *(f"Note: {markdown_text(note)}" for note in notes)]) + "\n"


def _tables(tables: Iterable[Table]) -> Iterator[str]:
    """Paragraphs of tables: title, sentence, and the table, whose columns but the first are aligned right."""
    for table in tables:
        yield f"## {markdown_text(table.title)}"
        if table.sentence:
            yield markdown_text(table.sentence)
        head = [_row(table.labels), _row(["---"] + ["---:"] * (len(table.columns) - 1))]
        yield "\n".join(head + [_row(row) for row in table.texts])


def json_text(value: msgspec.Struct) -> str:
    """Raw values in base units, for other programs; the keys are attribute names."""
    return printable(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()) + "\n"
