"""The local log: a JSON array that loads at any time and grows by appending.

    [                                       the file after a flush
    {"global_step": 1, "training/loss": 2.5},
    {"global_step": 2, "training/loss": 2.4}
    ]

A write that fails for a temporary reason (a full disk) is retried with the next rows.

Rows are encoded together when they are flushed, and written in one `pwrite` that starts on the closing
bracket and ends with a new one. A process killed inside that write leaves a partial last row, which the next
start removes; every row flushed before is complete.

An existing log is continued. A run that restarts from step n replays steps, so a step can occur in the file
more than once: its last row is the valid one. Of a damaged log the complete rows are copied to a new file,
and the damaged file is renamed. Before each write the file's size shows whether another program has truncated
or overwritten it since the last one; the rest is then repaired like a log that existed at the start. If the
training program has closed the descriptor, the log is opened again.

JSON has no NaN. A number that is not finite is written as null, with its value in `non_finite`:
`"training/loss": null, "non_finite": {"training/loss": "nan"}`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from .. import plain_files
from ..errors import one_line, warn_once
from .base import WriteLater, known
from .log_scan import find_end, pieces_of, rows_of_damaged

_OPENING = b"["
_CLOSING = b"\n]\n"
_NULL = b"null"
"""The encoding of None and of numbers that are not finite."""
_writing: set[Path] = set()  # a file lock does not exclude its own process

_TEMPORARY_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)
)
"""Disk and network errors that may be temporary."""
_MAX_WAITING = 100_000
"""Rows that may wait for the disk."""


class JsonArrayFile:
    """A tracker that writes rows to one JSON file; disk errors are raised unchanged."""

    def __init__(self, path: str | os.PathLike[str], *, notice: Callable[[str], None] = warn_once) -> None:
        self.path = self._resolved = Path(path)
        self._notice = notice
        encoder = msgspec.json.Encoder()
        self._encode, self._encode_lines = encoder.encode, encoder.encode_lines
        self._file: plain_files.Descriptor | None = None
        self._end = self._rows = 0
        self._is_begun = False
        """Whether the position for new rows is known; a full disk may delay that."""
        self.begins_at: int | None = None
        """Where the rows of this run begin; None before the file is open."""
        self.rows_removed = 0
        """Rows in the file that another program has truncated or overwritten."""
        self._waiting: list[Mapping[str, Any]] = []

    def start(self, run: Mapping[str, Any]) -> None:
        """Open the file, and repair or rename an existing one. Only rows are written, not `run`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._resolved = self.path.resolve()  # resolved now: its folder may be moved later
        if self._resolved in _writing:
            raise OSError(errno.EBUSY, "another monitor of this process is writing this log", str(self.path))
        self._file = self._open()
        _writing.add(self._resolved)
        try:
            self._begin()
        except OSError as error:
            if error.errno not in _TEMPORARY_ERRORS:
                raise  # else the next flush tries again

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take ownership of a row; the next flush writes it."""
        self._waiting.append(metrics if "global_step" in metrics else {"global_step": step, **metrics})

    def _encoded(self, rows: list[Mapping[str, Any]]) -> tuple[bytes, int, Exception | None]:
        """The encoded rows, their number, and the error of the last row that cannot be encoded."""
        try:
            lines = self._encode_lines(rows)
        except Exception:  # a number of another library, a lone surrogate: encode row by row
            lines = b""
        if lines and _NULL not in lines:
            return lines[:-1].replace(b"\n", b",\n"), len(rows), None  # encoded rows contain no newline
        encoded, problem = [], None
        for row in rows:
            try:
                encoded.append(self._encoded_with_care(known(row)))
            except Exception as error:
                problem = error
        return b",\n".join(encoded), len(encoded), problem

    def _encoded_with_care(self, row: dict[str, Any]) -> bytes:
        """Also for values that are not finite, and for numbers of other libraries."""
        odd = {
            key: str(value) for key, value in row.items() if isinstance(value, float) and not isfinite(value)
        }
        if odd:
            row |= {**dict.fromkeys(odd), "non_finite": odd}
        try:
            return self._encode(row)
        except (TypeError, ValueError):
            return json.dumps(row, default=_plain, allow_nan=False).encode()

    def flush(self) -> None:
        """Write the waiting rows; the file is valid before and after, also if the disk is full.

        After a temporary error the rows are kept, and `WriteLater` is raised.
        """
        try:
            self._write_waiting()
        except OSError as error:
            if error.errno not in _TEMPORARY_ERRORS or len(self._waiting) > _MAX_WAITING:
                raise
            raise WriteLater(one_line(error)) from error

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        rows, number, problem = self._encoded(self._waiting)
        if rows:
            self._repair_if_changed()
            self._write((b",\n" if self._rows else b"\n") + rows)
            self._rows += number
        self._waiting = []
        if problem is not None:
            raise problem

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the remaining rows and close."""
        try:
            self._write_waiting()
            if self._file is not None:
                self._repair_if_changed()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
                _writing.discard(self._resolved)

    @property
    def _fd(self) -> int:
        assert self._file is not None, "call start first"
        return self._file.number

    def _write(self, text: bytes) -> None:
        """Write `text` and a new closing bracket over the old one; on an error restore the file."""
        whole = text + _CLOSING
        written = 0
        try:
            # One call, unless the disk is nearly full: the second call then raises the error.
            while written < len(whole):
                written += os.pwrite(self._fd, whole[written:], self._end + written)
        except OSError:
            os.pwrite(self._fd, _CLOSING, self._end)
            os.ftruncate(self._fd, self._end + len(_CLOSING))
            raise
        self._end += len(text)

    def _open(self) -> plain_files.Descriptor:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "the log must be a regular file", str(self.path))
        file = plain_files.Descriptor.high(fd)  # before it is locked: to close one descriptor ends the lock
        try:
            import fcntl

            # A record lock: unlike flock's, it is not inherited by forked workers that outlive a killed run.
            fcntl.lockf(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise OSError(errno.EBUSY, "another process is writing this log", str(self.path)) from None
        except OSError:
            pass  # a file system without locks: two writers cannot be detected
        return file

    def _repair_if_changed(self) -> None:
        """Check whether another program has changed the file, and repair it if so."""
        assert self._file is not None, "call start first"
        if not self._file.is_ours:
            self._file = self._open()
        status = os.fstat(self._fd)
        if not status.st_nlink:
            raise OSError(errno.ENOENT, "the log was deleted while it was written", str(self.path))
        if not self._is_begun:
            self._begin()
            return
        if status.st_size == self._end + len(_CLOSING):
            return
        rows = self._rows
        self._continue()
        self.begins_at = min(self.begins_at or 0, self._end)
        self.rows_removed += max(rows - self._rows, 0)
        self._notice(
            f"{self.path.name} was truncated or overwritten by another program during this run: "
            f"{self._rows:,} of {rows:,} rows are left in it, and new rows follow them"
        )

    def _begin(self) -> None:
        self._continue()
        self._is_begun = True
        self.begins_at = self._end

    def _continue(self) -> None:
        """Find the position of the next row; a damaged file is repaired or renamed."""
        found = find_end(pieces_of(self._fd))
        if found is None:
            self._keep_complete_rows()
            return
        self._end, self._rows = (found.at, found.rows) if found.rows else (len(_OPENING), 0)
        head = b"" if found.rows else _OPENING
        rest = head + _CLOSING
        if os.pread(self._fd, len(rest) + 1, self._end - len(head)) != rest:
            os.pwrite(self._fd, rest, self._end - len(head))
            os.ftruncate(self._fd, self._end + len(_CLOSING))

    def _keep_complete_rows(self) -> None:
        """Rename the file, and start a new one with its complete rows."""
        assert self._file is not None
        repaired = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        plain_files.remove(repaired)
        end, rows, damaged = len(_OPENING), 0, 0
        try:
            with open(repaired, "xb") as file:
                file.write(_OPENING)
                for row in rows_of_damaged(pieces_of(self._fd)):
                    if row is None:
                        damaged += 1
                        continue
                    end += file.write((b",\n" if rows else b"\n") + row)
                    rows += 1
                file.write(_CLOSING)
            aside = self._free_name()
            os.rename(self.path, aside)
            os.rename(repaired, self.path)
        except OSError:
            plain_files.remove(repaired)
            raise
        self._file.close()
        self._file = self._open()
        self._end, self._rows = end, rows
        if rows:
            self._notice(
                f"{self.path.name} was damaged: {rows:,} of its rows are kept, {damaged:,} parts could not "
                f"be read; the damaged file is now {aside.name}"
            )
        else:
            self._notice(
                f"{self.path.name} is not a log that can be continued; it was renamed to {aside.name}"
            )

    def _free_name(self) -> Path:
        aside = self.path.with_name(self.path.name + ".damaged")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = self.path.with_name(f"{self.path.name}.damaged{number}")
        return aside


def _plain(value: Any) -> float | str:
    """A number of another library as a float; anything else as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if isfinite(number) else str(number)
