"""The run file next to the log: the description of the run, its starts, and at its end the summary.

    start ─► what is known at the start, after the starts before it ─► written
    log   ─► what is known with the first rows ─► flush: written with the git commit
    ended ─► the time of a signal ─► flush
    finish ─► written with the summary

A run that is started again in its folder is one run of several starts: each keeps when it began and ended,
and where its rows begin in the log. It is a tracker with its own lane: the run's folder may hang.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ... import plain_files
from ...commit import commit_in_files
from ...errors import RecordError
from ...provenance import command, library_versions, redacted_data
from ...records import RunRecord, RunStart, read_record
from ...trackers.file import JsonArrayFile

SIGNALLED = "signal_at_s"
"""The name under which the time of a signal is logged."""
_MOST_STARTS = 1000


class RunFile:
    """A tracker that writes one JSON object atomically; a disk error becomes a warning."""

    def __init__(self, path: Path, log: JsonArrayFile, *, notice: Callable[[str], None]) -> None:
        self._path, self._log, self._notice = path, log, notice
        self._run: dict[str, Any] = {}
        self._earlier: list[RunStart] = []
        self._start = RunStart(began_at_s=time.time())
        self._is_new = False

    def start(self, run: Mapping[str, Any]) -> None:
        """Create the folder, and write the description of the run after the starts before it."""
        self._run = {"command": command(), **run}
        allocation, allocation_began_at_s = _allocation()
        self._start = RunStart(
            process_began_at_s=_process_began_at_s(),
            began_at_s=time.time(),
            host=socket.gethostname(),
            device=run.get("device"),
            devices=run.get("world_size") or 1,
            allocation=allocation,
            allocation_began_at_s=allocation_began_at_s,
        )
        with contextlib.suppress(RecordError):  # there is none, or it is damaged
            self._earlier = read_record(self._path, RunRecord).starts[-_MOST_STARTS:]
        if self._earlier and self._earlier[-1].ended_at_s is None:
            with contextlib.suppress(OSError):  # the first row of this start comes later
                at_s = self._log.path.stat().st_mtime
                self._earlier[-1] = msgspec.structs.replace(self._earlier[-1], last_write_at_s=at_s)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._notice(f"the output folder cannot be created, nothing is logged locally: {error}")
        else:
            self._write(self._run)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add to the description of the run."""
        more = dict(metrics)
        if (at_s := more.pop(SIGNALLED, None)) is not None:
            self._start = msgspec.structs.replace(self._start, signal_at_s=at_s)
        self._run |= more
        self._is_new = True

    def flush(self) -> None:
        """Write the description."""
        if not self._is_new:
            return
        self._is_new = False
        if "git_commit" not in self._run:
            self._run["git_commit"] = commit_in_files()
        self._write(self._run)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final description of the run, and its summary."""
        at_the_end = {key: summary.get(key, value) for key, value in self._run.items()}
        self._start = msgspec.structs.replace(
            self._start, ended_at_s=time.time(), ended_by=summary.get("ended_by")
        )
        self._write({**at_the_end, "versions": library_versions(), "summary": summary})

    def _write(self, run: Mapping[str, Any]) -> None:
        self._start = msgspec.structs.replace(self._start, log_begins_at=self._log.begins_at)
        starts = msgspec.to_builtins([*self._earlier, self._start])
        try:
            text = msgspec.json.encode({**redacted_data(run), "starts": starts})
            plain_files.replace(self._path, msgspec.json.format(text, indent=2))
        except OSError as error:
            self._notice(f"{self._path.name} could not be written: {error}")


def _process_began_at_s() -> float | None:
    """When this process began; None where the system does not tell."""
    try:
        fields = (
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        ticks = int(fields[19])  # of all fields the 22nd, in clock ticks since the boot; two are cut off
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age_s


def _allocation() -> tuple[str | None, float | None]:
    """The job of Slurm that this process is in, and when it began."""
    job, began = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_START_TIME", "")
    if not job:
        return None, None
    again = os.environ.get("SLURM_RESTART_COUNT", "0")
    name = f"Slurm job {job}" if again == "0" else f"Slurm job {job}, restart {again}"
    return name, float(began) if began.isdigit() else None
