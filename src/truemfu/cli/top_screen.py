"""What `truemfu top` shows of a GPU, and the table it shows it in."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.text import Text

from ..hardware.counters import CounterWindow, GpuInfo, GpuProcess
from ..hardware.detect import find_spec, override_flops_per_s
from ..hardware.executed import counted_clock_hz, executed_flops_per_s
from ..hardware.sampler import Health

_UNKNOWN = "-"
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
# What goes first where the window is narrow: nothing is ever cut in the middle.
_DISPENSABLE = ("processes", "TFLOP/s", "memory GiB", "power W", "DRAM", "reported MHz")
_TEXT_COLUMNS = ("GPU", "processes")
_GAP = "   "
_PROCESSES_SHOWN = 2
# Reasons that a busy GPU has all the time and that say nothing of lost speed.
_NO_NEWS = ("gpu_idle",)
_WORTH_SAYING = 0.005
_OF_THE_CLOCK = "FLOP util: at the clock the driver reports; under load the true one is up to 11 % lower"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One GPU as it was over the last interval."""

    gpu: GpuInfo
    window: CounterWindow | None
    health: Health
    executed_flops_per_s: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    clock_source: str = "driver"
    """Whose clock the executed FLOP/s rest on: the driver's, or its raw cycle counters'."""

    @property
    def executed_flop_utilisation(self) -> float | None:
        executed, peak = self.executed_flops_per_s, self.peak_flops_per_s
        return None if executed is None or not peak else executed / peak

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
        clock_source="cycle counters" if counted else "driver",
    )


def screen(all_readings: Sequence[Reading], width: int | None = None) -> Text:
    """The table, without some columns where it is wider than `width`, and a line for each thing to say.

    Laid out here and not by rich's Table, which takes several times as long: drawing eight GPUs once a second
    is to stay well below a hundredth of a core.
    """
    rows = [dict(zip(_COLUMNS, map(_printable, _cells(reading)), strict=True)) for reading in all_readings]
    widths = _widths(rows, width)
    titles = _line({column: column for column in widths}, widths)
    lines = [_line(row, widths) for row in rows]
    rule = "─" * max(map(cell_len, (titles, *lines)))
    notes = [part for note in _notes(all_readings) for part in _wrapped(_printable(note), width)]
    text = Text(no_wrap=True, overflow="ignore")
    text.append(titles, "bold")
    text.append("\n".join(["", rule, *lines, *notes]))
    return text


def _widths(rows: Sequence[Mapping[str, str]], width: int | None) -> dict[str, int]:
    """The columns that fit, and how wide each is."""
    widths = {
        column: max(cell_len(text) for text in (column, *(r[column] for r in rows))) for column in _COLUMNS
    }
    for column in _DISPENSABLE:
        if width is None or sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
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
        return (name, *[_UNKNOWN] * (len(_COLUMNS) - 1))
    executed = reading.executed_flops_per_s
    return (
        name,
        _share(reading.executed_flop_utilisation),
        _UNKNOWN if executed is None else f"{executed / 1e12:.0f}",
        _share(window.gpu_utilisation),
        _share(window.tensor_active),
        _share(window.sm_active),
        _share(window.dram_active),
        _of(window.sm_clock_hz, window.max_sm_clock_hz, 1e6),
        _of(window.power_w, window.power_limit_w, 1),
        _of(window.memory_used_bytes, window.memory_total_bytes, 2**30),
        _processes(window.processes),
    )


def _notes(all_readings: Sequence[Reading]) -> list[str]:
    """One line for each: what holds a clock back, what cannot be read and why, what the figures rest on."""
    lines = []
    for reading in all_readings:
        index, health = reading.gpu.index, reading.health
        if reading.window is not None and reading.window.throttle:
            held = [
                f"{reason.replace('_', ' ')} {_share(part)} of the time"
                for reason, part in reading.window.throttle.items()
                if reason not in _NO_NEWS and part >= _WORTH_SAYING
            ]
            if held:
                lines.append(f"GPU {index}: clock held back by {', '.join(held)}")
        if health.fault is not None:
            lines.append(f"GPU {index}: {health.fault} ({health.dropped} intervals dropped)")
        elif reading.gpu.no_gpm_reason is not None:
            lines.append(f"GPU {index}: {reading.gpu.no_gpm_reason}")
        elif reading.peak_flops_per_s is None:
            lines.append(f"GPU {index}: no peak FLOP/s is known for {reading.gpu.name!r}")
    if any(r.executed_flops_per_s is not None and r.clock_source == "driver" for r in all_readings):
        lines.append(_OF_THE_CLOCK)
    return lines


def _processes(found: tuple[GpuProcess, ...] | None) -> str:
    if found is None:
        return _UNKNOWN
    largest = sorted(found, key=lambda process: -(process.memory_bytes or 0))
    shown = [
        f"{process.name or process.pid} {_gib(process.memory_bytes)}"
        for process in largest[:_PROCESSES_SHOWN]
    ]
    more = len(found) - len(shown)
    return ", ".join([*shown, f"+{more}"] if more else shown) or "none"


def _gib(count_bytes: int | None) -> str:
    return _UNKNOWN if count_bytes is None else f"{count_bytes / 2**30:.1f}"


def _share(fraction: float | None) -> str:
    return _UNKNOWN if fraction is None else f"{100 * fraction:.1f} %"


def _of(value: float | None, limit: float | None, unit: float) -> str:
    numbers = (_UNKNOWN if part is None else f"{part / unit:.0f}" for part in (value, limit))
    return " / ".join(numbers)


def _printable(text: str) -> str:
    """Names come from other people's processes: none of them moves the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
