"""The two copies of a result on disk: its file, and the last line of the experiment's log.

`save` writes both. Read again, the file counts; if it is missing, damaged or another experiment's, the log
does. Each fault of either copy is reported in one line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ... import plain_files
from ...errors import RecordError
from ...records import CaseResult, Status, decode, encode, read_record, write_record
from ..order import WorkerOrder, environment_of, last_phase, peaks, read_progress
from ..paths import SweepFolder

_TAIL_LINES = 20
_END_BYTES = 4 << 20
_LINE_CHARACTERS = 500


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
    found = _clear_paths(folder, file, log)
    if found:
        result = msgspec.structs.replace(result, notes=[*result.notes, *found])
    problems = []
    try:
        write_record(file, result, durable=True)
    except OSError as error:
        problems.append(f"{file.relative_to(folder.root)} could not be written: {error.strerror}")
    try:
        _seal_log(log, result)
    except OSError as error:
        problems.append(f"{log.relative_to(folder.root)} could not be written: {error.strerror}")
    return msgspec.structs.replace(result, notes=result.notes + problems) if problems else result


def is_stored(folder: SweepFolder, result: CaseResult) -> bool:
    """Whether this very result is in its file."""
    return _in_file(folder.result(result.name)).result == result


def _clear_paths(folder: SweepFolder, *files: Path) -> list[str]:
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


def _seal_log(log: Path, result: CaseResult) -> None:
    """Write the result as the last line of the log, replacing an earlier result."""
    file = plain_files.open_plain(log, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        data, end = plain_files.read_end(log, _END_BYTES)
        lines = data.splitlines(keepends=True)
        if lines and _looks_like_result(lines[-1]):
            end -= len(lines.pop())
        cut_short = bool(lines) and not lines[-1].endswith(b"\n")
        os.ftruncate(file, end)
        os.lseek(file, end, os.SEEK_SET)
        plain_files.write_all(file, (b"\n" if cut_short else b"") + encode(result) + b"\n")
    finally:
        os.close(file)


def without_answer(
    folder: SweepFolder, order: WorkerOrder, status: Status, message: str, **fields: Any
) -> CaseResult:
    """The result of an experiment that left none: from its progress and its log."""
    progress = read_progress(folder.progress(order.name))
    return order.result(
        status,
        last_phase(progress),
        message=message,
        memory=peaks(progress),
        environment=environment_of(progress),
        **{"log_tail": last_lines(folder.log(order.name)), **fields},
    )


def stored_result(name: str, file: Path, log: Path) -> Stored:
    """The result of this experiment in its file, or else in its log."""
    written = _own(_in_file(file), name, str(file))
    if written.result is not None:
        return written
    logged = _own(read_log(log), name, log.name) if os.path.lexists(log) else Stored()
    if logged.result is not None:
        faults = tuple(f"{fault}; read from {log.name} instead" for fault in written.faults)
        return Stored(result=logged.result, faults=faults)
    both = (written, logged)
    return Stored(
        faults=written.faults + logged.faults,
        log_tail=logged.log_tail,
        is_of_another=any(copy.is_of_another for copy in both)
        and all(copy.is_of_another for copy in both if copy.faults),
    )


def read_log(log: Path) -> Stored:
    """The last line that is a result, even if a stray child printed after it, and the lines before."""
    try:
        end = plain_files.read_end(log, _END_BYTES)[0]
    except OSError as error:
        return Stored(faults=(f"{log.name} cannot be read: {error.strerror}",))
    found, tail = [line for line in end.splitlines() if line.strip()], tuple(tail_of(end))
    faults = [f"{log.name} ends without a result" if found else f"{log.name} is empty"]
    for line in reversed(found):
        if line.startswith(b"{"):
            try:
                return Stored(result=decode(line, CaseResult, log.name), log_tail=tail)
            except RecordError as error:
                faults.append(str(error))
    return Stored(faults=tuple(faults[1:2] or faults), log_tail=tail)


def last_lines(log: Path) -> list[str]:
    """The last non-empty lines of a log, without the result; none if it cannot be read."""
    return list(read_log(log).log_tail)


def tail_of(output: bytes) -> list[str]:
    """The last non-empty lines of what a worker printed, without a result."""
    lines = [line for line in output.splitlines() if line.strip() and not _looks_like_result(line)]
    return [line.decode(errors="replace").rstrip()[:_LINE_CHARACTERS] for line in lines[-_TAIL_LINES:]]


def _in_file(file: Path) -> Stored:
    if not os.path.lexists(file):
        return Stored()
    try:
        return Stored(result=read_record(file, CaseResult))
    except RecordError as error:
        return Stored(faults=(str(error),))


def _own(found: Stored, name: str, where: str) -> Stored:
    """What was found, unless it is another experiment's."""
    if found.result is None or found.result.name == name:
        return found
    fault = f"{where} contains the result of {found.result.name}"
    return replace(found, result=None, faults=(fault,), is_of_another=True)


def _looks_like_result(line: bytes) -> bool:
    """True also for a truncated or damaged result."""
    if line.startswith(b'{"version":'):
        return True
    try:
        return line.startswith(b"{") and decode(line, CaseResult, "") is not None
    except RecordError:  # other JSON
        return False
