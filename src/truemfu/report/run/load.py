"""A monitored run read back from its folder: its record and its rows.

    training_run.json ─► RunRecord       facts about the run, and at its end the summary
    training_log.json ─► LogRow …        one row per logged step; of two rows of one step the last counts
    ranks/*.jsonl     ─► RanksOfRun      what each rank of a job reported, as far as its file is there

Both may be damaged, or one may be missing: a run that was killed, a file copied while it grew. Everything
readable is read, and `notes` names the rest. The files may have been copied from anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RecordError, UsageError
from ...plain_files import read_end
from ...records import LOG_FILE, RUN_FILE, GenerationServer, RunRecord, read_record
from ...trackers.log_scan import rows_of_damaged
from .job import Job, job_of, positions_of
from .log_rows import LogRows, ReadLog, read_log
from .ranks import RanksOfRun, load_ranks

_WITHOUT_RECORD = "device, versions and the run's summary are unknown; the figures come from the log"


@dataclass(frozen=True, kw_only=True)
class LastWindow:
    """The last window of hardware counters, from the last row that has one."""

    step: int
    metrics: Mapping[str, float]
    """The finite `perf/` metrics of that row, in its order."""
    clock_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run as read from its files."""

    folder: Path
    record: RunRecord | None
    """None without a readable run file."""
    rows: LogRows
    """By step, each step once."""
    ranks: RanksOfRun
    """Empty for a single process."""
    last_window: LastWindow | None = None
    """Only read without a summary, which covers all windows."""
    servers: tuple[GenerationServer, ...] = ()
    """Generation servers: of the summary, else of the last row that has any."""
    job: Job | None = None
    """What all its starts together got out of the devices; None if they are not recorded."""
    notes: tuple[str, ...] = ()
    """Sentences about problems with the files."""

    @property
    def files(self) -> list[Path]:
        """The files it was read from."""
        return [self.folder / RUN_FILE, self.folder / _log_name(self.record)]


def holds_run(folder: Path) -> bool:
    """Whether the folder contains files of a monitor."""
    return (folder / RUN_FILE).is_file() or (folder / LOG_FILE).is_file()


def load_run(folder: Path | str) -> LoadedRun:
    """Read the run in `folder`, the `output_dir` of a TrainingMonitor."""
    folder = Path(folder)
    if not holds_run(folder):
        raise UsageError(f"{folder} does not contain a run: expected {RUN_FILE} or {LOG_FILE}")
    notes: list[str] = []
    record, fault = _record(folder / RUN_FILE)
    summary = None if record is None else record.summary
    if fault is not None:
        notes.append(f"{fault}; {_WITHOUT_RECORD}.")
    elif summary is None:
        notes.append(
            "The run has no summary yet: it is still running, or it ended without closing its monitor; "
            "the figures come from the log."
        )
    elif summary.ended_by is not None:
        notes.append(f"The run was ended by {summary.ended_by}.")
    log_name = _log_name(record)
    log = _log(folder / log_name, record, notes)
    rows = log.rows
    if record is None and not rows:
        raise UsageError(
            f"{folder} does not contain a readable run: {fault}, and the log {log_name} has no readable row"
        )
    ranks = load_ranks(folder)
    notes += [f"Rows of a rank are missing: {fault}." for fault in ranks.faults]
    logged = None if summary is None else summary.steps
    if logged is not None and len(rows) > logged:
        notes.append(
            f"The log has {len(rows):,} steps, and the summary covers the {logged:,} since the last start."
        )
    return LoadedRun(
        folder=folder,
        record=record,
        rows=rows,
        ranks=ranks,
        last_window=_last_window(folder / log_name) if summary is None else None,
        servers=_last_servers(folder / log_name) if summary is None else tuple(summary.generation_servers),
        job=None if record is None else job_of(record.starts, log.starts, _written_at_s(folder / log_name)),
        notes=tuple(notes),
    )


def _log_name(record: RunRecord | None) -> str:
    """Only the file name: files from elsewhere must not lead out of the folder."""
    return LOG_FILE if record is None else Path(record.log_file).name


def _record(path: Path) -> tuple[RunRecord | None, str | None]:
    """The run file, or its problem."""
    if not path.is_file():
        return None, f"The run file {path.name} is missing"
    try:
        return read_record(path, RunRecord), None
    except RecordError as error:
        return None, f"The run file {error}".replace(str(path), path.name)


def _log(path: Path, record: RunRecord | None, notes: list[str]) -> ReadLog:
    """The rows of the log by step."""
    try:
        log = read_log(path, positions_of([] if record is None else record.starts))
    except OSError as error:
        notes.append(f"The log {path.name} cannot be read, so there are no charts: {error.strerror}.")
        return ReadLog()
    if not log.is_whole:
        what = "is cut off" if log.is_cut_off else "is damaged"
        notes.append(
            f"The log {path.name} {what}: {log.read:,} rows were read, {log.unread:,} could not be read."
        )
    if log.repeated:
        what = "1 row was" if log.repeated == 1 else f"{log.repeated:,} rows were"
        notes.append(
            f"{what} replaced by a later row of the same step: the run was restarted, or several runs share "
            "this folder."
        )
    return log


def _written_at_s(path: Path) -> float | None:
    """When a file was last written; None if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


_OF_COUNTERS = re.compile(
    rb'"perf/(loss/|executed_|energy_j_per_|sm_clock_mhz"|power_w"|(tensor|sm|dram)_active")'
)
_OF_SERVERS = re.compile(rb'"perf/server/')
_NO_NUMBER = 1e300
_END_BYTES = 16 << 20


def _last_row(log: Path, holds: re.Pattern[bytes]) -> dict[str, Any]:
    """The last row near the end of the log in which a pattern is found; empty if there is none."""
    try:
        rows = rows_of_damaged([read_end(log, _END_BYTES)[0]])
    except OSError:  # `_log` reports it
        return {}
    row = next(filter(holds.search, reversed(list(filter(None, rows)))), None)
    return {} if row is None else json.loads(row)


def _last_servers(log: Path) -> tuple[GenerationServer, ...]:
    """What generation servers did for the last row that has any."""
    found: dict[int, dict[str, Any]] = {}
    for metric, value in _last_row(log, _OF_SERVERS).items():
        if (name := re.fullmatch(r"perf/server/(\d{1,9})/(\w+)", metric)) is not None:
            found.setdefault(int(name[1]), {})[name[2]] = value
    try:
        return msgspec.convert(
            tuple(values | {"number": number} for number, values in found.items()),
            tuple[GenerationServer, ...],
        )
    except msgspec.ValidationError:  # a damaged row
        return ()


def _last_window(log: Path) -> LastWindow | None:
    """The last row with values of counters, near the end of the log."""
    values = _last_row(log, _OF_COUNTERS)
    if not values:
        return None
    metrics = {
        name: float(value)
        for name, value in values.items()
        if name.startswith("perf/") and type(value) in (int, float) and abs(value) < _NO_NUMBER
    }
    source = values.get("perf/clock_source")
    return LastWindow(
        step=values["global_step"], metrics=metrics, clock_source=source if isinstance(source, str) else None
    )
