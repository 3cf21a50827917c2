"""What became of an experiment, from its two copies on disk: results/<name>.json and the end of its log.

    the file, with a checksum that matches ──────────────────► it
    the file, without one (of an earlier version) ───────────► it, unless a log with a checksum differs
    no file, or a damaged one, or the result of another ─────► the log's

Whatever is wrong with either copy is said in one line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecordError
from ..records import CaseResult, decode, has_checksum, read_file
from .case_log import LogEnd, read_log_end


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The result of an experiment, or why there is none."""

    result: CaseResult | None = None
    faults: tuple[str, ...] = ()
    """What is wrong with its files, a line each."""
    log_tail: tuple[str, ...] = ()
    """The last lines of the log, where there is no result."""
    is_of_another: bool = False
    """Whether the only file is one that holds the result of another experiment."""


def stored_result(name: str, file: Path, log: Path) -> Stored:
    """The result of this experiment in its file, or else in its log."""
    faults: list[str] = []
    found, is_sure, other = _in_file(name, file, faults)
    if found is not None and is_sure:
        return Stored(result=found)
    if not os.path.lexists(log):
        return Stored(result=found, faults=tuple(faults), is_of_another=other is not None)
    end = read_log_end(log)
    logged = end.result
    if logged is not None and logged.name != name:
        faults.append(f"{log.name} ends with the result of {logged.name}")
        logged = None
    if found is not None and logged is not None and found != logged:
        faults.append(_difference(file, log, end))
        found = logged if end.has_checksum else found
    if found is None and logged is not None and faults:
        faults.append(f"{faults.pop()}; read from {log.name} instead")
    if found is None and logged is None and end.fault is not None:
        faults.append(end.fault)
    return Stored(result=found or logged, faults=tuple(faults), log_tail=() if found or logged else end.tail)


def _in_file(name: str, file: Path, faults: list[str]) -> tuple[CaseResult | None, bool, str | None]:
    """The result, whether a checksum vouches for it, and whose it is where it is another's."""
    if not os.path.lexists(file):
        return None, False, None
    try:
        data = read_file(file)
        found = decode(data, CaseResult, str(file))
    except RecordError as error:
        faults.append(str(error))
        return None, False, None
    if found.name != name:
        faults.append(f"{file} holds the result of {found.name}")
        return None, False, found.name
    return found, has_checksum(data), None


def _difference(file: Path, log: Path, end: LogEnd) -> str:
    shown = f"the result in {log.name} is" if end.has_checksum else "the first is"
    return f"{file} and the last line of {log.name} differ, so one of them is damaged: {shown} taken"
