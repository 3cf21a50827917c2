"""`truemfu audit`: the exact executed tensor operations of one step compared with the count, by kernel.

    options, command ─► ncu runs it ─► CSV and the process's own count ─► tables, exit code
                            └─► its log: how many kernels are profiled, on stderr
    --replay FILE ─► the CSV and the saved count ─────────────────────────┘

Only all launches of one marked step can be compared with its count, or give the share of a step without
matrix work: whether they were requested is stored with the count. The command's output goes to stderr, so
that stdout only has the tables or the JSON.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import click
import msgspec

from ..errors import UsageError, warn_once
from ..hardware.nsight.audit import Audit, audit_of
from ..hardware.nsight.command import COUNT_VARIABLE, StepCount, find_ncu, ncu_command, read_step_count
from ..hardware.nsight.csv_output import errors_in, is_from_ncu, parse_ncu_csv
from ..hardware.nsight.run import PROFILED, printed_by, run_audited
from ..plain_files import read_given
from ..records import write_record
from ..text import counted
from .audit_tables import show_audit
from .console import FilePath, json_option, say, working
from .options import list_option, older_names
from .progress import Progress

_COUNT_FROM_START = 1000
_STDERR = 2
_NO_KERNEL_YET = "audit: no kernel profiled yet"


@click.command(
    short_help="Exact executed tensor operations of a step, by kernel (needs Nsight Compute).",
    context_settings={
        "allow_interspersed_args": False,
        **older_names({"save": "record", "csv": "replay"}),
    },
)
@click.option("--from-start", is_flag=True, help="Profile every launch, not only those of a marked step.")
@click.option(
    "--keep-running", is_flag=True, help="Let the command continue after its marked step is counted."
)
@click.option("--launch-skip", type=click.IntRange(min=0), default=0, help="Skip this many launches first.")
@click.option(
    "--launch-count",
    type=click.IntRange(min=1),
    help=f"Stop after this many launches.  [default: all of the step; {_COUNT_FROM_START} with --from-start]",
)
@click.option("--kernel-name", help="Only kernels of this name, or regex:EXPRESSION.")
@list_option("--metrics", help="More ncu metrics, comma-separated; only written to --record.")
@click.option(
    "--record",
    "save",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Save ncu's CSV here, and the count next to it (FILE.count.json).",
)
@click.option(
    "--replay",
    "saved",
    type=FilePath(),
    metavar="FILE",
    help="Show a recorded CSV, without running anything.",
)
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Kernels to show.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def audit(
    from_start: bool,
    keep_running: bool,
    launch_skip: int,
    launch_count: int | None,
    kernel_name: str | None,
    metrics: tuple[str, ...] | None,
    save: Path | None,
    saved: Path | None,
    top: int,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND under Nsight Compute and sum what its tensor cores executed, by kernel.

    A TrainingMonitor in the command marks one step, its fourth or the first after that in which nothing is
    compiled, and writes its count; the two are compared, and the command is ended. Without a monitor, mark a
    step with torch.cuda.profiler.start() and stop(), or profile from the start.

    \b
    Examples
        truemfu audit -- python train.py
        truemfu audit --from-start --launch-skip 500 --launch-count 200 -- python train.py
        truemfu audit --from-start --kernel-name regex:gemm --json -- python train.py
        truemfu audit --record step.csv -- python train.py
        truemfu audit --replay step.csv

    Every kernel is replayed, 0.2 to 0.4 s each: audit a model of a few layers, on one GPU. Progress
    is shown on stderr. Exit codes: 0 done, 1 the command failed or nothing was profiled, 2 wrong usage or ncu
    is not installed.
    """
    if saved is not None:
        of_a_run = {
            "the command": command,
            "--record": save,
            "--from-start": from_start,
            "--keep-running": keep_running,
            "--launch-skip": launch_skip,
            "--launch-count": launch_count,
            "--kernel-name": kernel_name,
            "--metrics": metrics,
        }
        if given := [name for name, value in of_a_run.items() if value]:
            raise UsageError(f"--replay runs nothing: leave out {' and '.join(given)}, or leave out --replay")
        return _show_saved(saved, top, as_json)
    if not command:
        raise UsageError("give the command to audit: truemfu audit -- python train.py")
    ncu = find_ncu()
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: command not found, or not executable")
    if from_start and launch_count is None:
        launch_count = _COUNT_FROM_START
    with tempfile.TemporaryDirectory(prefix="truemfu-audit-") as folder:
        csv_file = save or Path(folder, "ncu.csv")
        count_file = _count_file_of(csv_file)
        log_file, report = Path(folder, "ncu.log"), Path(folder, "step.ncu-rep")
        call = ncu_command(
            ncu,
            command,
            report=report,
            log_file=log_file,
            from_start=from_start,
            launch_skip=launch_skip,
            launch_count=launch_count,
            kernel_name=kernel_name,
            metrics=metrics or (),
        )
        code = _run(call, log_file, [csv_file, count_file], from_start=from_start, keep_running=keep_running)
        csv_file.write_text(printed_by(ncu, log_file=log_file, report=report), encoding="utf-8")
        text, count, result = _read(csv_file, count_file)
        if not result.launches:
            unmatched = _unmatched(count, from_start, launch_skip, kernel_name)
            return _nothing_profiled(text, count, code, unmatched)
        # A command that failed before its count may have failed in the middle of its step.
        is_whole = not (from_start or launch_skip or launch_count or kernel_name or (code and count is None))
        if save is not None:
            _store_selection(count_file, count, is_whole)
    shown = show_audit(result, top, as_json, is_a_step=is_whole)
    # A run that was ended at its last requested launch has not failed.
    if code and launch_count is None:
        say(f"error: {_failed(text, code)}; showing what was profiled", err=True)
        return 1
    return shown


def _show_saved(saved: Path, top: int, as_json: bool) -> int:
    text, count, result = _read(saved, _count_file_of(saved))
    if result.launches:
        return show_audit(result, top, as_json, is_a_step=count is not None and count.is_whole_step is True)
    if not is_from_ncu(text):
        raise UsageError(f"{saved} does not contain a table of Nsight Compute")
    return _nothing_profiled(text, count, 0, "it contains no kernel launch")


def _run(call: list[str], log_file: Path, files: list[Path], *, from_start: bool, keep_running: bool) -> int:
    """The exit code of the command; 0 if it was ended after its count."""
    environment = {name: value for name, value in os.environ.items() if name != COUNT_VARIABLE}
    csv_file, count_file = files
    for file in files:
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is not a regular file; give --record a regular or a new file")
    try:  # files of an earlier run would be mistaken for this one's
        count_file.unlink(missing_ok=True)
        csv_file.write_bytes(b"")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None
    if not from_start:  # a step's count cannot be compared with all launches
        environment[COUNT_VARIABLE] = str(count_file.absolute())
    with working(_NO_KERNEL_YET) as show:
        progress = Progress(show)
        end = run_audited(
            call,
            environment=environment,
            count_file=count_file,
            keep_running=keep_running or from_start,
            stdout=_STDERR,
            say=lambda text: say(text, err=True),
            on_wait=lambda: progress.update(lambda: _profiled(log_file)),
        )
    return 0 if end.was_ended else end.code


def _profiled(log_file: Path) -> str:
    """How far ncu is, which writes a line for each kernel; how many there will be is not known."""
    try:
        kernels = log_file.read_bytes().count(PROFILED.encode())
    except OSError:  # ncu creates it when it starts
        kernels = 0
    return f"audit: {counted(kernels, 'kernel')} profiled" if kernels else _NO_KERNEL_YET


def _count_file_of(csv_file: Path) -> Path:
    return csv_file.parent / f"{csv_file.name}.count.json"  # works for "." too


def _read(csv_file: Path, count_file: Path) -> tuple[str, StepCount | None, Audit]:
    """ncu's output, the process's count, and the audit of both."""
    text, count = _text(csv_file), read_step_count(count_file)
    return text, count, audit_of(parse_ncu_csv(text), count)


def _store_selection(count_file: Path, count: StepCount | None, is_whole: bool) -> None:
    """Store with the count whether the saved table covers one whole step."""
    try:
        write_record(count_file, msgspec.structs.replace(count or StepCount(), is_whole_step=is_whole))
    except OSError as error:
        warn_once(f"{count_file} cannot be written: {error.strerror}; --replay will not be able to compare")


def _text(path: Path) -> str:
    try:
        return read_given(path).decode(errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _nothing_profiled(text: str, count: StepCount | None, code: int, otherwise: str) -> int:
    """No launch was profiled: report why. If ncu fails, so does the command, and its own error is only a
    consequence."""
    if "ERR_NVGPUCTRPERM" in text:
        why = "this user has no permission to read the GPU's counters: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
    elif count is not None and count.reason is not None and not errors_in(text):
        why = count.reason
    elif code or errors_in(text):
        why = _failed(text, code)
    else:
        why = otherwise
    say(f"error: nothing was profiled; {why}", err=True)
    return 1


def _failed(text: str, code: int) -> str:
    errors = errors_in(text)
    return f"ncu reports: {errors[0]}" if errors else f"the command ended with code {code}"


def _unmatched(count: StepCount | None, from_start: bool, launch_skip: int, kernel_name: str | None) -> str:
    """Why no launch was profiled although nothing failed."""
    called = "" if kernel_name is None else f" that matches --kernel-name {kernel_name}"
    skipped = f" after the first {launch_skip}" if launch_skip else ""
    where = "by the command" if from_start else "in the marked step"
    launched = f"no kernel{called} was launched {where}{skipped}"
    if count is not None or from_start:
        return launched
    or_else = f", or {launched}" if called or skipped else ""
    return f"no step was marked{or_else}: use a TrainingMonitor, torch.cuda.profiler.start(), or --from-start"
