"""The log of an experiment: what it printed, and its result as the last line."""

from __future__ import annotations

from pathlib import Path

from ..errors import RecordError
from ..records import CaseResult, decode, encode

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 20
_LINE_CHARACTERS = 500


def seal_log(log: Path, result: CaseResult) -> None:
    """Make the result the last line of the log, in the place of one that is there already."""
    lines, end = _tail(log)
    if lines and _as_result(lines[-1]) is not None:
        end -= len(lines.pop())
    cut_short = bool(lines) and not lines[-1].endswith(b"\n")
    with log.open("r+b" if log.exists() else "wb") as file:
        file.truncate(end)
        file.seek(end)
        file.write((b"\n" if cut_short else b"") + encode(result) + b"\n")


def result_in_log(log: Path) -> CaseResult | None:
    """The result in the log's last line; None where it has none."""
    lines, _ = _tail(log)
    return _as_result(lines[-1]) if lines else None


def last_lines(log: Path) -> list[str]:
    """The last lines of a log that say something, without the result."""
    lines = [line for line in _tail(log)[0] if line.strip() and _as_result(line) is None]
    return [line.decode(errors="replace").rstrip()[:_LINE_CHARACTERS] for line in lines[-_TAIL_LINES:]]


def _tail(log: Path) -> tuple[list[bytes], int]:
    """The last lines of a log with their ends, and how long it is; nothing where there is no log."""
    if not log.exists():
        return [], 0
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _TAIL_BYTES, 0))
        return file.read().splitlines(keepends=True), size


def _as_result(line: bytes) -> CaseResult | None:
    if not line.startswith(b"{"):
        return None
    try:
        return decode(line, CaseResult, "the log's last line")
    except RecordError:
        # Something else that looks like JSON.
        return None
