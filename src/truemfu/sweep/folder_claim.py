"""Whose folder it is: one sweep at a time, which may continue the sweep in it, start it over, or is refused.

A folder without sweep.json may contain anything except the names in `paths.py`. One with a sweep.json is
continued as long as experiments differ in trainer, batch and sequence alone, which their names show: the same
matrix resumes, a larger one or a single experiment is added to it. Other settings (model, dtype, optimizer,
steps, …) make another sweep, which needs another folder, or `rerun="all"`, which starts this one over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__, plain_files
from ..errors import RecordError, UsageError, one_line
from ..records import SweepCase, SweepRecord, read_record, write_record
from ..text import shortened
from .cases import cases_of
from .config import SweepConfig, as_mapping
from .paths import LOCK_FILE, RECORD_FILE, SweepFolder

# What may differ between two calls for one folder: the axes that names show, and limits that are not part of
# an experiment.
_AXES = ("trainers", "batch_sizes", "seq_lengths", "gpus_per_experiment")
_FREE = (
    *_AXES,
    "timeout_s",
    "memory_limit_gib",
    "prune",
    "find_fit",
    "gpus",
    "parallel",
    "launcher",
    "cluster",
)


class FolderLock:
    """Held while a supervisor uses a folder; released with its process, however that ends."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._path = folder.lock
        self._file = self._take()

    def renew(self) -> None:
        """Take it again if its file has been removed or replaced."""
        try:
            current, own = os.lstat(self._path), os.fstat(self._file)
            if (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino):
                return
            if not stat.S_ISREG(current.st_mode):
                plain_files.remove(self._path)
        except FileNotFoundError:
            pass  # removed: it is created again
        before, self._file = self._file, self._take()
        os.close(before)

    def release(self) -> None:
        os.close(self._file)

    def _take(self) -> int:
        file = plain_files.open_plain(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 32).decode(errors="replace").strip()
            os.close(file)
            raise UsageError(
                f"another sweep is running in {self._folder.root} (process {owner or 'unknown'}): wait for "
                "it, or give another folder"
            ) from None
        except OSError as error:
            # Some network file systems have no locks; the user must then avoid concurrent sweeps.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(file)
                raise
        with contextlib.suppress(OSError):  # a full disk: the lock is held, but its owner is not recorded
            os.truncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        return file


def repair(folder: SweepFolder, record: SweepRecord, lock: FolderLock) -> list[str]:
    """Restore what an experiment removed or replaced of the folder itself; a message for what was restored.

    A UsageError if another sweep has taken the folder meanwhile.
    """
    repaired = []
    try:
        repaired = [f"{name}/" for name in folder.make()]
        lock.renew()
        if not _holds(folder.record, record):
            if plain_files.is_folder(folder.record):
                plain_files.remove(folder.record)
            write_record(folder.record, record)
            repaired.append(folder.record.name)
    except OSError as error:
        return [f"the sweep's folder cannot be restored: {error.strerror}"]
    return [f"{', '.join(repaired)} was removed or changed: restored"] if repaired else []


def _holds(path: Path, record: SweepRecord) -> bool:
    try:
        return read_record(path, SweepRecord) == record
    except RecordError:
        return False


def claim(
    root: Path, config: SweepConfig, cases: Mapping[str, SweepCase], *, start_over: bool
) -> tuple[SweepFolder, SweepRecord, FolderLock]:
    """Create the sweep's folder, or continue the sweep in it; a UsageError if neither is possible.

    Every `auto` in `config` is resolved, and `cases` are its cases. `start_over` replaces a sweep with other
    settings, and its files.
    """
    folder = SweepFolder(root.absolute())
    if folder.root.exists() and not folder.root.is_dir():
        raise UsageError(f"{folder.root} is a file, not a folder: give another folder")
    for part in folder.parts:
        if os.path.lexists(part) and not plain_files.is_folder(part):
            raise UsageError(
                f"{part} is {plain_files.what_is_there(part) or 'a file'}: a sweep only writes to its own "
                "folders; remove it, or give another folder"
            )
    if not os.path.lexists(folder.record):
        _refuse_foreign_files(folder)
    lock = None
    try:
        folder.make()
        lock = FolderLock(folder)
        record = _record_for(folder, config, cases, start_over)
        write_record(folder.record, record)
    except BaseException as error:
        if lock is not None:
            lock.release()
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}; give another folder") from error
    return folder, record, lock


def _refuse_foreign_files(folder: SweepFolder) -> None:
    for path in folder.parts:
        try:
            names = os.listdir(path) if path.exists() else []
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; give another folder") from error
        if names not in ([], [LOCK_FILE]):  # a sweep that was refused may have left its lock
            raise UsageError(
                f"{folder.root} contains {path.name}/, which does not belong to a sweep (no {RECORD_FILE}): "
                "give another folder"
            )


def _record_for(
    folder: SweepFolder, config: SweepConfig, cases: Mapping[str, SweepCase], start_over: bool
) -> SweepRecord:
    fresh = SweepRecord(
        sweep_id=uuid.uuid4().hex,
        created_at_s=time.time(),
        truemfu_version=__version__,
        cases=list(cases),
        config=as_mapping(config),
    )
    if not os.path.lexists(folder.record):
        return fresh
    try:
        recorded = read_record(folder.record, SweepRecord)
        try:
            joined = _joined(folder, recorded, config, cases)
        except (TypeError, msgspec.ValidationError) as error:
            raise RecordError(
                f"{folder.record} does not contain the matrix of a sweep: {one_line(error)}"
            ) from error
    except (RecordError, UsageError):
        if not start_over:
            raise
        _clear(folder, fresh.cases)
        return fresh
    known = set(recorded.cases)
    return msgspec.structs.replace(
        recorded,
        cases=recorded.cases + [name for name in fresh.cases if name not in known],
        config=as_mapping(joined),
    )


def _joined(
    folder: SweepFolder, recorded: SweepRecord, config: SweepConfig, cases: Mapping[str, SweepCase]
) -> SweepConfig:
    """The matrix that covers both sweeps, or a UsageError with the reason why there is none."""
    new = as_mapping(config)
    for key, value in new.items():
        if key not in _FREE and recorded.config.get(key) != value:
            raise _another_sweep(folder, key, recorded.config.get(key), value)
    here, there = config.parallel, recorded.config.get("parallel")
    if here and there and here != there:
        raise _another_sweep(folder, "parallel", there, here)
    recorded_axes = {key: recorded.config.get(key) or [] for key in _AXES}
    axes = {key: _union(recorded_axes[key], new[key]) for key in _AXES}
    covers_both = {**new, "parallel": here or there}
    joined = msgspec.convert({**covers_both, **axes}, SweepConfig)
    msgspec.convert({**covers_both, **recorded_axes}, SweepConfig)  # an error if they are not axes
    together = cases_of(joined, config.device)
    for name, case in cases.items():
        if together[name] != case:  # two trainers of one name
            raise _another_sweep(folder, f"trainer of {name}", together[name].trainer, case.trainer)
    return joined


def _another_sweep(folder: SweepFolder, what: str, recorded: Any, here: Any) -> UsageError:
    return UsageError(
        f"{folder.root} belongs to another sweep: {what} is {_brief(recorded)} there and {_brief(here)} "
        "here; give another folder, or --rerun all to start that sweep over"
    )


def _brief(value: Any) -> str:
    return shortened(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _union(first: list[Any], second: list[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


def _clear(folder: SweepFolder, names: list[str]) -> None:
    """Remove the files of the previous sweep, and only those."""
    with contextlib.suppress(RecordError):  # an unreadable record names no files: they stay
        names = _union(names, read_record(folder.record, SweepRecord).cases)
    for name in names:
        for path in (folder.log(name), folder.result(name), folder.run(name)):
            plain_files.remove(path)
