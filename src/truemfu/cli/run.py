"""`truemfu run`: any training command, watched without a change to it.

options ─► RunSettings ─► environment of the command ─► exec: the command takes the place of this process
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import click

from ..commit import KNOWN_COMMIT, git_commit
from ..environment import is_disabled
from ..errors import UsageError, closest
from ..hardware.detect import override_flops_per_s
from ..integrations.run_settings import RunSettings, python_command
from ..monitor.config import AUTO, MODES, load_config
from ..report.run.load import holds_run
from ..trackers.table import check_tracker
from .console import FilePath, say
from .options import list_option, output_option

_NOT_FOUND, _CANNOT_RUN = 127, 126
RUNS_FOLDER = "truemfu-runs"


@click.command(
    short_help="Run any training command and measure it.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@output_option(
    "output",
    f"The run folder.  [default: {RUNS_FOLDER}/DATE-TIME-NAME]",
)
@click.option("--config", type=FilePath(), help="A YAML or JSON file with the settings of docs/monitor.md.")
@click.option(
    "--mode",
    metavar="MODE",
    help="How FLOPs are found: smart, hybrid, profiler or estimate (docs/monitor.md).  [default: hybrid on a "
    "GPU whose counters can be read, else smart]",
)
@list_option(
    "--tracker",
    "trackers",
    metavar="NAME",
    help="Log to wandb, tensorboard, mlflow, trackio or prometheus too; several with commas.",
)
@click.option(
    "--check-privacy",
    is_flag=True,
    help="Of a training with Opacus: compare the clipped gradients of step 2 and of every 500th with a loop "
    "over the samples (docs/private.md).",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    output: Path | None,
    config: Path | None,
    mode: str | None,
    trackers: tuple[str, ...] | None,
    check_privacy: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and measure the training in it: step time, tokens/s, FLOPs, MFU, HFU.

    The script is not changed and needs no line of truemfu. Its output, exit code, arguments, signals and
    files are its own; a summary follows on stderr, and the run folder has every step. All processes that
    COMMAND starts are watched: torchrun, accelerate, deepspeed and srun work.

    \b
    Examples
        truemfu run train.py --epochs 3                    short for: python train.py --epochs 3
        truemfu run -m mypackage.train --epochs 3          short for: python -m mypackage.train --epochs 3
        truemfu run -o runs/a -- torchrun --nproc-per-node 8 train.py
        truemfu run --tracker wandb -- accelerate launch train.py

    \b
    While it runs, and afterwards
        truemfu status runs/a
        truemfu report runs/a -o report.html

    TRUEMFU_DISABLED=1 runs COMMAND without measuring. Exit code: that of COMMAND; 127 if it is not found,
    126 if it cannot be run, 2 for a wrong option.
    """

    if mode not in (None, AUTO, *MODES):
        modes = (AUTO, *MODES)
        raise UsageError(f"--mode must be one of {', '.join(modes)}; got {mode!r}{closest(mode, modes)}")
    if command and command[0].startswith("-") and command[:1] != ("-m",):
        raise click.NoSuchOption(command[0])
    if command == ("-m",):
        raise UsageError("-m needs the name of a module: truemfu run -m mypackage.train")
    if not command:
        raise UsageError("give the command to run: truemfu run -- python train.py")
    call = python_command(command, sys.executable)
    if not is_there(command[0], call):
        say(f"error: {missing_text(command[0], call)}", err=True)
        raise click.exceptions.Exit(_NOT_FOUND)
    if not is_disabled():
        load_config(config)
        folder = output or Path(RUNS_FOLDER) / folder_name(command)
        if taken := next((p for p in (folder, *folder.absolute().parents) if p.is_file()), None):
            raise UsageError(f"{taken} is not a folder: give --output another name")
        if holds_run(folder):
            say(
                f"truemfu: {folder} contains a run already: this run continues its log. For a separate "
                "run, give another --output.",
                err=True,
            )
        for tracker in trackers or ():
            check_tracker(tracker)
        override_flops_per_s()
        settings = RunSettings(
            output=str(folder.absolute()),
            config=None if config is None else str(config.absolute()),
            mode=mode,
            trackers=trackers or None,
            check_privacy=check_privacy,
            began_s=time.time(),
        )
        os.environ.update(settings.environment(os.environ))
        os.environ[KNOWN_COMMIT] = git_commit() or ""
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and a command would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(call[0], call)
    except OSError as error:  # an executable file without `#!`, or for another machine
        say(f"error: {call[0]} cannot be run: {error.strerror}", err=True)
        raise click.exceptions.Exit(_CANNOT_RUN) from None


def missing_text(name: str, call: list[str]) -> str:
    """That a command does not exist."""
    return f"{name}: {'no such file' if call[0] != name else 'command not found, or not executable'}"


def is_there(name: str, call: list[str]) -> bool:
    """Whether the command exists; a UsageError for a file that is neither Python nor executable."""
    if call[0] != name:  # of Python: a script, or -m and a module
        return name == "-m" or Path(name).is_file()
    if shutil.which(name) is not None:
        return True
    if Path(name).is_file():
        raise UsageError(
            f"{name} is neither a Python script (.py) nor executable: give the command that runs it, "
            f"truemfu run -- PROGRAM {name}"
        )
    return False


def folder_name(command: tuple[str, ...]) -> str:
    """The date, the time and what is run."""
    name = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if name is None:
        name = command[command.index("-m") + 1] if "-m" in command[:-1] else Path(command[0]).stem
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}"
