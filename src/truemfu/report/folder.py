"""What a folder holds, found out from its files: a monitored run or a sweep."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..records import LOG_FILE, RUN_FILE
from .load import LoadedSweep, load_sweep
from .run_load import LoadedRun, holds_run, load_run

_A_RUN = f"a run ({RUN_FILE}, {LOG_FILE})"
_A_SWEEP = "a sweep (sweep.json, logs, results)"


def load_folder(source: Path) -> LoadedRun | LoadedSweep:
    """Read what lies in `source`: the folder of a run or of a sweep, or a run's own file."""
    if source.name in (RUN_FILE, LOG_FILE) and source.is_file():
        return load_run(source.parent)
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise UsageError(f"{source} {what}: expected a folder with {_A_RUN} or {_A_SWEEP}")
    is_run = holds_run(source)
    sweep = _sweep(source) if not is_run or _may_hold_sweep(source) else None
    if is_run and sweep is not None:
        run_file = next(name for name in (RUN_FILE, LOG_FILE) if (source / name).is_file())
        raise UsageError(
            f"{source} holds {_A_RUN} and {_A_SWEEP}: give {source / run_file} for the run, "
            f"{source / 'results'} or {source / 'logs'} for the sweep"
        )
    if sweep is not None:
        return sweep
    if not is_run:
        raise UsageError(f"{source} holds neither {_A_RUN} nor {_A_SWEEP}")
    return load_run(source)


def _may_hold_sweep(folder: Path) -> bool:
    """Whether a look is worth it; many a training script has a folder `logs` of its own."""
    return (folder / "sweep.json").is_file() or any((folder / name).is_dir() for name in ("logs", "results"))


def _sweep(folder: Path) -> LoadedSweep | None:
    try:
        return load_sweep(folder)
    except UsageError:  # no experiment and no matrix of one
        return None
