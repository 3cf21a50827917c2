"""The census that a path leads to: that of a run's folder, or of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..census.record import CENSUS_FILE, TRACE_FILE, Census
from ..errors import UsageError
from ..records import read_record
from .run.load import LoadedRun, holds_run, load_run
from .run.log_summary import results_of

if TYPE_CHECKING:
    from ..census.items import Found


def load_census(path: Path, device: str | None = None, found: Found | None = None) -> Census:
    """Of a folder the census that its run wrote, or that of its trace; of a file that of this trace.

    `device` names the device of the trace, instead of what the trace says; `found` is the trace, if it was
    read already.
    """
    if not path.is_dir():
        return _of_trace(path, device, found)
    record, trace = path / CENSUS_FILE, path / TRACE_FILE
    if device is None and record.is_file():
        return read_record(record, Census)
    if trace.is_file():
        # A run may have been ended before it wrote its summary.
        return _of_trace(trace, device, found, load_run(path) if holds_run(path) else None)
    raise UsageError(
        f"{path} has no census of a step: neither {CENSUS_FILE} nor {TRACE_FILE}. A run on a GPU in mode "
        "hybrid records one; monitoring.census: true does so in any mode (docs/explain.md)"
    )


def trace_at(path: Path) -> Path:
    """The trace that a path leads to."""
    trace = path / TRACE_FILE if path.is_dir() else path
    if not trace.is_file():
        raise UsageError(f"{path} has no trace: expected {TRACE_FILE} in it")
    return trace


def _of_trace(trace: Path, device: str | None, found: Found | None, run: LoadedRun | None = None) -> Census:
    from ..census.census import census_of

    summary = None if run is None else results_of(run).summary
    return census_of(
        trace,
        device_name=device,
        found=found,
        ordinary_step_s=None if summary is None else summary.median_step_time_s,
        padding_lost=None if summary is None else summary.padding_lost,
    )
