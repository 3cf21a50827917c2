"""`truemfu report`: a sweep as one self-contained page."""

from __future__ import annotations

from pathlib import Path

import click

from .console import debug_option


@click.command(short_help="One self-contained page for a sweep.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    "output_path",
    type=click.Path(path_type=Path),
    help="Where to write the page.  [default: report.html in DIR]",
)
@debug_option
def report(folder: Path, output_path: Path | None) -> None:
    """One self-contained page for the sweep in DIR: its folder, or its logs or results folder alone.

    \b
    Example
        truemfu report out/sweep -o report.html
    """
    from ..errors import UsageError
    from ..report.load import load_sweep
    from ..report.summary import summarize
    from ..report.sweep_page import write_sweep_page

    summary = summarize(load_sweep(folder))
    path = output_path or folder / "report.html"
    try:
        written = write_sweep_page(path, summary)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"report: {written}")
