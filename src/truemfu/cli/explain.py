"""`truemfu explain`: where the time of one training step goes, kernel by kernel."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
import msgspec

from ..census.record import TRACE_FILE, Census
from ..environment import is_disabled
from ..errors import UsageError
from ..integrations.run_settings import FIRST_PROCESS, RunSettings, python_command
from ..report.census_source import load_census, trace_at
from ..report.explain.texts import figures, notes, tables_of
from ..report.folder import refuse_input
from ..trial.until_census import run_until_census
from .console import (
    WIDEST_TABLE,
    FilePath,
    check_suffix,
    json_option,
    output,
    print_json,
    print_tables,
    say,
    working,
    writing,
)
from .options import device_of_table, output_option
from .progress import Progress
from .run import RUNS_FOLDER, folder_name, is_there

_STEPS = 12
"""About so many are needed before one is recorded."""
_STAGES = ("explain: waiting for a step to record", "explain: a step is recorded, timing ordinary steps")


@click.command(
    short_help="Where a step's time goes, kernel by kernel, and what each remedy could gain at most.",
)
@json_option
@output_option(
    "page",
    "Also write an HTML page.",
    metavar="FILE.html",
    is_file=True,
)
@click.option(
    "--trace",
    "traced",
    type=FilePath(dir_okay=False),
    metavar="FILE.json.gz",
    help="Also write the trace again, with class, FLOPs, bytes and limit in each kernel's arguments.",
)
@click.option(
    "--device", metavar="NAME", help="The device of a trace that does not name it: `truemfu devices`."
)
@click.argument("source", nargs=-1, required=True, type=click.UNPROCESSED, metavar="DIR | TRACE | -- COMMAND")
def explain(
    as_json: bool, page: Path | None, traced: Path | None, device: str | None, source: tuple[str, ...]
) -> int | None:
    """Where the time of one training step goes, and what each remedy could gain at most.

    \b
    DIR        the folder of a run: `truemfu run` records a step on a GPU whose counters can be read
    TRACE      a trace by torch.profiler's export_chrome_trace, .json or .json.gz, of any program
    COMMAND    a training command: it runs until a step is recorded, and is then ended

    \b
    Examples
        truemfu explain truemfu-runs/20260101-train
        truemfu explain trace.json.gz --device "NVIDIA H200"
        truemfu explain -o page.html -- python train.py

    Bounds say "at most"; `truemfu try` measures what a remedy gains. Exit codes: 0 done, 1 the command ended
    before a step was recorded, 2 wrong usage.
    """
    check_suffix(page, (".html",))
    check_suffix(traced, (".gz",), "--trace")
    if device is not None:
        device = device_of_table(device)
    path = Path(source[0])
    if len(source) > 1 or not path.exists() or path.suffix == ".py":
        _refuse_several(source)
        recorded = _recorded(source)
        if recorded is None:
            return 1
        path = recorded
    _refuse_inputs(path, page, traced)
    found = None
    with working(f"reading {path}"):
        if traced is not None:
            from ..census.items import items_of

            found = items_of(trace_at(path), device)
        census = load_census(path, device, found)
    if page is not None:
        from ..report.explain.page import write_explain_page

        with writing(page):
            say(f"report: {write_explain_page(page, census)}", err=True)
    if traced is not None and found is not None:
        from ..census.annotated import write_annotated

        with writing(traced), working(f"writing {traced}"):
            write_annotated(trace_at(path), traced, found)
        say(f"trace: {traced}", err=True)
    if as_json:
        print_json(msgspec.to_builtins(census))
    else:
        _show(census)
    return None


def _refuse_several(source: tuple[str, ...]) -> None:
    """Folders and traces are explained one at a time."""
    if len(source) > 1 and all(Path(one).is_dir() or one.endswith((".json", ".gz")) for one in source):
        raise UsageError(f"give one folder or trace; got {len(source)}: {', '.join(source)}")


def _refuse_inputs(path: Path, page: Path | None, traced: Path | None) -> None:
    """What is written may not replace what is read."""
    for target, option in ((page, "--output"), (traced, "--trace")):
        if target is not None:
            refuse_input(target, [path, path / TRACE_FILE], "explanation", option)


def _recorded(command: tuple[str, ...]) -> Path | None:
    """Run a command until a step is recorded; the folder with its trace, or None if it ended without one."""
    if is_disabled():
        raise UsageError("TRUEMFU_DISABLED=1 switches truemfu off, so no step would be recorded: unset it")
    call = python_command(command, sys.executable)
    if not is_there(command[0], call):
        raise UsageError(f"{command[0]} is neither a folder, nor a trace, nor a command that is found here")
    folder = Path(RUNS_FOLDER) / folder_name(command)
    say(
        f"plan: run the command until one step is recorded (after some ten steps), let it go on for "
        f"a few seconds to time ordinary steps, and end it. It runs as it is: what it writes, it writes. "
        f"Folder: {folder}",
        err=True,
    )
    settings = RunSettings(output=str(folder.absolute()), census=True, began_s=time.time())
    environment = settings.environment(os.environ)
    del environment[FIRST_PROCESS]  # the command is not this process
    progress = Progress()
    run = run_until_census(
        call, environment, folder, on_wait=lambda stage: progress.update(lambda: _STAGES[stage], stage)
    )
    if run.folder is None:
        say(
            f"error: the command ended with code {run.code} before a step was recorded: it has to make "
            f"at least {_STEPS} optimizer steps of a torch.optim optimizer",
            err=True,
        )
    return run.folder


def _show(census: Census) -> None:
    """The census as text."""

    for figure in figures(census):
        say(f"{figure.label:24} {figure.text}")
    say("")
    print_tables(output(WIDEST_TABLE), tables_of(census))
    for note in notes(census):
        say(f"note: {note}")
