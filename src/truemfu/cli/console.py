"""How numbers and tables look, on a terminal and in a pipe.

Everything a command prints goes through `say`, `print_json` or a `SafeConsole`: what a name, a log or an
error holds is shown, and does nothing to the terminal.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import printable

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_FULL_WIDTH = 140
WIDEST_TABLE = 400
"""Sentences stand in the last column of some tables; a narrow window wraps them, nothing is cut."""


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--debug`, which `main` reads; every command takes it."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(
        command
    )


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(command)


class FilePath(click.Path):
    """The path of a file or folder, there or not; what cannot be the name of one is a wrong call."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            os.lstat(value)
        except ValueError as error:
            self.fail(f"{os.fspath(value)!r} is no file name: {error}", param, context)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.fail(f"{os.fspath(value)!r} is no file name: {error.strerror}", param, context)
        return super().convert(value, param, context)


class SafeConsole(Console):
    """A console for text from anywhere: no markup, no emoji codes, and control characters are shown.

    rich makes its `Text` of every plain string (lines, cells, titles) here, to draw it and to measure it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def output(width: int = _FULL_WIDTH) -> SafeConsole:
    """Where results go. No figure is ever cut: a narrow window wraps lines, a pipe gets them whole."""
    columns, lines = shutil.get_terminal_size()
    # Without a height, too, rich takes a dumb terminal to be 80 columns wide.
    return SafeConsole(width=max(columns, width), height=lines)


def silence(stream: TextIO) -> None:
    """The reader (head, less) has left: what is still to be written to it goes nowhere, without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def until_nobody_reads() -> Iterator[None]:
    """Around what is printed last: a reader who leaves early changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the first into the second
        silence(sys.stdout)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text as it is, but for what would steer a terminal."""
    click.echo(printable(text), err=err, nl=nl)


def print_json(data: Any) -> None:
    say(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; silent unless someone is watching."""
    console = SafeConsole(stderr=True)
    if console.is_terminal:
        with console.status(console.render_str(what)):
            yield
    else:
        yield


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table: the first column is text, all others are numbers."""
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return result


def short(value: float) -> str:
    """1.6344e13 → `16.34 T`."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
