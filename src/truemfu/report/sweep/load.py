"""A sweep read back from its files: the whole folder, its logs alone, or its results alone.

    sweep.json ─► the requested experiments        (the denominator)
    results/<name>.json ─┐
    logs/<name>.log ─────┴► the result of each            (`sweep.stored`)

Nothing is skipped: a file that cannot be read and an experiment without a result are separate entries, with
the reason; a damaged file whose result is in the other copy is named in a note; so is a file that neither has
the name of an experiment nor contains a result of that name. The files may have been copied from anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RecordError, UsageError
from ...records import CaseResult, Status, SweepCase, SweepRecord, read_record
from ...sweep.cases import cases_of
from ...sweep.config import SweepConfig
from ...sweep.paths import LOGS, RECORD_FILE, RESULTS, SweepFolder
from ...sweep.supervisor.stored import Stored, stored_result

NOT_RUN = "not run"
"""In addition to the values of `Status`: requested, and never started."""

_NAME = re.compile(
    r"(?P<trainer>.+?)_bs(?P<batch_size>\d+)_seq(?P<seq_len>\d+)(?:_.*?)??"
    r"(?:_(?P<parallel>ddp|fsdp2)x(?P<gpus>\d+))?"
)


@dataclass(frozen=True, kw_only=True)
class SweepEntry:
    """One experiment of a sweep: its result, or why there is none."""

    name: str
    trainer: str
    batch_size: int | None
    seq_len: int | None
    end: str
    """A value of `Status`, or `NOT_RUN`."""
    case: SweepCase | None = None
    """None for a name that is not in the sweep's matrix, without a result."""
    result: CaseResult | None = None
    gpus: int = 1
    parallel: str | None = None
    reason: str | None = None
    """Why there is no result."""
    log_tail: tuple[str, ...] = ()
    """The last lines of the log of an experiment without a result."""


@dataclass(frozen=True, kw_only=True)
class LoadedSweep:
    """A sweep as read from its files."""

    source: Path
    record: SweepRecord | None
    """None without a sweep.json next to the files."""
    entries: tuple[SweepEntry, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files it was read from."""
        files = _files(self.source)
        return [
            files.record,
            *map(files.result, files.result_names()),
            *map(files.log, files.log_names()),
            *files.markers().values(),
        ]


def load_sweep(source: Path | str) -> LoadedSweep:
    """Read the sweep in `source`: a sweep's folder, or only its `logs` or `results` folder."""
    source = Path(source)
    files = _files(source)
    notes: list[str] = []
    record = _record(files.record, notes)
    found = {name: stored_result(name, files.result(name), files.log(name)) for name in _names(files, record)}
    running = {name for name in found if os.path.lexists(files.marker(name))}
    notes += [fault for stored in found.values() if stored.result is not None for fault in stored.faults]
    foreign = _remove_foreign_files(found, record, notes)
    if not found:
        expected = f"expected {LOGS} (*.log), {RESULTS} (*.json) or a {RECORD_FILE}"
        raise UsageError("; ".join([f"{source} does not contain a sweep: {expected}", *notes]))
    if foreign:
        notes.append(f"ignored, because these are not experiments: {', '.join(foreign)}")
    if record is not None:
        _remove_other_sweeps(found, record, notes)
    trainers = _trainer_of_prefix(found)
    cases = _requested_cases(record)
    entries = tuple(
        _entry(name, stored, cases, trainers, is_running=name in running) for name, stored in found.items()
    )
    return LoadedSweep(source=source, record=record, entries=entries, notes=tuple(notes))


def with_results(sweep: LoadedSweep, results: Iterable[CaseResult]) -> LoadedSweep:
    """The same sweep with results in memory, which a full disk may have kept out of their files."""
    entries = {entry.name: entry for entry in sweep.entries}
    entries.update((result.name, entry_of(result)) for result in results)
    return replace(sweep, entries=tuple(entries.values()))


def entry_of(result: CaseResult) -> SweepEntry:
    """The entry of an experiment with a result."""
    return _entry_of_case(result.name, result.case, end=result.end.value, result=result)


def _entry_of_case(name: str, case: SweepCase, **known: Any) -> SweepEntry:
    return SweepEntry(
        name=name,
        trainer=case.trainer,
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        gpus=case.gpus,
        parallel=case.parallel,
        case=case,
        **known,
    )


def _requested_cases(record: SweepRecord | None) -> Mapping[str, SweepCase]:
    """The cases of the recorded matrix by name; none if it cannot be read."""
    if record is None:
        return {}
    try:
        config = msgspec.convert(record.config, SweepConfig)
        return cases_of(config, config.device)
    except (msgspec.ValidationError, TypeError, ValueError):
        return {}


def _files(source: Path) -> SweepFolder:
    """The paths of the sweep's files; missing ones are paths that do not exist."""
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise UsageError(
            f"{source} {what}: expected the folder of a sweep, or its {LOGS} or {RESULTS} folder"
        )
    parent = SweepFolder(source.resolve().parent)
    if source.resolve() in (parent.logs, parent.results) and os.path.lexists(parent.record):
        return parent
    files = SweepFolder(source)
    if os.path.lexists(files.record) or files.logs.is_dir() or files.results.is_dir():
        return files
    only_logs = SweepFolder(source, logs=source)
    return only_logs if only_logs.log_names() else SweepFolder(source, results=source)


def _record(path: Path, notes: list[str]) -> SweepRecord | None:
    if not os.path.lexists(path):
        return None
    try:
        return read_record(path, SweepRecord)
    except RecordError as error:
        notes.append(f"{error}; experiments that left no file are unknown")
        return None


def _names(files: SweepFolder, record: SweepRecord | None) -> list[str]:
    """Every experiment that was requested or has a file, in the order of the matrix."""
    names = dict.fromkeys(record.cases if record is not None else ())
    for name in files.result_names() + files.log_names():
        names.setdefault(name)
    return list(names)


def _remove_other_sweeps(found: dict[str, Stored], record: SweepRecord, notes: list[str]) -> None:
    """Remove results of another sweep in the same folder, with a note."""
    others = [
        name
        for name, stored in found.items()
        if name not in record.cases
        and stored.result is not None
        and stored.result.sweep_id != record.sweep_id
    ]
    for name in others:
        del found[name]
    if others:
        notes.append(f"ignored, because these are results of another sweep: {', '.join(others)}")


def _remove_foreign_files(
    found: dict[str, Stored], record: SweepRecord | None, notes: list[str]
) -> list[str]:
    """Remove files that are not part of the sweep; the names of those that are not experiments."""
    requested = record.cases if record is not None else ()
    foreign = []
    for name, stored in list(found.items()):
        if stored.result is not None or name in requested:
            continue
        if stored.is_of_another:
            notes.append(f"ignored: {'; '.join(stored.faults)}")
            del found[name]
        elif not _NAME.fullmatch(name):
            foreign.append(name)
            del found[name]
    return foreign


def _trainer_of_prefix(found: Mapping[str, Stored]) -> Mapping[str, str]:
    """The full name of a trainer by the short form with which file names begin, as results show it."""
    return {
        parts["trainer"]: stored.result.case.trainer
        for name, stored in found.items()
        if stored.result is not None and (parts := _NAME.fullmatch(name))
    }


def _entry(
    name: str,
    stored: Stored,
    cases: Mapping[str, SweepCase],
    trainers: Mapping[str, str],
    *,
    is_running: bool,
) -> SweepEntry:
    if stored.result is not None:
        return replace(entry_of(stored.result), name=name)
    reasons = [*stored.faults]
    if is_running:
        reasons.append("still running, or the sweep ended before the experiment finished")
    missing: dict[str, Any] = {
        "end": Status.LOST.value if reasons else NOT_RUN,
        "reason": "; ".join(reasons) or "requested, but never started",
        "log_tail": stored.log_tail,
    }
    if name in cases:
        return _entry_of_case(name, cases[name], **missing)
    parts = _NAME.fullmatch(name)
    prefix = parts["trainer"] if parts else name
    return SweepEntry(
        name=name,
        trainer=trainers.get(prefix, prefix),
        batch_size=int(parts["batch_size"]) if parts else None,
        seq_len=int(parts["seq_len"]) if parts else None,
        gpus=int(parts["gpus"] or 1) if parts else 1,
        parallel=parts["parallel"] if parts else None,
        **missing,
    )
