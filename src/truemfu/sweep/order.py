"""What a supervisor sends to a worker, and the progress file that the worker writes.

The order is one line of JSON on its standard input. A worker is started before it has a case, so that its
imports are done when the case arrives. The order is all it receives; it answers with its progress, with a
`records.CaseResult` and its exit code.

Progress is one line of JSON as each phase begins. The supervisor shows the last line live. If a worker dies
without a result, the last line records the phase it reached and its memory at that point.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import plain_files
from ..records import CaseResult, Environment, Memory, Phase, Status, SweepCase

Purpose = Literal["measure", "probe"]


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One case to run, and where to write its result. Paths are absolute."""

    case: SweepCase
    name: str
    sweep_id: str
    content_hash: str
    folder: str
    """The sweep's folder: the result goes to results/<name>.json, traces and events to runs/<name>/."""
    progress_path: str
    """The worker appends one line here as each phase begins."""
    log_path: str
    """The worker's output goes here from the moment it has read the order."""
    memory_limit_bytes: int | None = None
    """Host memory (private data) the worker may use; None: no limit."""
    purpose: Purpose = "measure"
    """measure: the whole experiment. probe: two steps, to check that they fit in memory; no result file."""
    git_commit: str | None = None

    def result(self, end: Status, phase: Phase, **fields: Any) -> CaseResult:
        """A result of this order, with further fields of `CaseResult`."""
        return CaseResult(
            name=self.name,
            sweep_id=self.sweep_id,
            content_hash=self.content_hash,
            case=self.case,
            end=end,
            phase=phase,
            **fields,
        )


def encode_order(order: WorkerOrder) -> bytes:
    """The order as the line a worker reads."""
    return msgspec.json.encode(order) + b"\n"


def decode_order(line: bytes) -> WorkerOrder:
    """The order in a line."""
    return msgspec.json.decode(line, type=WorkerOrder)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The begin of a phase."""

    phase: Phase
    at_s: float
    """On the wall clock."""
    memory: Memory = Memory()
    """The peaks so far."""
    environment: Environment | None = None
    """Where it runs, once that is known."""
    rank: int | None = None
    """In the last line: the rank that ended without a result, and the worker with it."""


def append_progress(path: Path, progress: Progress) -> None:
    """Add a line at once; an OSError if the folder was removed or the disk is full."""
    plain_files.append(path, msgspec.json.encode(progress) + b"\n")


def read_progress(path: Path) -> list[Progress]:
    """The lines so far, in order; none without a file. An incomplete last line is left out."""
    try:
        data = plain_files.read(path)
    except OSError:
        return []
    lines = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(msgspec.MsgspecError):  # a line cut short by a full disk
            lines.append(msgspec.json.decode(line, type=Progress))
    return lines


def last_phase(progress: list[Progress]) -> Phase:
    """The phase it has reached."""
    return progress[-1].phase if progress else Phase.START


def peaks(progress: list[Progress], process_bytes: int | None = None) -> Memory:
    """Peak memory: of the GPU from the progress, of the host the larger of progress and `process_bytes`."""

    def most(values: list[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return Memory(
        allocated_bytes=most([entry.memory.allocated_bytes for entry in progress]),
        reserved_bytes=most([entry.memory.reserved_bytes for entry in progress]),
        process_bytes=most([*(entry.memory.process_bytes for entry in progress), process_bytes]),
    )


def environment_of(progress: list[Progress]) -> Environment | None:
    """Where an experiment ran that left no result; None if it ended before that was known."""
    return next((entry.environment for entry in reversed(progress) if entry.environment), None)
