"""The two copies of a result on disk: results/<name>.json and the end of its log. `save` writes both.

Read again, one of them counts:

    the file, with a checksum that matches ──────────────────► it
    the file, without one (of an earlier version) ───────────► it, unless a log with a checksum differs
    no file, or a damaged one, or the result of another ─────► the log's

Each fault of either copy is reported in one line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ... import plain_files
from ...errors import RecordError
from ...records import CaseResult, decode, has_checksum, read_file, write_record
from ..paths import SweepFolder
from .case_log import LoggedResult, read_log, seal_log


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The result of an experiment, or why there is none."""

    result: CaseResult | None = None
    faults: tuple[str, ...] = ()
    """The faults of its files, one line each."""
    log_tail: tuple[str, ...] = ()
    """The last lines of the log, where there is no result."""
    is_of_another: bool = False
    """Whether its files only contain the result of another experiment."""


def save(folder: SweepFolder, result: CaseResult) -> CaseResult:
    """Write a result to its file and the end of its log; replaced files and errors are in its notes."""
    file, log = folder.result(result.name), folder.log(result.name)
    found = clear_paths(folder, file, log)
    if found:
        result = msgspec.structs.replace(result, notes=[*result.notes, *found])
    problems = []
    try:
        write_record(file, result, durable=True)
    except OSError as error:
        problems.append(f"{file.relative_to(folder.root)} could not be written: {error.strerror}")
    try:
        seal_log(log, result)
    except OSError as error:
        problems.append(f"{log.relative_to(folder.root)} could not be written: {error.strerror}")
    return msgspec.structs.replace(result, notes=result.notes + problems) if problems else result


def clear_paths(folder: SweepFolder, *files: Path) -> list[str]:
    """Create missing folders, and remove anything that is not a file at these paths; a note for each."""
    found = []
    try:
        if made := folder.make():
            found.append(f"{', '.join(f'{name}/' for name in made)} was removed and has been created again")
        for path in files:
            if (instead := plain_files.what_is_there(path)) is not None:
                plain_files.remove(path)
                found.append(f"{path.parent.name}/{path.name} became {instead} and has been replaced")
    except OSError:
        pass  # writing the files reports the error
    return found


def stored_result(name: str, file: Path, log: Path) -> Stored:
    """The result of this experiment in its file, or else in its log."""
    faults: list[str] = []
    of_others: list[str] = []
    written, is_sure = _in_file(file, faults)
    written = _own(written, name, str(file), of_others)
    if written is not None and is_sure:
        return Stored(result=written)
    end = read_log(log) if os.path.lexists(log) else LoggedResult()
    logged = _own(end.result, name, log.name, of_others)
    if written is not None and logged is not None and written != logged:
        taken = f"the result in {log.name}" if end.has_checksum else "the first"
        faults.append(f"{file} and the last line of {log.name} differ: one is damaged, using {taken}")
        written = logged if end.has_checksum else written
    if written is None and logged is not None:
        instead = f"read from {log.name} instead"
        return Stored(result=logged, faults=tuple(f"{fault}; {instead}" for fault in faults + of_others))
    if written is None and end.fault is not None:
        faults.append(end.fault)
    return Stored(
        result=written,
        faults=(*faults, *of_others),
        log_tail=() if written is not None else end.tail,
        is_of_another=written is None and bool(of_others) and not faults,
    )


def _in_file(file: Path, faults: list[str]) -> tuple[CaseResult | None, bool]:
    """The result, and whether a checksum confirms it."""
    if not os.path.lexists(file):
        return None, False
    try:
        data = read_file(file)
        return decode(data, CaseResult, str(file)), has_checksum(data)
    except RecordError as error:
        faults.append(str(error))
        return None, False


def _own(found: CaseResult | None, name: str, where: str, of_others: list[str]) -> CaseResult | None:
    """The result, unless it is another experiment's."""
    if found is None or found.name == name:
        return found
    of_others.append(f"{where} contains the result of {found.name}")
    return None
