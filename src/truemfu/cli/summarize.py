"""`truemfu summarize`: tables, Markdown, CSV or JSON from a sweep's files."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from ..report.sweep.figures import SweepSummary
from ..report.sweep.load import load_sweep
from ..report.sweep.summary import summarize as summary_of
from ..report.sweep.texts import WRITERS, context_lines, failure_texts, headline, tables_of
from ..text import on_one_line, shortened
from .console import (
    WIDEST_TABLE,
    FilePath,
    check_suffix,
    json_option,
    output,
    print_tables,
    say,
    write_text,
)
from .options import format_option, output_option

_FORMATS = {".json": "json", ".csv": "csv", ".md": "markdown"}
_SHOWN_LOG_LINES = 6
_LONGEST_LOG_LINE = 1000


@click.command(short_help="Summarize a sweep's logs as tables, Markdown, CSV or JSON.")
@click.argument("folder", metavar="DIR", type=FilePath(), required=False)
@click.option("--logs-dir", type=FilePath(), hidden=True)
@output_option(
    "output_path",
    "Also write the summary here; the suffix .json, .csv or .md selects the format.",
)
@format_option("markdown", "json", "csv")
@json_option
def summarize(
    folder: Path | None, logs_dir: Path | None, output_path: Path | None, shown_as: str, as_json: bool
) -> None:
    """The results of the sweep in DIR: success rate, memory, slow-down, MFU and HFU, failures with reasons.

    DIR is a sweep's folder, or only its logs or results folder; copies work too.

    The success rate includes every experiment: also one that failed, one whose log ends without a result
    (lost), and, with a sweep.json next to the logs, one that never started. The exit code is 0 if there was
    something to summarise, even if experiments failed; `truemfu sweep` exits with 1 then.

    \b
    Examples
        truemfu summarize out/sweep
        truemfu summarize out/sweep/logs --output results.json
        truemfu summarize out/sweep --format markdown > sweep.md
        truemfu summarize out/sweep --json | jq '.trainers[] | {trainer, success_rate}'
    """

    given = [path for path in (folder, logs_dir) if path is not None]
    if len(given) != 1:
        raise UsageError("give one folder of a sweep: truemfu summarize DIR")
    check_suffix(output_path, _FORMATS)
    summary = summary_of(load_sweep(given[0]))
    if output_path is not None:
        write_text(output_path, WRITERS[_FORMATS[output_path.suffix]](summary))
    if as_json:
        shown_as = "json"
    if shown_as == "table":
        show_summary(summary)
    else:
        say(WRITERS[shown_as](summary), nl=False)


def show_summary(summary: SweepSummary) -> None:
    """The summary on a terminal: tables, failures, notes, and the sweep in one line at the end."""

    console = output(WIDEST_TABLE)
    print_tables(console, tables_of(summary))
    for line, log in failure_texts(summary):
        console.print(on_one_line(line), style="red", soft_wrap=True)
        for entry in log[-_SHOWN_LOG_LINES:]:
            console.print(f"    {shortened(entry, _LONGEST_LOG_LINE)}", style="dim", soft_wrap=True)
    for note in summary.notes:
        console.print(f"note: {on_one_line(note)}", soft_wrap=True)
    for line in context_lines(summary):
        console.print(line, soft_wrap=True)
    console.print(headline(summary), style="bold", soft_wrap=True)
