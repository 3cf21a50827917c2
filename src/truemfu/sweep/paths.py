"""The folder of a sweep: every file name in it.

    sweep.json                  which experiments belong here, with which settings
    logs/<name>.log             what the worker printed; the last line is its result
    results/<name>.json         its result
    runs/<name>/                TensorBoard events and the profiler's trace, <name>.pt.trace.json.gz
    running/lock                held by the supervisor of the running sweep
    running/<name>.json         an experiment in progress: its process and token
    running/<name>.progress     the phases it has reached
    running/probe-<slot>.log    what a probe of memory prints, until it has ended
    running/jobs-<id>/          experiments given to a cluster (launchers/jobs.py), until all have ended
    report.html                 the HTML report of all experiments

Nothing outside is written or removed: names come from records, which reject a name that is a path, and no
symbolic link inside the folder is followed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from .. import plain_files
from ..records import SweepCase

RECORD_FILE = "sweep.json"
PAGE_FILE = "report.html"
LOGS, RESULTS, RUNS, RUNNING = "logs", "results", "runs", "running"
LOCK_FILE = "lock"
_JOBS_PREFIX = "jobs-"


class RunningCase(msgspec.Struct, frozen=True, kw_only=True):
    """A running experiment, for the next supervisor if this one dies."""

    token: str
    began_at_s: float
    content_hash: str
    case: SweepCase


class SweepFolder:
    """The paths of one sweep's files. No other module builds one from its parts.

    `logs` and `results` are given by a reader that has only a copy of that folder, under any name.
    """

    def __init__(self, root: Path, *, logs: Path | None = None, results: Path | None = None) -> None:
        self.root = root
        self.record = root / RECORD_FILE
        self.page = root / PAGE_FILE
        self.logs = root / LOGS if logs is None else logs
        self.results = root / RESULTS if results is None else results
        self.runs = root / RUNS
        self.running = root / RUNNING
        self.lock = self.running / LOCK_FILE

    @property
    def parts(self) -> tuple[Path, ...]:
        """The folders inside."""
        return self.logs, self.results, self.runs, self.running

    def make(self) -> list[str]:
        """Create missing folders, replacing anything else that an experiment put at their paths.

        Returns the names of the created folders; an OSError if one cannot be created.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        return [part.name for part in self.parts if plain_files.make_folder(part)]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def result(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def run(self, name: str) -> Path:
        return self.runs / name

    def trace(self, name: str) -> Path:
        return self.run(name) / f"{name}.pt.trace.json.gz"

    def marker(self, name: str) -> Path:
        return self.running / f"{name}.json"

    def progress(self, name: str) -> Path:
        return self.running / f"{name}.progress"

    def probe_log(self, slot: str) -> Path:
        return self.running / f"probe-{slot}.log"

    def jobs(self, batch: str) -> Path:
        return self.running / f"{_JOBS_PREFIX}{batch}"

    def all_jobs(self) -> list[Path]:
        """The folders of experiments that were given to a cluster."""
        try:
            return [path for path in self.running.glob(f"{_JOBS_PREFIX}*") if plain_files.is_folder(path)]
        except OSError:
            return []

    def log_names(self) -> list[str]:
        """The experiments that have a log."""
        return plain_files.names_in(self.logs, ".log")

    def result_names(self) -> list[str]:
        """The experiments that have a result file."""
        return plain_files.names_in(self.results, ".json")

    def markers(self) -> dict[str, Path]:
        """The experiments that their supervisor has not marked as finished, by name."""
        return {name: self.marker(name) for name in plain_files.names_in(self.running, ".json")}

    def remove_running(self, name: str) -> None:
        """Remove the files of an experiment in progress; what cannot be removed is left to the next call."""
        for path in (self.marker(name), self.progress(name)):
            with contextlib.suppress(OSError):
                plain_files.remove(path)
