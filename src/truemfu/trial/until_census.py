"""Runs a training command under `truemfu run` until one of its steps is recorded, and then ends it.

    command, in its own session ─► the trace in its folder ─► a few ordinary steps ─► TERM ─► grace ─► KILL

What it prints goes to stderr. All that it started is ended: launchers and their ranks too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..census.record import TRACE_FILE
from ..errors import UsageError
from ..sweep.process import WorkerProcess

GRACE_S = 10.0
"""How long the processes may take to end after SIGTERM."""
_ORDINARY_S = 5.0
"""How long the command goes on after a step was recorded, so that ordinary steps are known."""
_POLL_S = 0.1
_STDERR = 2


class CensusRun(NamedTuple):
    """What became of a command: the folder with its trace, or its exit code if it ended without one."""

    folder: Path | None
    code: int | None


def run_until_census(
    call: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    on_wait: Callable[[bool], None],
    ordinary_s: float = _ORDINARY_S,
) -> CensusRun:
    """Run a command whose monitors write to `folder`; `on_wait` gets whether a step is recorded."""
    try:
        process = WorkerProcess(call, environment=environment, output=_STDERR)
    except OSError as error:
        raise UsageError(f"{call[0]} cannot be started: {error.strerror}") from None
    process.send(b"")  # its standard input is empty
    found, until_s = None, float("inf")
    try:
        while time.monotonic() < until_s:
            if process.wait(_POLL_S):
                found = found or _traced(folder)
                return CensusRun(found, None if found else process.exit_code)
            on_wait(found is not None)
            if found is None and (found := _traced(folder)) is not None:
                until_s = time.monotonic() + ordinary_s
        return CensusRun(found, None)
    finally:
        process.end(GRACE_S)


def _traced(folder: Path) -> Path | None:
    """The folder with a trace: the command's own, or that of another of its processes."""
    for trace in (folder / TRACE_FILE, *sorted(folder.glob(f"process-*/{TRACE_FILE}"))):
        if trace.is_file():
            return trace.parent
    return None
