"""The log of an experiment: what it printed, and its result as the last line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ... import plain_files
from ...errors import RecordError
from ...records import CaseResult, decode, encode, has_checksum

_TAIL_LINES = 20
_END_BYTES = 4 << 20
_LINE_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class LoggedResult:
    """The result and the last lines of a log."""

    result: CaseResult | None = None
    has_checksum: bool = False
    """Whether the result has a checksum that reveals damage."""
    fault: str | None = None
    """Why there is no result."""
    tail: tuple[str, ...] = ()
    """The last non-empty lines, without results."""


def read_log(log: Path) -> LoggedResult:
    """The last line that is a result, even if a stray child printed after it, and the lines before."""
    try:
        found = [line for line in _last_lines(log)[0] if line.strip()]
    except OSError as error:
        return LoggedResult(fault=f"{log.name} cannot be read: {error.strerror}")
    words = [line for line in found if not _looks_like_result(line)][-_TAIL_LINES:]
    tail = tuple(line.decode(errors="replace").rstrip()[:_LINE_CHARACTERS] for line in words)
    faults = []
    for line in reversed(found):
        if line.startswith(b"{"):
            try:
                result = decode(line, CaseResult, log.name)
                return LoggedResult(result=result, has_checksum=has_checksum(line), tail=tail)
            except RecordError as error:
                faults.append(str(error))
    without = f"{log.name} ends without a result" if found else f"{log.name} is empty"
    return LoggedResult(fault=faults[0] if faults else without, tail=tail)


def last_lines(log: Path) -> list[str]:
    """The last non-empty lines of a log, without the result; none if it cannot be read."""
    return list(read_log(log).tail)


def seal_log(log: Path, result: CaseResult) -> None:
    """Write the result as the last line of the log, replacing an earlier result."""
    file = plain_files.open_plain(log, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        lines, end = _last_lines(log)
        if lines and _looks_like_result(lines[-1]):
            end -= len(lines.pop())
        cut_short = bool(lines) and not lines[-1].endswith(b"\n")
        os.ftruncate(file, end)
        os.lseek(file, end, os.SEEK_SET)
        plain_files.write_all(file, (b"\n" if cut_short else b"") + encode(result) + b"\n")
    finally:
        os.close(file)


def _last_lines(log: Path) -> tuple[list[bytes], int]:
    """The last lines of a log with their line ends, and its size."""
    data, size = plain_files.read_end(log, _END_BYTES)
    return data.splitlines(keepends=True), size


def _looks_like_result(line: bytes) -> bool:
    """True also for a truncated or damaged result."""
    if line.startswith(b'{"version":'):
        return True
    try:
        return line.startswith(b"{") and decode(line, CaseResult, "") is not None
    except RecordError:  # other JSON
        return False
