"""The folder of a sweep: every file name in it, and who may write there.

    sweep.json                  which experiments belong here, with which settings
    logs/<name>.log             what the worker printed; the last line is its result
    results/<name>.json         its result
    runs/<name>/                TensorBoard events and the profiler's trace
    running/lock                held by the one supervisor at work here
    running/<name>.json         an experiment in progress: its process and token
    running/<name>.progress     the phases it has reached
    running/slot-<n>.log        what a worker printed before it was given an experiment

Whose folder it is: one that has no sweep.json may hold anything but these names. One that has a sweep.json is
continued as long as experiments differ in trainer, batch and sequence alone, which their names show: the same
matrix resumes, a larger one or a single experiment is added to it. Other settings (model, dtype, optimizer,
steps, …) make another sweep, which needs another folder, or `rerun="all"`, which starts this one over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..errors import RecordError, UsageError
from ..records import SweepCase, SweepRecord, read_record, write_record
from .cases import cases_of
from .config import SweepConfig, as_mapping

# What may differ between two calls for one folder: the axes that names show, and what bounds an experiment
# without being part of it.
_AXES = ("trainers", "batch_sizes", "seq_lengths")
_FREE = (*_AXES, "timeout_s", "memory_limit_gib", "prune", "find_fit", "gpus")


class RunningCase(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment in progress, for whoever finds it after its supervisor has died."""

    pid: int
    token: str
    began_at_s: float
    content_hash: str
    case: SweepCase


class SweepFolder:
    """The folder of one sweep; the only place that knows what its files are called."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.record = self.root / "sweep.json"
        self.logs = self.root / "logs"
        self.results = self.root / "results"
        self.runs = self.root / "runs"
        self.running = self.root / "running"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def result(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def run(self, name: str) -> Path:
        return self.runs / name

    def marker(self, name: str) -> Path:
        return self.running / f"{name}.json"

    def progress(self, name: str) -> Path:
        return self.running / f"{name}.progress"

    def slot_log(self, slot: str) -> Path:
        return self.running / f"slot-{slot}.log"

    def markers(self) -> dict[str, Path]:
        """The experiments whose supervisor has not said that they ended, by name."""
        return {path.name.removesuffix(".json"): path for path in sorted(self.running.glob("*.json"))}


class FolderLock:
    """Held while a supervisor is at work in a folder; gone with its process, however that ends."""

    def __init__(self, folder: SweepFolder) -> None:
        self._file = os.open(folder.running / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            raise UsageError(
                f"another sweep is at work in {folder.root} (process {owner or 'unknown'}): wait for it, or "
                "give another folder"
            ) from None
        except OSError as error:
            # Some network file systems know no locks; the sweep then relies on its user.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        os.truncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._file)


def claim(
    root: Path, config: SweepConfig, *, start_over: bool
) -> tuple[SweepFolder, SweepRecord, FolderLock]:
    """Make the folder this sweep's, or continue the one that is there; a UsageError where neither can be.

    `config` has no `auto` left in it. `start_over` replaces a sweep of other settings, and its files.
    """
    folder = SweepFolder(root)
    if folder.root.exists() and not folder.root.is_dir():
        raise UsageError(f"{folder.root} is a file, not a folder: give another folder")
    if not folder.record.exists():
        _refuse_strangers(folder)
    try:
        for path in (folder.root, folder.logs, folder.results, folder.runs, folder.running):
            path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    except OSError as error:
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}; give another folder") from error
    try:
        record = _record_for(folder, config, start_over)
        write_record(folder.record, record)
    except OSError as error:
        lock.release()
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}; give another folder") from error
    except BaseException:
        lock.release()
        raise
    return folder, record, lock


def _refuse_strangers(folder: SweepFolder) -> None:
    for path in (folder.logs, folder.results, folder.runs, folder.running):
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; give another folder") from error
        if taken and not _only_a_lock(path):
            raise UsageError(
                f"{folder.root} holds {path.name}/, which is not of a sweep (there is no sweep.json): give "
                "another folder"
            )


def _only_a_lock(path: Path) -> bool:
    """What a sweep leaves that was refused after it had taken the lock."""
    return path.is_dir() and [entry.name for entry in path.iterdir()] == ["lock"]


def _record_for(folder: SweepFolder, config: SweepConfig, start_over: bool) -> SweepRecord:
    fresh = SweepRecord(
        sweep_id=uuid.uuid4().hex,
        created_at_s=time.time(),
        truemfu_version=__version__,
        cases=list(cases_of(config, config.device)),
        config=as_mapping(config),
    )
    if not folder.record.exists():
        return fresh
    try:
        there = read_record(folder.record, SweepRecord)
        joined = _joined(folder, there, config)
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


def _joined(folder: SweepFolder, there: SweepRecord, config: SweepConfig) -> SweepConfig:
    """The matrix that holds both sweeps, or a UsageError that says why there is none."""
    new = as_mapping(config)
    for key, value in new.items():
        if key not in _FREE and there.config.get(key) != value:
            raise _another_sweep(folder, key, there.config.get(key), value)
    axes = {key: _union(there.config.get(key) or [], new[key]) for key in _AXES}
    joined = msgspec.convert({**new, **axes}, SweepConfig)
    together = cases_of(joined, config.device)
    for name, case in _cases_there(there, config).items() | cases_of(config, config.device).items():
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
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _union(first: list[Any], second: list[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


def _clear(folder: SweepFolder, names: list[str]) -> None:
    """Remove what the sweep before has written, its own names alone."""
    with contextlib.suppress(RecordError):  # an unreadable record names nothing: that is left where it is
        names = _union(names, read_record(folder.record, SweepRecord).cases)
    for name in names:
        for path in (folder.log(name), folder.result(name)):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder.run(name), ignore_errors=True)
