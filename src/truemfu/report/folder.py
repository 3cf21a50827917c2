"""Detects whether a folder contains a run or a sweep, and where its HTML report may be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError
from ..records import LOG_FILE, RUN_FILE
from ..sweep.paths import LOGS, PAGE_FILE, RECORD_FILE, RESULTS, SweepFolder
from .run.load import LoadedRun, holds_run, load_run
from .sweep.load import LoadedSweep, load_sweep

_A_RUN = f"a run ({RUN_FILE}, {LOG_FILE})"
_A_SWEEP = f"a sweep ({RECORD_FILE}, {LOGS}, {RESULTS})"


def load_folder(source: Path) -> LoadedRun | LoadedSweep:
    """Read `source`: the folder of a run or of a sweep, or one of its files."""
    found = run_or_sweep(source)
    return load_run(found) if isinstance(found, Path) else found


def run_or_sweep(source: Path) -> Path | LoadedSweep:
    """The folder of the run, or the sweep, at `source`; a run is not read yet."""
    if source.name in (RUN_FILE, LOG_FILE) and source.is_file():
        return source.parent
    if source.name == RECORD_FILE and source.is_file():
        return load_sweep(source.parent)
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise UsageError(f"{source} {what}: expected a folder with {_A_RUN} or {_A_SWEEP}")
    is_run = holds_run(source)
    sweep = _sweep(source) if not is_run or _may_hold_sweep(source) else None
    if is_run and sweep is not None:
        run_file = next(name for name in (RUN_FILE, LOG_FILE) if (source / name).is_file())
        files = SweepFolder(source)
        parts = [part for part in (files.results, files.logs) if part.is_dir()] or [files.record]
        raise UsageError(
            f"{source} contains {_A_RUN} and {_A_SWEEP}: give {source / run_file} for the run, "
            f"{' or '.join(map(str, parts))} for the sweep"
        )
    if sweep is not None:
        return sweep
    if not is_run:
        raise UsageError(f"{source} contains neither {_A_RUN} nor {_A_SWEEP}")
    return source


def page_path(source: Path, found: LoadedRun | LoadedSweep) -> Path:
    """The default path of the report; `report.html` in a folder with a sweep belongs to the sweep."""
    if source.is_dir():
        return source / PAGE_FILE
    folder = source.parent
    beside_sweep = isinstance(found, LoadedRun) and _may_hold_sweep(folder) and _sweep(folder) is not None
    return folder / ("run_report.html" if beside_sweep else PAGE_FILE)


def refuse_input(path: Path, files: Iterable[Path], what: str, option: str = "--output") -> None:
    """Refuse a path that would overwrite a measurement, also through a link."""
    if path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise UsageError(f"{path} is an input file of this {what}: give {option} another name")


def _may_hold_sweep(folder: Path) -> bool:
    """A quick check: many training scripts have a `logs` folder too."""
    files = SweepFolder(folder)
    return files.record.is_file() or files.logs.is_dir() or files.results.is_dir()


def _sweep(folder: Path) -> LoadedSweep | None:
    try:
        return load_sweep(folder)
    except UsageError:  # no experiment and no matrix
        return None
