"""The order that a supervisor sends to a worker: one line of JSON on its standard input.

A worker is started before it has a case, so that its imports are done when the case arrives. This
value is all it receives; it answers with files (`progress.py`, `records.CaseResult`) and its exit code.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..errors import RecordError
from ..records import CaseResult, Phase, Status, SweepCase

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
    """The order in a line, or a RecordError."""
    try:
        return msgspec.json.decode(line, type=WorkerOrder)
    except msgspec.MsgspecError as error:
        raise RecordError(f"standard input is not a valid WorkerOrder: {error}") from error
