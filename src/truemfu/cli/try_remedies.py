"""`truemfu try`: what each remedy gains on a script, measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from ..environment import is_disabled
from ..errors import UsageError, closest
from ..integrations.run_settings import python_command
from ..remedies.facts import Evidence
from ..remedies.table import BY_NAME
from ..report.drawing.documents import json_text
from ..text import age, on_one_line
from ..trial.plan import Plan
from ..trial.record import Trial, TrialRun
from ..trial.texts import SIDE_EFFECTS, conclusion, failure_lines, other_lines, plan_lines, tables_of
from ..trial.trial import TrialSettings, UnchangedFailed, run_trial
from .console import (
    ignoring_closed_pipe,
    json_option,
    output,
    print_tables,
    say,
    working,
)
from .options import list_option, output_option
from .run import folder_name, is_there, missing_text

_FOLDER = "truemfu-try"
_FAILED, _INTERRUPTED = 1, 130
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(context: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """90, 90s, 10m or 1h as seconds."""
    if value is None:
        return None
    found = _DURATION.fullmatch(value.strip())
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{value!r} is not a time such as 90s, 10m or 1h", context, param)
    return float(found[1]) * _UNITS[found[2]]


@click.command(
    "try",
    short_help="Measure what torch.compile, a fused optimizer, … gain on an unchanged script.",
    context_settings={"allow_interspersed_args": False},
)
@output_option(
    "folder",
    f"The folder of the trial.  [default: {_FOLDER}/DATE-TIME-NAME]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=20),
    help="Measured in each process.  [default: 40, and at least 2 s of them]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=3),
    default=10,
    show_default=True,
    help="Steps before them, not measured.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Processes for each remedy."
)
@click.option(
    "--time",
    "time_s",
    callback=_seconds,
    metavar="TIME",
    help="Limit for all, such as 10m: fewer rounds or remedies.",
)
@click.option(
    "--timeout",
    "timeout_s",
    callback=_seconds,
    metavar="TIME",
    help="Limit of each process.  [default: 30m for the first, then by its time]",
)
@list_option("--only", metavar="NAME", help="Only these remedies; several with commas.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def try_remedies(
    folder: Path | None,
    steps: int | None,
    warm_up: int,
    rounds: int,
    time_s: float | None,
    timeout_s: float | None,
    only: tuple[str, ...] | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND unchanged and with one remedy each, in turns, and show what each gains.

    The script is not changed: remedies are applied from outside, each in processes of their own that end
    after the steps they need. Then all that gained are measured together.

    \b
    Examples
        truemfu try -- python train.py
        truemfu try --time 10m --only compile,fused_optimizer -- python train.py --epochs 3
        truemfu try --json -o trial -- torchrun --nproc-per-node 8 train.py

    Shown are the gain of a step with its 95 % interval, the peak memory, how far the losses of the same
    steps are from those of unchanged runs, and the lines to write. Ctrl-C ends the measuring and shows what
    was measured. Exit codes: 0 done, 1 the unchanged command failed, 2 wrong usage, 130 interrupted.
    """

    for name in only or ():
        if name not in BY_NAME:
            raise UsageError(
                f"--only: unknown remedy {name!r}{closest(name, BY_NAME)}; known: {', '.join(BY_NAME)}"
            )
        if not BY_NAME[name].from_outside:
            raise UsageError(f"--only: {name} cannot be applied from outside")
    if not command:
        raise UsageError("give the command to try: truemfu try -- python train.py")
    if is_disabled():
        raise UsageError("TRUEMFU_DISABLED is set: nothing can be measured")
    call = python_command(command, sys.executable)
    if not is_there(command[0], call):
        raise UsageError(missing_text(command[0], call))
    folder = folder or Path(_FOLDER) / folder_name(command)
    if taken := next((p for p in (folder, *folder.absolute().parents) if p.is_file()), None):
        raise UsageError(f"{taken} is not a folder: give --output another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: give --output another name")
    for line in SIDE_EFFECTS:
        say(f"truemfu: {line}", err=True)
    settings = TrialSettings(
        command=call,
        folder=folder,
        steps=steps,
        warm_up_steps=warm_up,
        rounds=rounds,
        time_s=time_s,
        timeout_s=timeout_s,
        only=only or (),
    )
    with ExitStack() as stack:
        try:
            trial = run_trial(settings, _Progress(stack.enter_context(working("unchanged"))))
        except UnchangedFailed as failed:
            stack.close()
            for line in failure_lines(failed.run):
                say(line, err=True)
            return _FAILED
    with ignoring_closed_pipe():
        if as_json:
            say(json_text(trial), nl=False)
        else:
            _show(trial)
            say(f"\n{folder}: trial.json and what each process printed")
    return _INTERRUPTED if trial.ended == "interrupted" else 0


class _Progress:
    """Lines on stderr, and on a terminal the process that runs."""

    def __init__(self, update: Callable[[str], None] | None) -> None:
        self._update = update

    def planned(self, plan: Plan, first: TrialRun, evidence: Evidence, seconds: float) -> None:

        for line in plan_lines(plan, first, evidence, seconds):
            say(line, err=True)

    def waiting(self, number: int, count: int, name: str, seconds: float) -> None:
        if self._update is not None:
            self._update(f"{number} of about {count}: {name}, {seconds:.0f} s")

    def ended(self, run: TrialRun) -> None:
        from statistics import median

        what = f"failed: {run.failure}" if run.failure else f"{1e3 * median(run.step_times_s):.2f} ms a step"
        say(f"{run.number:>3}  {run.name}: {on_one_line(what)} ({age(run.seconds)})", err=True)


def _show(trial: Trial) -> None:

    console = output()
    print_tables(console, tables_of(trial))
    for line in other_lines(trial):
        console.print(on_one_line(line), style="dim")
    for note in trial.notes:
        console.print(f"note: {on_one_line(note)}")
    console.print()
    for line in conclusion(trial):
        console.print(line, style="bold")
