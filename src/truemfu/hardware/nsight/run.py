"""A command under Nsight Compute, ended once its marked step is counted: what comes after has no use.

    ncu ─► … ─► the audited process: marks a step ─► writes its StepCount, with its process number
     │                                                   └─► TERM ─► grace ─► KILL, to that process alone
     └─► writes its report, ends ─► printed_by: its messages and the report as CSV

ncu keeps what it has collected and writes its report after the process it watches is gone ("Disconnected from
process" is its last message), however that went: its own `--kill` ends processes in the middle of a run. So
ncu is never signalled, only waited for. The process is signalled only where it descends from ncu as /proc
has it: a number from inside a container may belong to anybody out here. Elsewhere the run goes on to its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import RecordError, UsageError
from .command import StepCount, read_step_count, table_command

GRACE_S = 10.0
"""How long a process may take to end when asked; some save a checkpoint then."""

PROFILED = '==PROF== Profiling "'
"""How ncu begins the line of a kernel that it profiles."""

_REPORT = "==PROF== Report: "

_LOOK_EVERY_S = 0.2
_PROC = Path("/proc")


class RunEnd(NamedTuple):
    """How a run under ncu ended: ncu's exit code, and whether it was we who ended the process under it."""

    code: int
    was_ended: bool


def run_audited(
    call: Sequence[str],
    *,
    environment: Mapping[str, str],
    count_file: Path,
    keep_running: bool = False,
    grace_s: float = GRACE_S,
    stdout: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    look: Callable[[], None] = lambda: None,
) -> RunEnd:
    """Run `call` until it ends; the audited process is ended when its count is there, unless it is to run on.

    `look` is called several times a second while ncu runs. An interrupt waits for ncu as long as for the
    process, and is passed on; then both are killed. Of a terminal's interrupt they know; whatever else ends
    this one, they are told.
    """
    try:
        process = subprocess.Popen(call, env=dict(environment), stdout=stdout)
    except OSError as error:
        raise UsageError(f"{call[0]} cannot be started: {error.strerror}") from None
    try:
        count = None if keep_running else _wait_for_count(process, count_file, look)
        if count is not None and (audited := count.process_id) is not None:
            what = "the marked step is counted" if count.reason is None else "there will be no count"
            if _descends_from(audited, process.pid):
                say(f"{what}: ending the run (--keep-running lets it go on)")
                _end(audited, process, grace_s)
                return RunEnd(_wait(process, look), True)
            say(f"{what}; process {audited} is not to be found here, so the run goes on")
        return RunEnd(_wait(process, look), False)
    except BaseException as stop:
        _take_down(process, grace_s, have_heard=isinstance(stop, KeyboardInterrupt))
        raise


def printed_by(ncu: str, *, log_file: Path, report: Path) -> str:
    """What ncu said and, where it profiled a kernel, its report as CSV."""
    said = log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""
    text = "".join(f"{line}\n" for line in said.splitlines() if not line.startswith((PROFILED, _REPORT)))
    if not report.exists():
        return text
    done = subprocess.run(table_command(ncu, report), capture_output=True)
    return text + done.stdout.decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], look: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            look()


def _wait_for_count(
    process: subprocess.Popen[bytes], count_file: Path, look: Callable[[], None]
) -> StepCount | None:
    """What the process wrote; None where ncu ended before, or nobody can read it."""
    while True:
        try:
            process.wait(_LOOK_EVERY_S)
            return None
        except subprocess.TimeoutExpired:
            look()
        try:
            count = read_step_count(count_file)
        except RecordError:  # whoever reads it at the end says so
            return None
        if count is not None:
            return count


def _end(pid: int, process: subprocess.Popen[bytes], grace_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(pid, number)
        until_s = time.monotonic() + grace_s
        while process.poll() is None and _descends_from(pid, process.pid):
            if time.monotonic() > until_s:
                break
            time.sleep(_LOOK_EVERY_S / 4)
        else:
            return


def _take_down(process: subprocess.Popen[bytes], grace_s: float, *, have_heard: bool) -> None:
    """Who has not heard of the end is asked to; who does not end, or is not waited for any more, is ended."""
    try:
        if not have_heard:
            for pid in _descendants(process.pid):
                _signal(pid, signal.SIGTERM)
        process.wait(grace_s)
    except BaseException:  # out of time, or a second signal
        for pid in [*_descendants(process.pid), process.pid]:
            _signal(pid, signal.SIGKILL)
        process.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    # It may have ended meanwhile, or somebody else's process have taken its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process is alive and was started by another, at whatever distance."""
    if _state(pid) == "Z":
        return False
    while (parent := _parent(pid)) is not None:
        if parent == ancestor:
            return True
        pid = parent
    return False


def _descendants(pid: int) -> list[int]:
    numbers = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
    return [number for number in numbers if _descends_from(number, pid)]


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _stat(pid: int) -> list[str]:
    """State, parent and what follows; empty where there is no such process, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a name may hold anything, brackets too
