"""The command line: one module per command, without logic of its own.

`main` runs a command and turns errors into one line and an exit code.

Exit codes: 0 done, 1 the work itself failed (an experiment, or the driver does not answer) or a comparison is
beyond its limit, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from .. import __version__
from ..errors import CounterError, TruemfuError, TruemfuWarning, message_of, one_line
from .console import complain, say, silence

DONE, FAILED, WRONG_CALL, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
_LEAVING_IN_ORDER = ("audit", "explain", "top", "try")
_COMMANDS = {
    "run": "run",
    "status": "status",
    "report": "report",
    "explain": "explain",
    "compare": "compare",
    "try": "try_remedies",
    "count": "count",
    "check": "check",
    "devices": "hardware",
    "peak": "hardware",
    "top": "top",
    "audit": "audit",
    "sweep": "sweep",
    "summarize": "summarize",
    "completion": "completion",
}
"""The module of each command, in the order in which people need them."""
_debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
)
"""Of every command; `main` reads it."""


class _Commands(click.Group):
    """Imports a command when it is used: what the others need would only take time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # For a name that there is not, click suggests one of the commands that it has.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                module = importlib.import_module(f".{_COMMANDS[name]}", __name__)
                found = (one for one in vars(module).values() if isinstance(one, click.Command))
                self.add_command(_debug_option(next(one for one in found if one.name == name)))
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Help for a command: truemfu count --help",
)
@click.version_option(__version__, prog_name="truemfu")
@click.pass_context
def cli(context: click.Context) -> None:
    """How much of its hardware does a PyTorch training run use?

    \b
    Any training, without a line of code:
        truemfu run train.py --epochs 3            also torchrun, accelerate, srun: truemfu run -- torchrun …
        truemfu status                             the runs in this folder, running or ended
        truemfu report DIR -o report.html          an HTML report of a run
        truemfu explain DIR                        where a step's time goes, kernel by kernel; also of a trace
        truemfu try -- python train.py             what torch.compile, a fused optimizer, … gain on it
    \b
    The FLOPs of one training step, exact, without a GPU and without weights:
        truemfu count 1b --batch 4 --seq 512
        truemfu count path/to/config.json --batch 1 --seq 8192
        truemfu count mypackage.models:build --json
        truemfu check train.log --model 8b --seq 8192 --device H100    is a logged MFU right? if not, why
    \b
    Then what the hardware could do:
        truemfu devices        the datasheet peaks, and the row this machine matches
        truemfu peak           the matmul rate this device reaches right now
        truemfu top            every GPU, live: what its tensor cores execute
        truemfu audit          one step under Nsight Compute, against the count
    \b
    Then what training reaches on this hardware, standard and differentially private:
        truemfu sweep --mode test                  every trainer once, under a minute
        truemfu sweep                              the matrix; each experiment in its own process
        truemfu summarize out/sweep                success, memory, slow-down, MFU and HFU
        truemfu report out/sweep -o report.html    the same as an HTML report

    \b
    In your own loop (docs/monitor.md), and an HTML report of that run:
        monitor = TrainingMonitor("out", model=model)    and log_step at the end of each step
        truemfu report out -o report.html
        truemfu compare main branch --max-regression 5    whether a run or a sweep became slower

    MFU = the model's FLOPs / (step time x peak FLOP/s). In Python: from truemfu import count_flops.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `truemfu`: exits with the code its module documents."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    if arguments[:1] not in (
        ["audit"],
        ["explain"],
        ["run"],
        ["try"],
    ):  # they run the user's command in the user's environment
        _stay_offline()
    with _quiet_libraries(debug), _terminable(arguments[:1]):
        code = _run(arguments, debug)
    sys.exit(code)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result = cli.main(arguments, prog_name="truemfu", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except _Terminated:
        return TERMINATED
    except (BrokenPipeError, SystemExit):
        # The reader (head, less) has closed the pipe; rich and click turn that into an exit. Python would
        # report it once more when it closes stdout.
        silence(sys.stdout)
        return DONE
    except click.ClickException as error:
        return _fail(error.format_message(), WRONG_CALL, debug)
    except CounterError as error:
        return _fail(str(error), FAILED, debug)
    except TruemfuError as error:
        return _fail(str(error), WRONG_CALL, debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _fail(f"unexpected {one_line(error)}{hint}", FAILED, debug)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        say(traceback.format_exc(), err=True, nl=False)
    complain("error", message_of(message))
    return code


class _Terminated(BaseException):
    """SIGTERM arrived: open resources are closed on the way out."""


@contextmanager
def _terminable(command: list[str]) -> Iterator[None]:
    """SIGTERM ends a command that must clean up (a cursor, a run under ncu) as an exception.

    Not the others: a sweep has its own handler, and pure computation has nothing to clean up.
    """

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    ours = threading.current_thread() is threading.main_thread()
    if not ours or not set(command) & set(_LEAVING_IN_ORDER):
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stay_offline() -> None:
    """Only a config is needed: no hub is contacted."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def _quiet_libraries(debug: bool) -> Iterator[None]:
    """Show own warnings as one line each; other libraries' warnings and logs only with `--debug`."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
        warnings.simplefilter("always", TruemfuWarning)
        show = warnings.showwarning

        def show_line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, TruemfuWarning):
                complain("warning", str(message))
            else:
                show(message, category, *where, **more)

        warnings.showwarning = show_line
        try:
            yield
        finally:
            logging.disable(disabled)
