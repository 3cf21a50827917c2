"""`truemfu compare`: whether a run or a sweep is slower than another, as a gate for CI."""

from __future__ import annotations

import math
from pathlib import Path

import click

from ..errors import UsageError
from ..report.compare.compare import Comparison
from ..report.compare.compare import compare as compare_sides
from ..report.compare.load import load_side
from ..report.compare.texts import WRITERS, conclusion, remarks, sides_of, tables_of
from ..report.folder import refuse_input
from ..text import on_one_line
from .console import (
    FilePath,
    check_suffix,
    ignoring_closed_pipe,
    json_option,
    output,
    print_tables,
    say,
    write_text,
    writing,
)
from .options import format_option, output_option

_BEYOND_LIMIT, _UNSURE = 1, 3
_WIDTH = 80
_FORMATS = {".html": "html", ".md": "markdown", ".json": "json"}


def _fraction(context: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Per cent as a fraction."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a percentage", context, param)
    return None if value is None else value / 100


@click.command(short_help="Show whether B is slower than A (runs or sweeps), with confidence intervals.")
@click.argument("a", type=FilePath())
@click.argument("b", type=FilePath())
@click.option(
    "--max-regression",
    type=click.FloatRange(min=0),
    callback=_fraction,
    metavar="PERCENT",
    help="Exit with 1 if B is shown to be slower by more than this.",
)
@click.option(
    "--fail-if-unsure",
    is_flag=True,
    help="Exit with 3 if the data could not show a slow-down of --max-regression.",
)
@click.option(
    "--run-to-run",
    type=click.FloatRange(min=0),
    callback=_fraction,
    show_default="1, on a CPU 1.5",
    metavar="PERCENT",
    help="Assumed standard deviation between equal runs; not used with four or more runs in total.",
)
@output_option(
    "output_path",
    "Also write the comparison here; the suffix .html, .md or .json selects the format.",
)
@format_option("markdown", "json")
@json_option
def compare(
    a: Path,
    b: Path,
    max_regression: float | None,
    fail_if_unsure: bool,
    run_to_run: float | None,
    output_path: Path | None,
    shown_as: str,
    as_json: bool,
) -> None:
    """Compare B with A: step time, throughput, MFU and peak memory, as ratios with confidence intervals.

    A and B are folders: a run (of TrainingMonitor or `truemfu run`), several runs of the same training, or a
    sweep, whose experiments are matched by name. Only steps after warm-up are compared. The intervals
    account for the correlation of consecutive steps, so noise is not reported as a difference.

    \b
    Examples
        truemfu compare runs/main runs/branch
        truemfu compare runs/main runs/branch --max-regression 5
        truemfu compare sweep-1 sweep-2 -o comparison.html
        truemfu compare main-runs branch-runs --format markdown      several runs in each folder

    \b
    Exit code
        0   compared; no slow-down beyond --max-regression was shown
        1   B is slower beyond --max-regression, or an experiment of A failed in B
        2   not comparable (another device, dtype, model, batch or convention), or too few steps
        3   with --fail-if-unsure: the data is too noisy or too little to decide about --max-regression
    """

    if fail_if_unsure and max_regression is None:
        raise UsageError(
            "--fail-if-unsure needs --max-regression too: the slow-down that the data must be able to show"
        )
    check_suffix(output_path, _FORMATS)
    sides = load_side(a), load_side(b)
    found = compare_sides(*sides, max_regression=max_regression, run_to_run=run_to_run)
    if output_path is not None:
        refuse_input(output_path, (file for side in sides for file in side.files), "comparison")
        if output_path.suffix == ".html":
            from ..report.compare.page import write_comparison_page

            with writing(output_path):
                write_comparison_page(output_path, found)
        else:
            write_text(output_path, WRITERS[_FORMATS[output_path.suffix]](found))
    with ignoring_closed_pipe():
        shown_as = "json" if as_json else shown_as
        if shown_as in WRITERS:
            say(WRITERS[shown_as](found), nl=False)
        else:
            _show(found)
    if not found.is_within_limit:
        raise click.exceptions.Exit(_BEYOND_LIMIT)
    if fail_if_unsure and found.unsure:
        raise click.exceptions.Exit(_UNSURE)


def _show(found: Comparison) -> None:

    console = output(_WIDTH)
    for line in sides_of(found):
        console.print(on_one_line(line))
    console.print()
    print_tables(console, tables_of(found))
    for remark in remarks(found):
        console.print(f"note: {on_one_line(remark)}")
    console.print(on_one_line(conclusion(found)), style="bold")
