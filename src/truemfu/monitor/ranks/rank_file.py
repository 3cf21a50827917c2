"""A rank's rows in the run's folder, one JSON line each: `ranks/<host>-<device>.jsonl`.

The name is that of the device, not of the rank: after a restart, in which rank numbers change, the rows of a
GPU are appended to its file. A line is written at once, so a process that is killed loses no row but the one
it has not finished.

The last line of a process also has its last message. Many programs destroy the process group, and with it the
way to rank 0, before their monitors close: rank 0 then reads the messages here, where the folder is shared.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ... import plain_files
from .rank_row import RankRow

FOLDER = "ranks"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")
_MOST_BYTES = 256 << 20
_LEAST_BYTES = 64 << 10
_END_BYTES = 256 << 10
_MOST_FILES = 256
_POLL_S = 0.1


def file_name(host: str, device: str) -> str:
    """The name of a device's file."""
    texts = (host, device.removeprefix(f"{host}:"))
    return "-".join(_NOT_IN_NAMES.sub("-", text).strip("-.")[:80] or "unknown" for text in texts) + ".jsonl"


class RankFile:
    """A tracker that appends each row as a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, run: Mapping[str, Any]) -> None:
        """Create the folder."""
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a row."""
        plain_files.append(self._path, msgspec.json.encode(metrics) + b"\n")

    def flush(self) -> None:
        """Nothing to do: a row is written at once."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing to do."""


def read_files(folder: Path) -> Iterator[tuple[list[RankRow], list[str]]]:
    """File by file, the rows of one device in the order of their time, and what could not be read.

    Of very many files only the ends are read.
    """
    paths = sorted((folder / FOLDER).glob("*.jsonl"))
    most_bytes = max(_LEAST_BYTES, _MOST_BYTES // max(len(paths), 1))
    for path in paths:
        try:
            data, size = plain_files.read_end(path, most_bytes)
        except OSError as error:
            yield [], [f"{path.name} cannot be read: {error.strerror}"]
            continue
        is_cut = size > len(data)
        rows, unread = _rows(data.splitlines()[is_cut:])
        faults = [f"{path.name}: {unread:,} lines cannot be read"] if unread else []
        if is_cut:
            faults.append(f"{path.name}: only its last {len(data) >> 10:,} KiB are read")
        yield sorted(rows, key=lambda row: row.at_s), faults


class LastMessages:
    """Rank 0, when it closes: the last messages of other ranks, from their files."""

    def __init__(self, folder: Path, *, since_s: float, take: Callable[[list[bytes]], None]) -> None:
        """Messages from before `since_s`, in Unix time, are those of earlier attempts."""
        self._folder, self._since_s, self._take = folder / FOLDER, since_s, take
        self._is_over = threading.Event()
        threading.Thread(target=self._poll, name="truemfu-rank-files", daemon=True).start()

    def close(self) -> None:
        """Stop reading; does not wait for a file system that hangs."""
        self._is_over.set()

    def _poll(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # the folder was removed
                paths = sorted(self._folder.glob("*.jsonl"))[:_MOST_FILES]
                self._take([message for path in paths for message in self._messages(path)])
            self._is_over.wait(_POLL_S)

    def _messages(self, path: Path) -> Iterator[bytes]:
        try:
            data, _ = plain_files.read_end(path, _END_BYTES)
        except OSError:
            return
        for line in data.splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found = _LAST_LINE.decode(line)
                if found.message and found.at_s >= self._since_s:
                    yield bytes(found.message)


class _LastLine(msgspec.Struct):
    at_s: float
    message: msgspec.Raw = msgspec.Raw()


_LAST_LINE = msgspec.json.Decoder(_LastLine)


def _rows(lines: Iterable[bytes]) -> tuple[list[RankRow], int]:
    rows, unread = [], 0
    for line in lines:
        try:
            rows.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            unread += bool(line.strip())
    return rows, unread


_DECODER = msgspec.json.Decoder(RankRow)
