"""The step times and rates of a run as arrays, read from its log in bounded memory.

    training_log.json ─► pieces of whole lines ─► arrays ─► StepSeries: the steps after warm-up, each once

A log has a row on each line, so a million rows need no more memory than their numbers. A line that is not a
row (the log was cut off, or damaged) is left out and counted. A log without such lines (someone has formatted
it) is read by `run_load`, which reads anything.

The steps are those of the run's own medians: all after warm-up that have a time. Pauses, counts and profiling
are not part of a step's time, so the steps after them stay.
"""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec

from .. import plain_files
from .run_load import load_run

_PIECE = 1 << 20
_LONGEST_LINE = 1 << 24
_AROUND_ROWS = b" \t\r\n\0,[]"
_UNKNOWN = math.nan


class _Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The values of a log row that are compared; all others are ignored."""

    global_step: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    step_time_s: float | None = msgspec.field(name="perf/step_time", default=None)
    tokens_per_s: float | None = msgspec.field(name="perf/tokens_per_second", default=None)
    samples_per_s: float | None = msgspec.field(name="perf/samples_per_second", default=None)
    mfu: float | None = msgspec.field(name="perf/mfu", default=None)
    mfu_per_gpu: float | None = msgspec.field(name="perf/mfu_per_gpu", default=None)
    tflops_per_gpu: float | None = msgspec.field(name="perf/tflops_per_gpu", default=None)
    memory_peak_bytes: float | None = msgspec.field(name="perf/memory_peak_bytes", default=None)
    is_warmup: bool = msgspec.field(name="perf/warmup", default=False)


_ROW = msgspec.json.Decoder(_Row)
_ROWS = msgspec.json.Decoder(list[_Row])


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How much a step processes, of samples or tokens: the median, and where the middle 80 % of steps are."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """The steps after warm-up, in order; of a rate, the steps that have it."""

    step_times_s: Sequence[float]
    tokens_per_s: Sequence[float] = ()
    samples_per_s: Sequence[float] = ()
    mfu: Sequence[float] = ()
    tokens: StepSize | None = None
    samples: StepSize | None = None
    peak_flops_per_s: float | None = None
    """Of one device, by the last row that shows it."""
    peak_memory_bytes: int | None = None
    steps_per_row: int = 1
    """The usual number of steps from one row to the next."""
    unread_lines: int = 0


def read_series(path: Path) -> StepSeries:
    """The series of the log at `path`; an OSError if it cannot be read."""
    found = _Columns()
    for piece in _pieces(path):
        found.add_lines(piece)
    if not found.steps and found.unread_lines:
        found = _Columns()
        found.add([_Row(**_shared_values(row)) for row in load_run(path.parent).rows])
    return found.series()


def _shared_values(row: object) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _Row.__struct_fields__ if hasattr(row, name)}


def _pieces(path: Path) -> Iterator[bytes]:
    """The file in pieces of whole lines; a line beyond `_LONGEST_LINE` is cut."""
    rest = b""
    with open(plain_files.open_plain(path, os.O_RDONLY), "rb") as file:
        while read := file.read(_PIECE):
            rest += read
            end = len(rest) if len(rest) > _LONGEST_LINE else rest.rfind(b"\n") + 1
            if end:
                yield rest[:end]
                rest = rest[end:]
    yield rest


class _Columns:
    """The rows of a log, a column at a time."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.unread_lines = 0
        self._times, self._tokens, self._samples, self._mfu = (array("d") for _ in range(4))
        self._peak: float | None = None
        self._memory: float | None = None

    def add_lines(self, lines: bytes) -> None:
        """Add whole lines; those that are not rows are counted."""
        try:
            rows = _ROWS.decode(b"[%b]" % lines.strip(_AROUND_ROWS))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            rows = [row for line in lines.split(b"\n") if (row := self._row(line)) is not None]
        self.add(rows)

    def _row(self, line: bytes) -> _Row | None:
        text = line.strip(_AROUND_ROWS)
        try:
            return _ROW.decode(text) if text else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.unread_lines += 1
            return None

    def add(self, rows: Sequence[_Row]) -> None:
        """Add rows."""
        self.steps.extend([row.global_step for row in rows])
        self._times.extend([_UNKNOWN if row.is_warmup else row.step_time_s or _UNKNOWN for row in rows])
        self._tokens.extend([row.tokens_per_s or _UNKNOWN for row in rows])
        self._samples.extend([row.samples_per_s or _UNKNOWN for row in rows])
        self._mfu.extend([row.mfu or _UNKNOWN for row in rows])
        for row in reversed(rows):
            own_mfu = row.mfu if row.mfu_per_gpu is None else row.mfu_per_gpu
            if own_mfu and row.tflops_per_gpu:
                self._peak = 1e12 * row.tflops_per_gpu / own_mfu
                break
        memory = [row.memory_peak_bytes for row in rows if row.memory_peak_bytes is not None]
        if memory:
            self._memory = max(*memory, self._memory or 0.0)

    def series(self) -> StepSeries:
        """The steps after warm-up, each once."""
        times = self._times
        kept = array("q", [place for place in self._order() if 0 < times[place] < math.inf])
        gaps = [self.steps[j] - self.steps[i] for i, j in itertools.pairwise(kept)]
        return StepSeries(
            step_times_s=array("d", [times[place] for place in kept]),
            tokens_per_s=_known(self._tokens, kept),
            samples_per_s=_known(self._samples, kept),
            mfu=_known(self._mfu, kept),
            tokens=_size(self._tokens, times, kept),
            samples=_size(self._samples, times, kept),
            peak_flops_per_s=self._peak,
            peak_memory_bytes=None if self._memory is None else int(self._memory),
            steps_per_row=round(median(gaps)) if gaps else 1,
            unread_lines=self.unread_lines,
        )

    def _order(self) -> Iterable[int]:
        """The places of the rows by step; of a step that a restart logged again, the last one."""
        steps = self.steps
        if all(one < other for one, other in itertools.pairwise(steps)):
            return range(len(steps))
        last = {step: place for place, step in enumerate(steps)}
        return [last[step] for step in sorted(last)]


def _known(values: array[float], kept: Sequence[int]) -> array[float]:
    return array("d", [values[place] for place in kept if 0 < values[place] < math.inf])


def _size(rates: array[float], times: array[float], kept: Sequence[int]) -> StepSize | None:
    """A step's size is its rate times its time."""
    sizes = sorted(rates[place] * times[place] for place in kept if 0 < rates[place] < math.inf)
    if not sizes:
        return None
    low, middle, high = (sizes[int(share * (len(sizes) - 1))] for share in (0.1, 0.5, 0.9))
    return StepSize(median=middle, low=low, high=high)
