"""`truemfu report`: a run, a sweep, or several runs side by side as one self-contained HTML report."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from ..plain_files import what_is_there
from ..report.folder import load_folder, page_path, refuse_input
from ..report.run.load import LoadedRun
from ..report.run.page import write_run_page
from ..report.run.side_by_side import MOST_RUNS, write_runs_page
from ..report.sweep.page import write_sweep_page
from ..report.sweep.summary import summarize
from .console import FilePath, say, writing
from .options import output_option


@click.command(
    short_help="Write a self-contained HTML report of a run, a sweep, or several runs side by side."
)
@click.argument("folders", metavar="DIR [DIR]...", nargs=-1, required=True, type=FilePath())
@output_option(
    "output_path",
    "Path of the report.  [default: report.html in DIR; run_report.html if DIR also has a sweep; "
    "runs_report.html in the current folder for several runs]",
)
@click.option(
    "--price",
    "price_per_gpu_hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="AMOUNT",
    help="Price of a GPU hour: adds the cost of a million tokens.",
)
def report(folders: tuple[Path, ...], output_path: Path | None, price_per_gpu_hour: float | None) -> None:
    """One self-contained HTML report of the run or sweep in DIR, detected from its files.

    With several run folders, one report shows the runs side by side.

    \b
    A run     the output_dir of a TrainingMonitor, ended or not (training_run.json, training_log.json)
    A sweep   its folder, or only its logs or results folder

    \b
    Examples
        truemfu report out/run -o report.html
        truemfu report out/sweep -o report.html
        truemfu report out/run --price 2.5
        truemfu report out/before out/after -o both.html
    """

    if len(folders) > MOST_RUNS:
        raise UsageError(
            f"expected at most {MOST_RUNS} runs side by side, got {len(folders)}: leave some out"
        )
    found = [load_folder(folder) for folder in folders]
    runs = [one for one in found if isinstance(one, LoadedRun)]
    if len(found) > 1 and len(runs) < len(found):
        sweep = next(
            folder for folder, one in zip(folders, found, strict=True) if not isinstance(one, LoadedRun)
        )
        raise UsageError(
            f"expected runs to set side by side, but {sweep} is a sweep: give one sweep alone, or compare "
            "two with `truemfu compare`"
        )
    path = output_path or (page_path(folders[0], found[0]) if len(found) == 1 else Path("runs_report.html"))
    if output_path is None and (instead := what_is_there(path)) is not None:
        raise UsageError(f"{path} is {instead}, not a file: give --output another name")
    with writing(path):
        for one in found:
            refuse_input(path, one.files, "report")
        if len(runs) > 1:
            written = write_runs_page(path, runs, price_per_gpu_hour)
        elif isinstance(found[0], LoadedRun):
            written = write_run_page(path, found[0], price_per_gpu_hour)
        else:
            written = write_sweep_page(path, summarize(found[0]), price_per_gpu_hour)
    say(f"report: {written}")
