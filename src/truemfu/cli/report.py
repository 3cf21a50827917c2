"""`truemfu report`: a run or a sweep as one self-contained HTML report."""

from __future__ import annotations

from pathlib import Path

import click

from .console import FilePath, debug_option, say


@click.command(short_help="One self-contained HTML report of a run or a sweep.")
@click.argument("folder", metavar="DIR", type=FilePath())
@click.option(
    "--output",
    "-o",
    "output_path",
    type=FilePath(),
    help="Path of the report.  [default: report.html in DIR; run_report.html if DIR also has a sweep]",
)
@debug_option
def report(folder: Path, output_path: Path | None) -> None:
    """One self-contained HTML report of the run or sweep in DIR, detected from its files.

    \b
    A run     the output_dir of a TrainingMonitor, ended or not (training_run.json, training_log.json)
    A sweep   its folder, or only its logs or results folder

    \b
    Examples
        truemfu report out/run -o report.html
        truemfu report out/sweep -o report.html
    """
    from ..errors import UsageError
    from ..plain_files import what_is_there
    from ..report.folder import load_folder, page_path, refuse_what_is_read
    from ..report.run_load import LoadedRun
    from ..report.run_page import write_run_page
    from ..report.summary import summarize
    from ..report.sweep_page import write_sweep_page

    found = load_folder(folder)
    path = output_path or page_path(folder, found)
    if output_path is None and (instead := what_is_there(path)) is not None:
        raise UsageError(f"{path} is {instead}, not a file: give --output another name")
    try:
        refuse_what_is_read(path, found)
        if isinstance(found, LoadedRun):
            written = write_run_page(path, found)
        else:
            written = write_sweep_page(path, summarize(found))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    say(f"report: {written}")
