"""Closed forms saved in the run's folder, so that a restart of the same run counts nothing.

`closed_forms.json` holds exports of `FlopModel`, each under a key that identifies what was counted:

    model_identity(model) ─┐
    autocast, convention … ┴─► form_key ─► load: the export, or None ─► FlopModel.from_export

Every entry has a checksum over its key and its data. A file or entry that is missing, damaged or in another
format is ignored: the form is then fitted again, and the file replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import one_line
from ...trackers.lane import Lane

FORMS_FILE = "closed_forms.json"
MAX_FORMS = 32
MAX_FILE_BYTES = 64_000_000
_LONGEST_READ_S = 0.5
"""A folder that takes longer is treated as not responding: the model is counted."""
_FORMAT = "truemfu closed forms"
_VERSION = 1


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    checksum: str
    data: msgspec.Raw


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest entry comes last."""

    format: str
    version: int
    entries: list[_Entry]


def form_key(identity: str, *, autocast: str, attention: str, **more: str | int | float | bool | None) -> str:
    """The key of a closed form: its model, autocast, convention and anything else it depends on.

    `more` may be in any order; the kind of batch or whether there is a backward pass, for instance.
    """
    parts = {"identity": identity, "autocast": autocast, "attention": attention, "more": more}
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class KeptForms:
    """The closed forms of one run folder. No method raises; a lock serialises saves of one process.

    `read_ahead` and `save` access the disk and are for a thread that may wait for it; `load` only uses what
    was read ahead.
    """

    def __init__(self, folder: Path, notice: Callable[[str], None]) -> None:
        self._folder, self._path = folder, folder / FORMS_FILE
        self._notice = notice
        self._lock = threading.Lock()
        self._has_failed = False
        self._entries: list[_Entry] = []
        self.is_read = threading.Event()

    def read_ahead(self) -> None:
        """Read what earlier runs have saved."""
        try:
            self._entries = _read(self._path)
        except Exception:  # the forms can be counted again
            self._entries = []
        self.is_read.set()

    def load(self, key: str) -> dict[str, Any] | None:
        """What was saved under this key when the file was read ahead; None if absent or damaged."""
        try:
            found = [entry for entry in self._entries if entry.key == key]
            if not found or found[-1].checksum != _checksum(key, bytes(found[-1].data)):
                return None
            data = json.loads(bytes(found[-1].data))
        except Exception:  # the form can be counted again
            return None
        return data if isinstance(data, dict) else None

    def save(self, key: str, data: dict[str, Any]) -> None:
        """Save this under this key, replacing an earlier entry; the first failure becomes a warning."""
        try:
            with self._lock:
                self._save(key, data)
        except Exception as error:  # the run continues without it
            if not self._has_failed:
                self._has_failed = True
                self._notice(f"{FORMS_FILE} was not written, a restart will count again: {one_line(error)}")

    def _save(self, key: str, data: dict[str, Any]) -> None:
        if not _is_plain(data):
            raise ValueError("the data is not plain JSON")
        written = json.dumps(data, separators=(",", ":")).encode()
        if len(written) > MAX_FILE_BYTES // 2:
            raise ValueError(f"{len(written):,} bytes exceed the limit")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            others = [entry for entry in _read(self._path) if entry.key != key]
        except (OSError, ValueError, msgspec.MsgspecError):
            others = []
        entry = _Entry(key=key, checksum=_checksum(key, written), data=msgspec.Raw(written))
        _write(self._path, [*others, entry])


class KeptInBackground:
    """Closed forms of a run folder, read and saved on a lane: a folder that hangs blocks no other thread.

    Only the first `load` may wait for the reading, half a second at most: a count takes longer.
    """

    def __init__(self, folder: Path, notice: Callable[[str], None]) -> None:
        self._forms = KeptForms(folder, notice)
        self.lane = Lane(_OnLane(self._forms), FORMS_FILE, notice=notice)
        self._until_s = 0.0

    def start(self) -> None:
        """Begin to read what earlier runs have saved."""
        self._until_s = time.monotonic() + _LONGEST_READ_S
        self.lane.start({})

    def load(self, key: str) -> dict[str, Any] | None:
        """What was saved under this key; None where there is nothing, or the folder does not answer."""
        self._forms.is_read.wait(max(self._until_s - time.monotonic(), 0.0))
        return self._forms.load(key)

    def save(self, key: str, data: dict[str, Any]) -> None:
        """Save this on the lane; for one calling thread."""
        self.lane.put(0, {key: data})
        self.lane.wake()


class _OnLane:
    """The forms as a lane's tracker."""

    def __init__(self, forms: KeptForms) -> None:
        self._forms = forms

    def start(self, run: Mapping[str, Any]) -> None:
        self._forms.read_ahead()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, data in metrics.items():
            self._forms.save(key, data)

    def flush(self) -> None:
        """Everything is saved at once."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """There is nothing to close."""


def _is_plain(data: Any) -> bool:
    """Whether JSON preserves the values, with tuples as lists."""
    if isinstance(data, dict):
        return all(type(key) is str and _is_plain(value) for key, value in data.items())
    if isinstance(data, (list, tuple)):
        return all(map(_is_plain, data))
    return type(data) in (str, int, bool, type(None)) or (type(data) is float and math.isfinite(data))


def _checksum(key: str, data: bytes) -> str:
    return hashlib.sha256(f"{_VERSION} {key} ".encode() + data).hexdigest()


def _read(path: Path) -> list[_Entry]:
    """The entries of a file; an error if it has another format. Waits for nothing but the disk."""
    _check_regular(os.stat(path), path)
    # The file could have been replaced by a FIFO since: this way opening does not wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        _check_regular(os.fstat(file.fileno()), path)
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is too large")
    found = msgspec.json.decode(content, type=_File)
    if found.format != _FORMAT or found.version != _VERSION:
        raise ValueError(f"{path.name} has another format")
    return found.entries


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is too large")


def _write(path: Path, entries: list[_Entry]) -> None:
    """Write the newest entries to a temporary file and rename it: readers never see a partial file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    entries = entries[-MAX_FORMS:]
    content = _encode(entries)
    while len(content) > MAX_FILE_BYTES:
        entries = entries[1:]
        content = _encode(entries)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _encode(entries: list[_Entry]) -> bytes:
    return msgspec.json.encode(_File(format=_FORMAT, version=_VERSION, entries=entries))
