"""The rows of a run's log in columns: a million of them take 8 bytes for each value that any row has.

    training_log.json ─► blocks of whole rows ─► columns ─► LogRows: `rows.column("mfu")`, or row by row

A damaged block costs the rows that cannot be read, and no others.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...plain_files import open_plain
from ...run_summary.phases import PHASE_NAMES
from ...trackers.log_scan import rows_of_damaged

PAUSES = {
    "evaluation": "evaluation_s",
    "checkpoint": "checkpoint_s",
    "generation": "generation_s",
    "other": "other_pause_s",
}
"""What may run without belonging to a step, and the value of a row with its seconds."""
PHASES = {phase: f"phase_{phase}_s" for phase in PHASE_NAMES}
"""The phases of a step, and the value of a row with the seconds of each."""
_BLOCK_BYTES = 1 << 20
_UNKNOWN = math.nan


class LogRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The values of a log row that the report shows; all others are ignored."""

    global_step: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    loss: float | None = msgspec.field(name="training/loss", default=None)
    step_time_s: float | None = msgspec.field(name="perf/step_time", default=None)
    mfu: float | None = msgspec.field(name="perf/mfu", default=None)
    mfu_per_gpu: float | None = msgspec.field(name="perf/mfu_per_gpu", default=None)
    """Of this rank alone, in a job of several."""
    mfu_estimate: float | None = msgspec.field(name="perf/mfu_estimate", default=None)
    """From the model's structure, where the FLOPs were not counted."""
    mfu_training: float | None = msgspec.field(name="perf/mfu_training", default=None)
    mfu_whole_step: float | None = msgspec.field(name="perf/mfu_whole_step", default=None)
    hfu: float | None = msgspec.field(name="perf/hfu", default=None)
    tflops_per_gpu: float | None = msgspec.field(name="perf/tflops_per_gpu", default=None)
    tokens_per_second: float | None = msgspec.field(name="perf/tokens_per_second", default=None)
    samples_per_second: float | None = msgspec.field(name="perf/samples_per_second", default=None)
    padding_efficiency: float | None = msgspec.field(name="perf/padding_efficiency", default=None)
    data_wait_s: float | None = msgspec.field(name="perf/data_wait", default=None)
    between_steps_s: float | None = msgspec.field(name="perf/between_steps", default=None)
    evaluation_s: float | None = msgspec.field(name="perf/evaluation_time", default=None)
    checkpoint_s: float | None = msgspec.field(name="perf/checkpoint_time", default=None)
    generation_s: float | None = msgspec.field(name="perf/generation_time", default=None)
    other_pause_s: float | None = msgspec.field(name="perf/other_pause_time", default=None)
    phase_data_wait_s: float | None = msgspec.field(name="perf/phase/data_wait", default=None)
    phase_input_s: float | None = msgspec.field(name="perf/phase/input", default=None)
    phase_forward_s: float | None = msgspec.field(name="perf/phase/forward", default=None)
    phase_no_grad_s: float | None = msgspec.field(name="perf/phase/no_grad", default=None)
    phase_backward_s: float | None = msgspec.field(name="perf/phase/backward", default=None)
    phase_clipping_s: float | None = msgspec.field(name="perf/phase/clipping", default=None)
    phase_optimizer_s: float | None = msgspec.field(name="perf/phase/optimizer", default=None)
    phase_other_s: float | None = msgspec.field(name="perf/phase/other", default=None)
    phases_unknown: str | None = msgspec.field(name="perf/phases_unknown", default=None)
    """Why the row has no phases."""
    memory_peak_bytes: float | None = msgspec.field(name="perf/memory_peak_bytes", default=None)
    straggler_rank: float | None = msgspec.field(name="perf/straggler_rank", default=None)
    """The rank that holds up the others most; -1: none does."""
    straggler_excess_s: float | None = msgspec.field(name="perf/straggler_excess_s", default=None)
    forwards_between_steps: int = msgspec.field(name="perf/forwards_between_steps", default=0)
    method: str | None = msgspec.field(name="perf/method", default=None)
    mfu_unknown: str | None = msgspec.field(name="perf/mfu_unknown", default=None)
    """Why the row has no MFU."""
    hfu_method: str | None = msgspec.field(name="perf/hfu_method", default=None)
    """The source of the executed work, if that is not the count."""
    is_warmup: bool = msgspec.field(name="perf/warmup", default=False)
    is_observed: bool = msgspec.field(name="perf/observed", default=False)
    """Whether its operators were observed, so that its time is not a measurement; such a row is warm-up."""
    non_finite: dict[str, str] | None = None
    """Metrics that were not finite, with "nan" or "inf": their own values are then None."""


_DEFAULTS = {one.name: one.default for one in msgspec.structs.fields(LogRow)}
_NUMBERS = frozenset(one.name for one in msgspec.structs.fields(LogRow) if one.type == float | None)


class LogRows:
    """Rows by their step, each step once."""

    def __init__(self, rows: Sequence[LogRow] = ()) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float] | list[Any]] = {}
        """Of the fields that any row has a value of."""
        self.add(rows)
        self.sort()

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> LogRow:
        at = range(len(self))[index]
        values: dict[str, Any] = {name: column[at] for name, column in self._columns.items()}
        known = {name: value for name, value in values.items() if value == value}  # NaN is unknown
        return LogRow(global_step=self.steps[at], **known)

    def column(self, name: str) -> Sequence[Any]:
        """The values of a field of `LogRow` in all rows; of a number NaN where a row has none."""
        return self._columns.get(name) or _without_values(name, len(self))

    def has(self, name: str) -> bool:
        """Whether any row has this value."""
        return name in self._columns

    def known(self, name: str) -> dict[int, Any]:
        """The values of a field that few rows have, by the row's index."""
        return {at: value for at, value in enumerate(self._columns.get(name, ())) if value}

    def add(self, rows: Sequence[LogRow]) -> None:
        """Append rows; `sort` must follow the last ones."""
        if not rows:
            return
        before = len(self)
        of_fields = zip(*map(msgspec.structs.astuple, rows), strict=True)
        columns = dict(zip(LogRow.__struct_fields__, of_fields, strict=True))
        self.steps.extend(columns.pop("global_step"))
        for name, values in columns.items():
            if name not in self._columns and values.count(_DEFAULTS[name]) == len(values):
                continue
            column = self._columns.setdefault(name, _without_values(name, before))
            if isinstance(column, array):
                numbers = [_UNKNOWN if value is None else value for value in values]
                column.frombytes(struct.pack(f"{len(numbers)}d", *numbers))  # extend takes far longer
            else:
                column += [sys.intern(value) if isinstance(value, str) else value for value in values]

    def part(self, begin: int, end: int) -> LogRows:
        """The rows from one index to another."""
        found = LogRows()
        found.steps = self.steps[begin:end]
        found._columns = {name: column[begin:end] for name, column in self._columns.items()}
        return found

    def sort(self) -> int:
        """Order the rows by step, the last one of each; the number of rows that this removed."""
        if all(map(lt, self.steps, islice(self.steps, 1, None))):
            return 0
        last = {step: at for at, step in enumerate(self.steps)}
        order = [last[step] for step in sorted(last)]
        removed = len(self) - len(order)
        self.steps = array("q", [self.steps[at] for at in order])
        for name, column in self._columns.items():
            ordered = [column[at] for at in order]
            self._columns[name] = array("d", ordered) if name in _NUMBERS else ordered
        return removed


def _without_values(name: str, rows: int) -> array[float] | list[Any]:
    """A column in which no row has a value."""
    return array("d", [_UNKNOWN]) * rows if name in _NUMBERS else [_DEFAULTS[name]] * rows


@dataclass(kw_only=True)
class ReadLog:
    """A log as it could be read."""

    rows: LogRows = field(default_factory=LogRows)
    is_damaged: bool = False
    is_cut_off: bool = False
    """It has no end: the run is in progress, or was killed."""
    unread: int = 0
    """Rows that could not be read, and parts of the file that are none."""
    repeated: int = 0
    """Rows of a step that was logged again."""
    starts: list[LogRows] = field(default_factory=list)
    """The rows of each start of the run, if it was asked for; a step may be in several."""

    @property
    def is_whole(self) -> bool:
        return not self.is_damaged and not self.is_cut_off

    @property
    def read(self) -> int:
        return len(self.rows) + self.repeated


def read_log(path: Path, starts_at: Sequence[int] = ()) -> ReadLog:
    """Read a log block by block; an OSError if that is not possible.

    `starts_at` are the positions of the first rows of a run's starts, in their order.
    """
    log, block, read = ReadLog(), b"", 0
    first_rows: list[int] = []
    for number, block in enumerate(_blocks(path, starts_at)):
        while len(first_rows) < len(starts_at) and starts_at[len(first_rows)] <= read:
            first_rows.append(len(log.rows))
        read += len(block)
        rows, unread = _rows_of(block, is_first=number == 0)
        log.rows.add(rows)
        if unread is not None:
            log.is_damaged, log.unread = True, log.unread + unread
    log.is_cut_off = not block.rstrip(b"\0 \t\r\n").endswith(b"]")
    ends = [*first_rows[1:], len(log.rows)]
    log.starts = [log.rows.part(begin, end) for begin, end in zip(first_rows, ends, strict=False)]
    log.starts += [LogRows() for _ in starts_at[len(first_rows) :]]
    log.repeated = log.rows.sort()
    return log


def _blocks(path: Path, cuts: Sequence[int] = ()) -> Iterator[bytes]:
    """The file in pieces that begin at a row, also at the first row behind each of these positions."""
    rest, read, waiting = b"", 0, deque(cuts)
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        while data := file.read(_BLOCK_BYTES):
            rest += data
            while waiting and (cut := rest.find(b"\n{", max(waiting[0] - read, 0))) >= 0:
                waiting.popleft()
                if cut > 0:
                    yield rest[:cut]
                    rest, read = rest[cut:], read + cut
            cut = rest.rfind(b"\n{")
            if cut > 0:
                yield rest[:cut]
                rest, read = rest[cut:], read + cut
    yield rest


_ROWS = msgspec.json.Decoder(list[LogRow])
_END_BYTES = 256


def _rows_of(block: bytes, *, is_first: bool) -> tuple[list[LogRow], int | None]:
    """The rows of a block; and how many of a damaged block could not be read."""
    begin = re.match(rb"\s*\[?" if is_first else rb"", block)
    end = block[-_END_BYTES:]
    after = len(end) - len(end.rstrip().removesuffix(b"]").rstrip().removesuffix(b","))
    assert begin is not None
    try:
        return _ROWS.decode(b"".join((b"[", memoryview(block)[begin.end() : len(block) - after], b"]"))), None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        rows = [_row_of(text) for text in rows_of_damaged([block])]
        return [row for row in rows if row is not None], rows.count(None)


def _row_of(text: bytes | None) -> LogRow | None:
    """A row of a damaged block; None if its values are not those of a row."""
    if text is None:
        return None
    try:
        return msgspec.convert(json.loads(text), LogRow)
    except (ValueError, RecursionError):  # those of msgspec are a ValueError too
        return None
