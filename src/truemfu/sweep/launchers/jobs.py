"""Experiments that were given to a cluster: one folder for each batch of them, shared with the nodes.

    running/jobs-<id>/
      batch.json     which experiments, where they were submitted, and the engine's name for them
      <n>.order      what node n is to run: exists as long as it is wanted
      <n>.claim      created once, by the node that runs it or by the supervisor that withdraws it
      <n>.engine     what became of its job, where the engine reports that in a file (Ray)
      <n>.out        what its node printed before and beside the experiment

The result of an experiment is where it always is, results/<name>.json: its node writes it there.

A claim is created with O_EXCL, which file servers decide: of all that try, one succeeds. So an experiment
never runs twice, however often an engine starts its job. Whoever claims looks for the order afterwards; the
supervisor removes the order before the claim, so a job that comes late finds one of the two.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from ... import plain_files
from ...errors import RecordError
from ...records import Status, read_record
from ..order import WorkerOrder
from .settings import ClusterSettings, Request

_BATCH_FILE = "batch.json"
_SUFFIXES = (".order", ".claim", ".engine", ".out")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs an experiment."""

    host: str = ""
    engine_job: str | None = None
    """The engine's own name of the job."""
    at_s: float = 0.0
    withdrawn: bool = False
    """The supervisor has withdrawn it: no node may run it."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Experiments that were submitted together; the node with number n runs `names[n]`."""

    id: str
    launcher: str
    names: list[str]
    request: Request
    settings: ClusterSettings
    working_folder: str
    created_at_s: float
    time_limit_s: float
    """Of each experiment, from its order on; the engine allows more."""
    command: list[str]
    """How a worker is started."""
    engine_job: str | None = None
    """The engine's name of the batch; None until it is known to be submitted."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports of a job."""

    over: bool
    waits: bool = False
    """It waits for its start, or, if it was claimed, to be started again: its only run is over."""
    reason: str
    """In the engine's own words."""
    status: Status = Status.LOST
    """Of an experiment that leaves no result; not lost where the engine ended it for its memory or time."""


_SUFFIX_OF: dict[type, str] = {
    WorkerOrder: ".order",
    Claim: ".claim",
    JobState: ".engine",
}
_Kind = TypeVar("_Kind", WorkerOrder, Claim, JobState)


class JobsFolder:
    """The files of one batch. Only this class knows their names."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def output(self, number: int | str) -> Path:
        return self.root / f"{number}.out"

    def read_batch(self) -> Batch | None:
        """None before it is described, which it is before it is submitted; a RecordError if it is damaged."""
        path = self.root / _BATCH_FILE
        return read_record(path, Batch) if os.path.lexists(path) else None

    def write_batch(self, batch: Batch) -> None:
        plain_files.replace(self.root / _BATCH_FILE, msgspec.json.encode(batch), durable=True)

    def write(self, number: int, value: WorkerOrder | JobState) -> None:
        """Write the order of an experiment, or what became of its job."""
        file = self._file(number, _SUFFIX_OF[type(value)])
        plain_files.replace(file, msgspec.json.encode(value), durable=True)

    def read(self, number: int, kind: type[_Kind]) -> _Kind | None:
        """What was written of this kind; None if it is not there (an order: no longer wanted) or damaged."""
        try:
            return read_record(self._file(number, _SUFFIX_OF[kind]), kind)
        except RecordError:
            return None

    def try_claim(self, number: int, *, engine_job: str | None = None, withdraw: bool = False) -> bool:
        """Whether this process is the first to claim it; an OSError if the folder cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            file = plain_files.open_plain(self._file(number, ".claim"), flags)
        except FileExistsError:
            return False
        claim = Claim(
            host=socket.gethostname(),
            engine_job=engine_job,
            at_s=time.time(),
            withdrawn=withdraw,
        )
        try:
            plain_files.write_all(file, msgspec.json.encode(claim))
            os.fsync(file)
        finally:
            os.close(file)
        return True

    def drop_claim(self, number: int) -> None:
        plain_files.remove(self._file(number, ".claim"))

    def read_claim(self, number: int) -> Claim:
        """An empty claim while it is being written."""
        return self.read(number, Claim) or Claim()

    def listing(self) -> dict[str, set[int]]:
        """The numbers for which each kind of file exists, from one look at the folder."""
        found: dict[str, set[int]] = {suffix: set() for suffix in _SUFFIXES}
        with contextlib.suppress(OSError):  # removed: nothing is there
            for entry in os.listdir(self.root):
                stem, suffix = os.path.splitext(entry)
                if suffix in found and stem.isdecimal():
                    found[suffix].add(int(stem))
        return found

    def forget(self, number: int, present: Collection[str] = _SUFFIXES) -> None:
        """Remove the files of an experiment that is over, the order first and the claim last."""
        for suffix in sorted(present, key=lambda suffix: (suffix != ".order", suffix == ".claim")):
            with contextlib.suppress(OSError):  # removed with the folder
                self._file(number, suffix).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the batch: what identifies it first, so that a job that comes late finds nothing."""
        plain_files.remove(self.root / _BATCH_FILE)
        plain_files.remove(self.root)

    def _file(self, number: int, suffix: str) -> Path:
        return self.root / f"{number}{suffix}"
