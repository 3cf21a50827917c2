"""Runs a command under Nsight Compute, and ends it once its marked step is counted.

    ncu ─► … ─► the audited process: marks a step ─► writes its StepCount, with its process id
     │                                                   └─► TERM ─► grace ─► KILL, to that process alone
     └─► writes its report, ends ─► printed_by: its messages and the report as CSV

ncu writes its report after the profiled process has ended ("Disconnected from process" is its last message),
however it ended: its own `--kill` ends processes in the middle of a run. So ncu is never signalled, only
waited for. The process is only signalled if /proc shows it as a descendant of ncu: an id from inside a
container may belong to another process outside. Otherwise the run continues to its end.
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
"""How long a process may take to end after SIGTERM; some save a checkpoint then."""

PROFILED = '==PROF== Profiling "'
"""The prefix of ncu's line for each profiled kernel."""

_REPORT = "==PROF== Report: "

_POLL_INTERVAL_S = 0.2
_PROC = Path("/proc")


class AuditedRun(NamedTuple):
    """The result of a run under ncu: ncu's exit code, and whether the audited process was ended by us."""

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
    on_wait: Callable[[], None] = lambda: None,
) -> AuditedRun:
    """Run `call` until it ends; the audited process is ended once its count exists, unless `keep_running`.

    `on_wait` is called several times a second while ncu runs. After an interrupt both get `grace_s` to end
    and are then killed. A terminal's interrupt reaches them directly; after any other exception they get
    SIGTERM.
    """
    try:
        process = subprocess.Popen(call, env=dict(environment), stdout=stdout)
    except OSError as error:
        raise UsageError(f"{call[0]} cannot be started: {error.strerror}") from None
    try:
        count = None if keep_running else _wait_for_count(process, count_file, on_wait)
        if count is not None and (audited := count.process_id) is not None:
            what = "the marked step is counted" if count.reason is None else "there will be no count"
            if _descends_from(audited, process.pid):
                say(f"{what}: ending the run (--keep-running lets it go on)")
                _end(audited, process, grace_s)
                return AuditedRun(_wait(process, on_wait), True)
            say(f"{what}; process {audited} was not found here, so the run continues")
        return AuditedRun(_wait(process, on_wait), False)
    except BaseException as stop:
        _end_all(process, grace_s, already_signalled=isinstance(stop, KeyboardInterrupt))
        raise


def printed_by(ncu: str, *, log_file: Path, report: Path) -> str:
    """ncu's messages and, if it profiled a kernel, its report as CSV."""
    messages = log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""
    text = "".join(f"{line}\n" for line in messages.splitlines() if not line.startswith((PROFILED, _REPORT)))
    if not report.exists():
        return text
    done = subprocess.run(table_command(ncu, report), capture_output=True)
    return text + done.stdout.decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], on_wait: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            on_wait()


def _wait_for_count(
    process: subprocess.Popen[bytes], count_file: Path, on_wait: Callable[[], None]
) -> StepCount | None:
    """The count the process wrote; None if ncu ended before, or it cannot be read."""
    while True:
        try:
            process.wait(_POLL_INTERVAL_S)
            return None
        except subprocess.TimeoutExpired:
            on_wait()
        try:
            count = read_step_count(count_file)
        except RecordError:  # reported when it is read at the end
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
            time.sleep(_POLL_INTERVAL_S / 4)
        else:
            return


def _end_all(process: subprocess.Popen[bytes], grace_s: float, *, already_signalled: bool) -> None:
    """Send SIGTERM unless already signalled, and SIGKILL after the grace period or a second signal."""
    try:
        if not already_signalled:
            for pid in _descendants(process.pid):
                _signal(pid, signal.SIGTERM)
        process.wait(grace_s)
    except BaseException:  # out of time, or a second signal
        for pid in [*_descendants(process.pid), process.pid]:
            _signal(pid, signal.SIGKILL)
        process.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    # It may have ended, or another user's process may have its id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process is alive and a descendant of another."""
    state, parent = _state_and_parent(pid)
    if state == "Z":
        return False
    while parent is not None:
        if parent == ancestor:
            return True
        _, parent = _state_and_parent(parent)
    return False


def _descendants(pid: int) -> list[int]:
    numbers = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
    return [number for number in numbers if _descends_from(number, pid)]


def _state_and_parent(pid: int) -> tuple[str, int] | tuple[None, None]:
    """None if there is no such process, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None, None
    state, parent, *_ = text.rpartition(")")[2].split()  # a name may contain anything, even brackets
    return state, int(parent)
