"""The folder of a sweep: every file name in it, and who may write there.

    sweep.json                  which experiments belong here, with which settings
    logs/<name>.log             what the worker printed; the last line is its result
    results/<name>.json         its result
    runs/<name>/                TensorBoard events and the profiler's trace, <name>.pt.trace.json.gz
    running/lock                held by the one supervisor at work here
    running/<name>.json         an experiment in progress: its process and token
    running/<name>.progress     the phases it has reached
    running/slot-<n>.log        what a worker printed before it was given an experiment
    report.html                 the page about all of them

Whose folder it is: one that has no sweep.json may hold anything but these names. One that has a sweep.json is
continued as long as experiments differ in trainer, batch and sequence alone, which their names show: the same
matrix resumes, a larger one or a single experiment is added to it. Other settings (model, dtype, optimizer,
steps, …) make another sweep, which needs another folder, or `rerun="all"`, which starts this one over.

Nothing is written or removed outside: names come from our own records, which take none that leads elsewhere,
and no symbolic link inside the folder is followed.
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

# What may differ between two calls for one folder: the axes that names show, and what bounds an experiment
# without being part of it.
_AXES = ("trainers", "batch_sizes", "seq_lengths")
_FREE = (*_AXES, "timeout_s", "memory_limit_gib", "prune", "find_fit", "gpus")


RECORD_FILE = "sweep.json"
PAGE_FILE = "report.html"
LOGS, RESULTS, RUNS, RUNNING = "logs", "results", "runs", "running"
_LOCK_FILE = "lock"


class RunningCase(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment in progress, for whoever finds it after its supervisor has died."""

    pid: int
    token: str
    began_at_s: float
    content_hash: str
    case: SweepCase


class SweepFolder:
    """The paths of one sweep's files. No other module builds one from its parts.

    `logs` and `results` are given by a reader who has a copy of that folder alone, under any name.
    """

    def __init__(self, root: Path, *, logs: Path | None = None, results: Path | None = None) -> None:
        self.root = root
        self.record = root / RECORD_FILE
        self.page = root / PAGE_FILE
        self.logs = root / LOGS if logs is None else logs
        self.results = root / RESULTS if results is None else results
        self.runs = root / RUNS
        self.running = root / RUNNING

    @property
    def parts(self) -> tuple[Path, ...]:
        """The folders inside."""
        return self.logs, self.results, self.runs, self.running

    def make(self) -> list[str]:
        """Make what is missing of the folders, in the place of whatever an experiment put there.

        The names of those that had to be made; an OSError where one cannot be.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        return [part.name for part in self.parts if plain_files.make_folder(part)]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def result(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def run(self, name: str) -> Path:
        return self.runs / name

    def trace(self, name: str) -> Path:
        return self.run(name) / f"{name}.pt.trace.json.gz"

    def marker(self, name: str) -> Path:
        return self.running / f"{name}.json"

    def progress(self, name: str) -> Path:
        return self.running / f"{name}.progress"

    def slot_log(self, slot: str) -> Path:
        return self.running / f"slot-{slot}.log"

    def log_names(self) -> list[str]:
        """The experiments that have a log."""
        return plain_files.names_in(self.logs, ".log")

    def result_names(self) -> list[str]:
        """The experiments that have a result file."""
        return plain_files.names_in(self.results, ".json")

    def markers(self) -> dict[str, Path]:
        """The experiments whose supervisor has not said that they ended, by name."""
        return {name: self.marker(name) for name in plain_files.names_in(self.running, ".json")}


class FolderLock:
    """Held while a supervisor is at work in a folder; gone with its process, however that ends."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._path = folder.running / _LOCK_FILE
        self._file = self._take()

    def renew(self) -> None:
        """Take it again where its file has been removed or replaced meanwhile."""
        try:
            there, own = os.lstat(self._path), os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return
            if not stat.S_ISREG(there.st_mode):
                plain_files.remove(self._path)
        except FileNotFoundError:
            pass  # removed: it is made again
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
                f"another sweep is at work in {self._folder.root} (process {owner or 'unknown'}): wait for "
                "it, or give another folder"
            ) from None
        except OSError as error:
            # Some network file systems know no locks; the sweep then relies on its user.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(file)
                raise
        with contextlib.suppress(OSError):  # a full disk: the lock holds, its owner is not named
            os.truncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        return file


def mend(folder: SweepFolder, record: SweepRecord, lock: FolderLock) -> list[str]:
    """Put back what an experiment has removed or replaced of the folder itself; what that was, in words.

    A UsageError where another sweep has taken the folder meanwhile.
    """
    mended = []
    try:
        mended = [f"{name}/" for name in folder.make()]
        lock.renew()
        if not _holds(folder.record, record):
            if plain_files.is_folder(folder.record):
                plain_files.remove(folder.record)
            write_record(folder.record, record)
            mended.append(folder.record.name)
    except OSError as error:
        return [f"the sweep's folder cannot be put in order: {error.strerror}"]
    return [f"{', '.join(mended)} had been removed or changed: written again"] if mended else []


def _holds(path: Path, record: SweepRecord) -> bool:
    try:
        return read_record(path, SweepRecord) == record
    except RecordError:
        return False


def claim(
    root: Path, config: SweepConfig, cases: Mapping[str, SweepCase], *, start_over: bool
) -> tuple[SweepFolder, SweepRecord, FolderLock]:
    """Make the folder this sweep's, or continue the one that is there; a UsageError where neither can be.

    `config` has no `auto` left in it, and `cases` are its cases. `start_over` replaces a sweep of other
    settings, and its files.
    """
    folder = SweepFolder(root.absolute())
    if folder.root.exists() and not folder.root.is_dir():
        raise UsageError(f"{folder.root} is a file, not a folder: give another folder")
    for part in folder.parts:
        if os.path.lexists(part) and not plain_files.is_folder(part):
            raise UsageError(
                f"{part} is {plain_files.what_is_there(part) or 'a file'}: a sweep writes to folders of its "
                "own alone; remove it, or give another folder"
            )
    if not os.path.lexists(folder.record):
        _refuse_strangers(folder)
    try:
        folder.make()
        lock = FolderLock(folder)
    except OSError as error:
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}; give another folder") from error
    try:
        record = _record_for(folder, config, cases, start_over)
        write_record(folder.record, record)
    except OSError as error:
        lock.release()
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}; give another folder") from error
    except BaseException:
        lock.release()
        raise
    return folder, record, lock


def _refuse_strangers(folder: SweepFolder) -> None:
    for path in folder.parts:
        try:
            taken = path.exists() and any(path.iterdir())
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; give another folder") from error
        if taken and not _only_a_lock(path):
            raise UsageError(
                f"{folder.root} holds {path.name}/, which is not of a sweep (there is no {RECORD_FILE}): "
                "give another folder"
            )


def _only_a_lock(path: Path) -> bool:
    """What a sweep leaves that was refused after it had taken the lock."""
    return [entry.name for entry in path.iterdir()] == [_LOCK_FILE]


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
        there = read_record(folder.record, SweepRecord)
        try:
            joined = _joined(folder, there, config, cases)
        except (TypeError, msgspec.ValidationError) as error:
            raise RecordError(f"{folder.record} holds no matrix of a sweep: {one_line(error)}") from error
    except (RecordError, UsageError):
        if not start_over:
            raise
        _clear(folder, fresh.cases)
        return fresh
    known = set(there.cases)
    return msgspec.structs.replace(
        there,
        cases=there.cases + [name for name in fresh.cases if name not in known],
        config=as_mapping(joined),
    )


def _joined(
    folder: SweepFolder, there: SweepRecord, config: SweepConfig, cases: Mapping[str, SweepCase]
) -> SweepConfig:
    """The matrix that holds both sweeps, or a UsageError that says why there is none."""
    new = as_mapping(config)
    for key, value in new.items():
        if key not in _FREE and there.config.get(key) != value:
            raise _another_sweep(folder, key, there.config.get(key), value)
    axes = {key: _union(there.config.get(key) or [], new[key]) for key in _AXES}
    joined = msgspec.convert({**new, **axes}, SweepConfig)
    together = cases_of(joined, config.device)
    for name, case in _cases_there(there, config).items() | cases.items():
        if together.get(name) != case:
            differing = together[name].trainer if name in together else "none"
            raise _another_sweep(folder, f"trainer of {name}", differing, case.trainer)
    return joined


def _cases_there(there: SweepRecord, config: SweepConfig) -> Mapping[str, SweepCase]:
    axes = {key: there.config.get(key) or [] for key in _AXES}
    return cases_of(msgspec.convert({**as_mapping(config), **axes}, SweepConfig), config.device)


def _another_sweep(folder: SweepFolder, what: str, there: Any, here: Any) -> UsageError:
    return UsageError(
        f"{folder.root} belongs to another sweep: {what} is {_brief(there)} there and {_brief(here)} here; "
        "give another folder, or --rerun all to start it over"
    )


def _brief(value: Any) -> str:
    return shortened(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _union(first: list[Any], second: list[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


def _clear(folder: SweepFolder, names: list[str]) -> None:
    """Remove what the sweep before has written, its own names alone."""
    with contextlib.suppress(RecordError):  # an unreadable record names nothing: that is left where it is
        names = _union(names, read_record(folder.record, SweepRecord).cases)
    for name in names:
        for path in (folder.log(name), folder.result(name), folder.run(name)):
            plain_files.remove(path)
