"""Text from elsewhere in Markdown: plain text, without active link, image or HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...text import on_one_line

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


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    head = [_row(columns), _row(["---"] + ["---:"] * (len(columns) - 1))]
    return "\n".join(head + [_row(row) for row in rows])
