"""The census that a path leads to: that of a run's folder, or of a trace."""

from __future__ import annotations

from pathlib import Path

from ...census.record import CENSUS_FILE, TRACE_FILE, Census
from ...errors import RecordError, UsageError
from ...records import RUN_FILE, RunRecord, read_record


def load_census(path: Path, device: str | None = None) -> Census:
    """Of a folder the census that its run wrote, or that of its trace; of a file that of this trace.

    `device` names the device of the trace, instead of what the trace says.
    """
    if not path.is_dir():
        return _of_trace(path, device)
    record, trace = path / CENSUS_FILE, path / TRACE_FILE
    if device is None and record.is_file():
        return read_record(record, Census)
    if trace.is_file():
        return _of_trace(trace, device, _run_of(path))
    raise UsageError(
        f"{path} has no census of a step: neither {CENSUS_FILE} nor {TRACE_FILE}. A run on a GPU in mode "
        "hybrid records one; monitoring.census: true does so in any mode (docs/explain.md)"
    )


def census_of_run(folder: Path) -> Census | None:
    """The census that the run in a folder wrote; None without a readable one."""
    try:
        return read_record(folder / CENSUS_FILE, Census)
    except RecordError:
        return None


def _of_trace(trace: Path, device: str | None, run: RunRecord | None = None) -> Census:
    from ...census.census import census_of

    summary = None if run is None else run.summary
    return census_of(
        trace,
        device_name=device,
        ordinary_step_s=None if summary is None else summary.median_step_time_s,
        padding_lost=None if summary is None else summary.padding_lost,
    )


def _run_of(folder: Path) -> RunRecord | None:
    try:
        return read_record(folder / RUN_FILE, RunRecord)
    except RecordError:
        return None
