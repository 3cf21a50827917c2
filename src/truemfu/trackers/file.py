"""The local log: a JSON array that loads at any time and grows by appending.

    [                                       the file after a flush
    {"global_step": 1, "training/loss": 2.5},
    {"global_step": 2, "training/loss": 2.4}
    ]

A write that fails for a reason that may pass (a full disk) is tried again with the next rows.

Rows are encoded together when they are flushed, and written in one `pwrite` that starts on the closing
bracket and ends with a new one. A process killed inside that write leaves a torn last row, which the next
start cuts off; every row flushed before is whole.

A log that is there already is continued. A run that restarts from step n replays steps, so a step can stand
in the file more than once: the last row of a step is the one that counts. Of a damaged log the whole rows are
kept, and the file as it was is put aside. Before each write the size of the file says whether another program
has cut or overwritten it since the last; what is left is then mended like a log that was there at the start.

JSON has no NaN. A number that is not finite is written as null, and the row says which it was:
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
from .log_scan import find_end, rows_of_damaged

_OPENING = b"["
_CLOSING = b"\n]\n"
_NULL = b"null"
"""What becomes of None, and of a number that is not finite."""
_writing: set[Path] = set()  # a lock on a file does not keep the process that has it from taking it again

_MAY_PASS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT))
"""Errors of a disk or a network that the next write may not meet."""
_MOST_KEPT = 100_000
"""Rows that wait for the disk."""


class JsonArrayFile:
    """A tracker that writes rows to one JSON file; errors of the disk are raised as they are."""

    def __init__(self, path: str | os.PathLike[str], *, notice: Callable[[str], None] = warn_once) -> None:
        self.path = self._resolved = Path(path)
        self._notice = notice
        encoder = msgspec.json.Encoder()
        self._encode, self._encode_lines = encoder.encode, encoder.encode_lines
        self._fd: int | None = None
        self._end = self._rows = 0
        self._is_begun = False
        """Whether it is known where rows go; a full disk may put that off."""
        self.rows_removed = 0
        """Rows that were in the file and that another program has cut off or overwritten."""
        self._waiting: list[Mapping[str, Any]] = []

    def start(self, run: Mapping[str, Any]) -> None:
        """Open the file, mend or move aside what is there. The run itself is not written: rows alone are."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._resolved = self.path.resolve()  # as it is now: its folder may be moved
        if self._resolved in _writing:
            raise OSError(errno.EBUSY, "another monitor of this process writes this log", str(self.path))
        self._fd = self._open()
        _writing.add(self._resolved)
        try:
            self._begin()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise  # else the next flush begins

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a row, which is ours from now on; it is written by the next flush."""
        self._waiting.append(metrics if "global_step" in metrics else {"global_step": step, **metrics})

    def _encoded(self, rows: list[Mapping[str, Any]]) -> tuple[bytes, int, Exception | None]:
        """Rows as they stand in the file, without what cannot be encoded, and why the last of that cannot."""
        try:
            lines = self._encode_lines(rows)
        except Exception:  # a number of another library, half of a surrogate pair: each row for itself
            lines = b""
        if lines and _NULL not in lines:
            return lines[:-1].replace(b"\n", b",\n"), len(rows), None  # a line of JSON has no other
        encoded, problem = [], None
        for row in rows:
            try:
                encoded.append(self._encoded_with_care(known(row)))
            except Exception as error:
                problem = error
        return b",\n".join(encoded), len(encoded), problem

    def _encoded_with_care(self, row: dict[str, Any]) -> bytes:
        """With the names of what is not finite, and of numbers of any library."""
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
        """Write the rows that wait; the file loads before and after, and also where the disk is full.

        Where that may pass, the rows are kept, and `WriteLater` is raised.
        """
        try:
            self._write_waiting()
        except OSError as error:
            if error.errno not in _MAY_PASS or len(self._waiting) > _MOST_KEPT:
                raise
            raise WriteLater(one_line(error)) from error

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        rows, number, problem = self._encoded(self._waiting)
        if rows:
            self._mend_if_changed()
            self._write((b",\n" if self._rows else b"\n") + rows)
            self._rows += number
        self._waiting = []
        if problem is not None:
            raise problem

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the rest and close."""
        try:
            self._write_waiting()
            if self._fd is not None:
                self._mend_if_changed()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                _writing.discard(self._resolved)

    def _write(self, text: bytes) -> None:
        """Put `text` where the closing bracket is and a new one behind it, or leave the file as it was."""
        assert self._fd is not None
        whole = text + _CLOSING
        written = 0
        try:
            # One call, unless the disk is nearly full: the second then says what is wrong.
            while written < len(whole):
                written += os.pwrite(self._fd, whole[written:], self._end + written)
        except OSError:
            os.pwrite(self._fd, _CLOSING, self._end)
            os.ftruncate(self._fd, self._end + len(_CLOSING))
            raise
        self._end += len(text)

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "the log must be a plain file", str(self.path))
        try:
            import fcntl

            # A record lock: unlike flock's, it is not inherited by forked workers that outlive a killed run.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(fd)
            raise OSError(errno.EBUSY, "another process is writing this log", str(self.path)) from None
        except OSError:
            pass  # a file system without locks: nothing tells two writers apart, as before
        return fd

    def _mend_if_changed(self) -> None:
        """Look whether the file is as it was left, and mend it where it is not."""
        assert self._fd is not None, "start comes first"
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
        self.rows_removed += max(rows - self._rows, 0)
        self._notice(
            f"{self.path.name} was cut or overwritten by another program while this run wrote it: "
            f"{self._rows:,} of {rows:,} rows are left in it, and further ones follow them"
        )

    def _begin(self) -> None:
        self._continue()
        self._is_begun = True

    def _continue(self) -> None:
        """Find where the next row goes; what cannot be continued is mended, or put aside."""
        assert self._fd is not None
        found = find_end(self._fd)
        if found is None:
            self._keep_whole_rows()
            return
        self._end, self._rows = (found.at, found.rows) if found.rows else (len(_OPENING), 0)
        head = b"" if found.rows else _OPENING
        rest = head + _CLOSING
        if os.pread(self._fd, len(rest) + 1, self._end - len(head)) != rest:
            os.pwrite(self._fd, rest, self._end - len(head))
            os.ftruncate(self._fd, self._end + len(_CLOSING))

    def _keep_whole_rows(self) -> None:
        """Put the file aside, and begin one with the rows of it that are whole."""
        assert self._fd is not None
        mended = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        plain_files.remove(mended)
        end, rows, damaged = len(_OPENING), 0, 0
        try:
            with open(mended, "xb") as file:
                file.write(_OPENING)
                for row in rows_of_damaged(self._fd):
                    if row is None:
                        damaged += 1
                        continue
                    end += file.write((b",\n" if rows else b"\n") + row)
                    rows += 1
                file.write(_CLOSING)
            aside = self._free_name()
            os.rename(self.path, aside)
            os.rename(mended, self.path)
        except OSError:
            plain_files.remove(mended)
            raise
        os.close(self._fd)
        self._fd = self._open()
        self._end, self._rows = end, rows
        if rows:
            self._notice(
                f"{self.path.name} was damaged: {rows:,} rows of it are kept, {damaged:,} parts could not be "
                f"read; as it was, it was kept as {aside.name}"
            )
        else:
            self._notice(
                f"{self.path.name} is no log of rows that can be continued; it was kept as {aside.name}"
            )

    def _free_name(self) -> Path:
        aside = self.path.with_name(self.path.name + ".damaged")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = self.path.with_name(f"{self.path.name}.damaged{number}")
        return aside


def _plain(value: Any) -> float | str:
    """A number of another library as ours; anything else in words."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if isfinite(number) else str(number)
