"""`truemfu explain`: where the time of one training step goes, kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ..errors import UsageError
from .console import (
    FilePath,
    check_suffix,
    debug_option,
    json_option,
    output,
    print_json,
    say,
    table,
)

if TYPE_CHECKING:
    from ..census.record import Census


@click.command(
    short_help="Where a step's time goes, kernel by kernel, and what each remedy could gain at most.",
    context_settings={"allow_interspersed_args": False},
)
@json_option
@click.option(
    "--output",
    "-o",
    "page",
    type=FilePath(dir_okay=False),
    metavar="FILE.html",
    help="Also write an HTML page.",
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
@debug_option
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
    from ..report.explain.load import load_census

    check_suffix(page, (".html",))
    path = Path(source[0])
    if len(source) > 1 or not path.exists():
        raise UsageError(
            f"{source[0]}: no such folder or trace; for a command write truemfu explain -- COMMAND"
        )
    census = load_census(path, device)
    if as_json:
        print_json(msgspec.to_builtins(census))
    else:
        _show(census)
    return None


def _show(census: Census) -> None:
    """The census as text."""
    from ..report.explain.texts import classes_table, costs_table, figures, not_applicable, remedies_table

    console = output()
    for figure in figures(census):
        remark = f" ({figure.remark})" if figure.remark else ""
        say(f"{figure.label:24} {figure.value}{remark}")
    for shown in (classes_table(census), costs_table(census), remedies_table(census)):
        say("")
        if not shown.rows:
            say(f"{shown.title}: none is supported by the evidence")
            continue
        drawn = table(*shown.labels, title=shown.title)
        for column, known in zip(drawn.columns, shown.columns, strict=True):
            column.justify = "right" if known.is_number else "left"
        for row in shown.texts:
            drawn.add_row(*row)
        console.print(drawn)
        if shown.sentence:
            say(shown.sentence)
    say("")
    say("No bound for")
    for remedy, reason in not_applicable(census):
        say(f"  {remedy:36} {reason}")
    for note in census.notes:
        say(f"note: {note}")
