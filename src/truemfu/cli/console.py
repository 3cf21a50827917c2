"""Formats of numbers and tables, on a terminal and in a pipe.

Everything a command prints goes through `say`, `print_json` or a `SafeConsole`: text from a name, a log or
an error is shown, and cannot control the terminal.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..report.drawing.tables import Table as ReportTable
from ..text import UNKNOWN, on_one_line, printable

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_FULL_WIDTH = 140
_GAP = 3  # between columns
_REDRAWS_PER_S = 4
_NARROWEST_SENTENCE = 24
WIDEST_TABLE = 400
"""Some tables have sentences in the last column; a narrow window wraps them, nothing is truncated."""


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(command)


class FilePath(click.Path):
    """The path of a file or folder, existing or not; an invalid name is a usage error."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            os.lstat(value)
        except ValueError as error:
            self.fail(f"{os.fspath(value)!r} is not a valid file name: {error}", param, context)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.fail(f"{os.fspath(value)!r} is not a valid file name: {error.strerror}", param, context)
        return super().convert(value, param, context)


class SafeConsole(Console):
    """A console for untrusted text: no markup, no emoji codes, and control characters are shown.

    rich converts every plain string (lines, cells, titles) to `Text` here, to draw and to measure it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does; a table that is too wide is printed in parts, below each other."""
        shown: list[Any] = []
        for item in objects:
            first, *others = fitted(item, self.width) if isinstance(item, Table) else [item]
            shown += [first, *(line for other in others for line in ("", other))]
        super().print(*shown, **options)


def output(width: int = _FULL_WIDTH) -> SafeConsole:
    """The console for results: as wide as the terminal, or `width` in a pipe. Figures are never truncated."""
    columns, lines = shutil.get_terminal_size()
    if not sys.stdout.isatty():
        columns = max(columns, width)
    # Without a height too, rich assumes that a dumb terminal has 80 columns.
    return SafeConsole(width=columns, height=lines)


def silence(stream: TextIO) -> None:
    """The reader (head, less) has closed the pipe: discard further output without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_suffix(path: Path | None, suffixes: Collection[str], option: str = "--output") -> None:
    """A usage error unless the name of a file to write has one of the suffixes."""
    if path is not None and path.suffix not in suffixes:
        raise UsageError(f"{option} must end in {', '.join(suffixes)}; got {str(path)!r}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that cannot be written is a usage error."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextmanager
def ignoring_closed_pipe() -> Iterator[None]:
    """For the last output: a reader that closes the pipe early does not change the exit code."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the first into the second
        silence(sys.stdout)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, with terminal control characters escaped."""
    # With a stream of its own, click would print over a spinner, which is in sys.stderr's place.
    click.echo(printable(text), file=sys.stderr if err else None, nl=nl)


def complain(kind: Literal["error", "warning"], text: str) -> None:
    """A line on stderr that begins with its kind, in red or yellow on a terminal with colours."""
    console = SafeConsole(stderr=True)
    if not sys.stderr.isatty() or console.color_system is None:
        say(f"{kind}: {text}", err=True)
        return
    style = "bold red" if kind == "error" else "yellow"
    console.print(Text.assemble((f"{kind}:", style), f" {printable(text)}"), soft_wrap=True)


def print_json(data: Any) -> None:
    say(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None] | None]:
    """A spinner on stderr during a long operation, and what changes its text; None without a terminal."""
    console = SafeConsole(stderr=True)
    # Colour can be forced without a terminal (CI); a dumb terminal cannot redraw.
    if not (sys.stderr.isatty() and console.is_interactive):
        yield None
        return
    with console.status(console.render_str(what), refresh_per_second=_REDRAWS_PER_S) as status:
        yield lambda text: status.update(console.render_str(text))


def table(*columns: str, title: str | None = None, texts: Collection[str] = ()) -> Table:
    """A plain table: the first column and those of `texts` are text, all others are numbers."""
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(columns):
        is_text = index == 0 or column in texts
        result.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return result


def print_tables(console: Console, tables: Iterable[ReportTable]) -> None:
    """The tables of a report, each with its title and the sentence that explains it."""
    for text in tables:
        drawn = table(
            *text.labels,
            title=text.title,
            texts=[column.label for column in text.columns if not column.is_number],
        )
        for index, column in enumerate(drawn.columns):
            if any(row[index].kind == "text" for row in text.rows):
                column.min_width, column.no_wrap, column.overflow = _NARROWEST_SENTENCE, False, "fold"
        for row in text.texts:
            drawn.add_row(*map(on_one_line, row))
        console.print(drawn)
        if text.sentence:
            console.print(text.sentence, style="dim")
        console.print()


def table_width(drawn: Table) -> int:
    """The width of a table in which nothing is wrapped."""
    widths = _column_widths(drawn)
    return sum(widths) + _GAP * (len(widths) - 1)


def _column_widths(drawn: Table) -> list[int]:
    return [
        max(cell_len(printable(str(text))) for text in (column.header, *column.cells))
        for column in drawn.columns
    ]


def fitted(drawn: Table, width: int) -> list[Table]:
    """The table, or its columns in several tables of at most this width, each with the first column.

    A column with a `min_width` gives way first: it is truncated, or wrapped if it may be. Other cells are
    wrapped, if there is no other way.
    """
    columns, widths = drawn.columns, _column_widths(drawn)
    truncated = [column.min_width is not None and column.no_wrap for column in columns]
    missing = max(table_width(drawn) - width, 0)
    for index, column in enumerate(columns):
        if column.min_width is not None:
            kept = min(max(widths[index] - missing, column.min_width), widths[index])
            missing -= widths[index] - kept
            widths[index] = column.max_width = kept
            column.min_width = None  # rich would widen a column that needs less
    if not missing or len(columns) < 2:
        return [drawn]
    natural = _column_widths(drawn)
    widths = [
        kept if cut else all_of_it for kept, all_of_it, cut in zip(widths, natural, truncated, strict=True)
    ]
    widest = max(widths[1:])
    first = min(widths[0], max(width - _GAP - widest, width // 3))
    room = width - first - _GAP
    blocks: list[list[int]] = []
    used = width
    for index in range(1, len(columns)):
        needed = min(widths[index], room) + _GAP
        if first + used + needed > width:
            blocks.append([])
            used = 0
        blocks[-1].append(index)
        used += needed
    return [
        _columns_of(
            drawn,
            [0, *block],
            [first, *(min(widths[index], room) for index in block)],
            truncated,
            is_first=number == 0,
        )
        for number, block in enumerate(blocks)
    ]


def _columns_of(
    drawn: Table, chosen: list[int], widths: list[int], truncated: list[bool], *, is_first: bool
) -> Table:
    headers = [str(drawn.columns[index].header) for index in chosen]
    part = table(*headers, title=str(drawn.title) if is_first and drawn.title is not None else None)
    for column, index, width in zip(part.columns, chosen, widths, strict=True):
        column.justify = drawn.columns[index].justify
        column.max_width, column.no_wrap = width, truncated[index]
        column.overflow = "ellipsis" if truncated[index] else "fold"
    cells = [list(drawn.columns[index].cells) for index in chosen]
    for row, texts in zip(drawn.rows, zip(*cells, strict=True), strict=True):
        part.add_row(*texts, style=row.style)
    return part


def short(value: float) -> str:
    """1.6344e13 → `16.34 T`."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g}"


def percent(part: float | None, whole: float = 1.0) -> str:
    return f"{100 * part / whole:.1f} %" if part is not None and whole else UNKNOWN
