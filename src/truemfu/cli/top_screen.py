"""The values of a GPU in `truemfu top`, and their table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.text import Text

from ..hardware.counters.executed import CYCLE_COUNTERS, DRIVER, counted_clock_hz, executed_flops_per_s
from ..hardware.counters.sampler import Health
from ..hardware.counters.samples import CounterWindow, GpuInfo, GpuProcess
from ..hardware.detect import find_spec, override_flops_per_s
from ..text import UNKNOWN, counted, on_one_line, ranges
from ..utilization import ratio
from .console import percent

_COLUMNS = (
    "GPU",
    "FLOP util",
    "TFLOP/s",
    '"GPU util"',
    "tensor",
    "SM",
    "DRAM",
    "reported MHz",
    "power W",
    "memory GiB",
    "processes",
)
# Columns that are dropped first in a narrow window: nothing is truncated.
_DISPENSABLE = ("processes", "TFLOP/s", "memory GiB", "power W", "DRAM", "reported MHz")
_TEXT_COLUMNS = ("GPU", "processes")
_GAP = "  "
_PROCESSES_SHOWN = 2
NOT_HELD_BACK = ("gpu_idle",)
"""Throttle reasons of the driver that cost nothing."""
_WORTH_SAYING = 0.005
TRUE_CLOCK = "the real one is 4 to 11 % lower in steady tensor work"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One GPU over the last interval."""

    gpu: GpuInfo
    window: CounterWindow | None
    health: Health
    executed_flops_per_s: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    clock_source: str = DRIVER
    """The clock of the executed FLOP/s: the driver's, or from its raw cycle counters."""

    @property
    def executed_flop_utilisation(self) -> float | None:
        return ratio(self.executed_flops_per_s, self.peak_flops_per_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; unknown is null."""
        return {
            **msgspec.to_builtins(self.gpu),
            "no_gpm_reason": self.gpu.no_gpm_reason,
            "executed_flop_utilisation": self.executed_flop_utilisation,
            "executed_flops_per_s": self.executed_flops_per_s,
            "clock_source": self.clock_source,
            "peak_flops_per_s": self.peak_flops_per_s,
            "peak_source": self.peak_source,
            "window": None if self.window is None else msgspec.to_builtins(self.window),
            "dropped_intervals": self.health.dropped,
            "fault": self.health.fault,
        }


def reading_of(gpu: GpuInfo, window: CounterWindow | None, health: Health) -> Reading:
    spec = find_spec(gpu.name, gpu.memory_total_bytes)
    peak, source = override_flops_per_s(), "override"
    if peak is None and spec is not None:
        peak, source = spec.peak("bf16") or spec.peak("fp16"), f"datasheet: {spec.name}"
    counted = window is not None and spec is not None and counted_clock_hz(window, spec.sm_count or 1)
    return Reading(
        gpu=gpu,
        window=window,
        health=health,
        executed_flops_per_s=None if window is None else executed_flops_per_s(window, spec),
        peak_flops_per_s=peak,
        peak_source=None if peak is None else source,
        clock_source=CYCLE_COUNTERS if counted else DRIVER,
    )


def screen(all_readings: Sequence[Reading], width: int | None = None, *, with_dropped: bool = False) -> Text:
    """The table, without some columns if it is wider than `width`, and a line for each note.

    `with_dropped` also reports dropped intervals after recovery: they are missing from the figures of a whole
    trace.

    Not rich's Table, which is several times slower: drawing eight GPUs once a second should stay well below
    1 % of a core.
    """
    rows = [dict(zip(_COLUMNS, map(on_one_line, _cells(reading)), strict=True)) for reading in all_readings]
    widths = _layout(rows, width)
    titles = _line({column: column for column in widths}, widths)
    lines = [_line(row, widths) for row in rows]
    rule = "─" * max(map(cell_len, (titles, *lines)))
    all_notes = _notes(all_readings, with_dropped)
    notes = [part for note in all_notes for part in _wrapped(on_one_line(note), width)]
    text = Text(no_wrap=True, overflow="ignore")
    text.append(titles, "bold")
    text.append("\n".join(["", rule, *lines, *notes]))
    return text


def _layout(rows: Sequence[Mapping[str, str]], width: int | None) -> dict[str, int]:
    """The columns that fit, and their widths."""
    widths = {
        column: max(cell_len(text) for text in (column, *(r[column] for r in rows))) for column in _COLUMNS
    }
    for column in _DISPENSABLE:
        if width is not None and sum(widths.values()) + len(_GAP) * (len(widths) - 1) > width:
            del widths[column]
    return widths


def _line(row: Mapping[str, str], widths: Mapping[str, int]) -> str:
    """Text to the left, numbers to the right."""
    cells = []
    for column, width in widths.items():
        blank = " " * (width - cell_len(row[column]))
        cells.append(row[column] + blank if column in _TEXT_COLUMNS else blank + row[column])
    return _GAP.join(cells).rstrip()


def _wrapped(note: str, width: int | None) -> list[str]:
    return [note] if width is None else textwrap.wrap(note, max(width, 20), subsequent_indent="  ")


def _cells(reading: Reading) -> tuple[str, ...]:
    gpu, window = reading.gpu, reading.window
    name = f"{gpu.index} {gpu.name.removeprefix('NVIDIA ')}"
    if window is None:
        return (name, *[UNKNOWN] * (len(_COLUMNS) - 1))
    executed = reading.executed_flops_per_s
    return (
        name,
        percent(reading.executed_flop_utilisation),
        UNKNOWN if executed is None else f"{executed / 1e12:.0f}",
        percent(window.gpu_utilisation),
        percent(window.tensor_active),
        percent(window.sm_active),
        percent(window.dram_active),
        _of(window.sm_clock_hz, window.max_sm_clock_hz, 1e6),
        _of(window.power_w, window.power_limit_w, 1),
        _of(window.memory_used_bytes, window.memory_total_bytes, 2**30),
        _processes(window.processes),
    )


def _notes(all_readings: Sequence[Reading], with_dropped: bool) -> list[str]:
    """One line for each throttled clock, each unreadable value with its reason, and the clock's source.

    A note that applies to several GPUs appears once.
    """
    indices: dict[str, list[int]] = {}
    for reading in all_readings:
        for note in _notes_of(reading, with_dropped):
            indices.setdefault(note, []).append(reading.gpu.index)
    lines = [f"{_gpus(where)}: {note}" for note, where in indices.items()]
    if any(r.executed_flops_per_s is not None and r.clock_source == DRIVER for r in all_readings):
        lines.append(f"FLOP util: driver clock; {TRUE_CLOCK}")
    return lines


def _notes_of(reading: Reading, with_dropped: bool) -> Iterator[str]:
    window, health = reading.window, reading.health
    held = [
        f"{reason.replace('_', ' ')} {percent(part)} of the time"
        for reason, part in ((window.throttle if window is not None else None) or {}).items()
        if reason not in NOT_HELD_BACK and part >= _WORTH_SAYING
    ]
    if held:
        yield f"clock throttled by {', '.join(held)}"
    dropped = f"{counted(health.dropped, 'interval')} dropped"
    if health.fault is not None:
        yield f"{health.fault} ({dropped})"
    elif reading.gpu.no_gpm_reason is not None:
        yield reading.gpu.no_gpm_reason
    elif reading.peak_flops_per_s is None:
        yield f"no peak FLOP/s is known for {reading.gpu.name!r}"
    if with_dropped and health.dropped and health.fault is None:
        yield f"{dropped}: no usable counters"


def _gpus(indices: Sequence[int]) -> str:
    """`GPU 3`, or `GPUs 0-2, 5`."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(ranges(indices))}"


def _processes(found: tuple[GpuProcess, ...] | None) -> str:
    if found is None:
        return UNKNOWN
    largest = sorted(found, key=lambda process: -(process.memory_bytes or 0))
    shown = [
        f"{process.name or process.pid} {_gib(process.memory_bytes)}"
        for process in largest[:_PROCESSES_SHOWN]
    ]
    more = len(found) - len(shown)
    return ", ".join([*shown, f"+{more}"] if more else shown) or "none"


def _gib(count_bytes: int | None) -> str:
    return UNKNOWN if count_bytes is None else f"{count_bytes / 2**30:.1f}"


def _of(value: float | None, limit: float | None, unit: float) -> str:
    numbers = (UNKNOWN if part is None else f"{part / unit:.0f}" for part in (value, limit))
    return " / ".join(numbers)
