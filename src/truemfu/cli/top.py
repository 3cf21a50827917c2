"""`truemfu top`: every GPU of the machine, live, with nothing added to the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..errors import UsageError
from ..hardware.counter_trace import Recorder, Replay
from ..hardware.counter_windows import combine, executed_flops_per_s
from ..hardware.counters import CounterSource, CounterWindow, GpuInfo, GpuProcess
from ..hardware.detect import find_spec, override_flops_per_s
from ..hardware.sampler import Health, Sampler
from .console import debug_option, json_option, output, print_json

_UNKNOWN = "-"
_COLUMNS = (
    "GPU",
    "FLOP util",
    "TFLOP/s",
    '"GPU util"',
    "tensor",
    "SM",
    "DRAM",
    "clock MHz",
    "power W",
    "memory GiB",
    "processes",
)
# What goes first where the window is narrow: nothing is ever cut in the middle.
_DISPENSABLE = ("processes", "TFLOP/s", "memory GiB", "power W", "DRAM", "clock MHz")
_TEXT_COLUMNS = ("GPU", "processes")
_GAP = "   "
_PROCESSES_SHOWN = 2
# Reasons that a busy GPU has all the time and that say nothing of lost speed.
_NO_NEWS = ("gpu_idle",)
_WORTH_SAYING = 0.005
_WHOLE_TRACE = 10**7


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One GPU as it was over the last interval."""

    gpu: GpuInfo
    window: CounterWindow | None
    health: Health
    executed_flops_per_s: float | None
    peak_flops_per_s: float | None
    peak_source: str | None

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
            "peak_flops_per_s": self.peak_flops_per_s,
            "peak_source": self.peak_source,
            "window": None if self.window is None else msgspec.to_builtins(self.window),
            "dropped_intervals": self.health.dropped,
            "fault": self.health.fault,
        }


@click.command(short_help="Every GPU, live: what the silicon executes.")
@click.option("--once", is_flag=True, help="One interval (all of a replayed trace), then end.")
@click.option("--interval", "interval_s", type=float, default=1.0, show_default=True, help="In seconds.")
@click.option("--record", "record_to", metavar="FILE", help="Write all that is read to a trace.")
@click.option("--replay", "replay_from", metavar="FILE", help="Show a recorded trace, not this machine.")
@click.option(
    "--export",
    "port",
    type=int,
    metavar="PORT",
    help="Serve the same to Prometheus, to whoever reaches the port.",
)
@json_option
@debug_option
def top(
    once: bool,
    interval_s: float,
    record_to: str | None,
    replay_from: str | None,
    port: int | None,
    as_json: bool,
) -> None:
    """Every GPU of this machine, live, with no code in the run.

    FLOP util is what the tensor cores executed as a share of the dense 16-bit peak; TFLOP/s is at the
    16-bit rate (fp8 does twice, tf32 half of it in the same time). Both are upper bounds: elementwise 16-bit
    work ticks the same counter. "GPU util" is the driver's figure: 100 % as soon as any kernel runs.
    Activity needs a Hopper or later; older GPUs show the rest.

    Without a terminal it prints a table at each interval; --json prints a line at each, and with --once one
    document.
    """
    if not 0.01 <= interval_s <= 3600:
        raise UsageError(f"--interval must be from 0.01 to 3600 seconds, got {interval_s:g}")
    source = _open(replay_from)
    try:
        if record_to is not None:
            source = Recorder(source, record_to)
        sampler = Sampler(source, period_s=interval_s, keep=_WHOLE_TRACE if once else 1)
        if once:
            _once(sampler, interval_s, replayed=replay_from is not None, as_json=as_json)
        elif port is None:
            _watch(sampler, interval_s, as_json=as_json)
        else:
            from .top_export import serving

            with serving(lambda: readings(sampler), port) as address:
                click.echo(f"serving {address}", err=True)
                _watch(sampler, interval_s, as_json=as_json, silent=not sys.stdout.isatty() and not as_json)
    finally:
        source.close()


def readings(sampler: Sampler, *, whole: bool = False) -> list[Reading]:
    """Every GPU over the last interval, or over all that is kept."""
    return [
        reading_of(
            gpu,
            combine(sampler.intervals(gpu.index)) if whole else sampler.latest(gpu.index),
            sampler.health(gpu.index),
        )
        for gpu in sampler.gpus()
    ]


def reading_of(gpu: GpuInfo, window: CounterWindow | None, health: Health) -> Reading:
    spec = find_spec(gpu.name, gpu.memory_total_bytes)
    peak, source = override_flops_per_s(), "override"
    if peak is None and spec is not None:
        peak, source = spec.peak("bf16") or spec.peak("fp16"), f"datasheet: {spec.name}"
    return Reading(
        gpu=gpu,
        window=window,
        health=health,
        executed_flops_per_s=None if window is None else executed_flops_per_s(window, spec),
        peak_flops_per_s=peak,
        peak_source=None if peak is None else source,
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
    text = Text(no_wrap=True, overflow="ignore")
    text.append(titles, "bold")
    text.append("\n".join(["", rule, *lines, *map(_printable, _notes(all_readings))]))
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


def _open(replay_from: str | None) -> CounterSource:
    if replay_from is not None:
        return Replay(replay_from)
    from ..hardware.nvml import NvmlSource

    return NvmlSource()


def _once(sampler: Sampler, interval_s: float, *, replayed: bool, as_json: bool) -> None:
    if replayed:
        while sampler.poll():
            pass
    else:
        sampler.poll()
        time.sleep(interval_s)
        sampler.poll()
    found = readings(sampler, whole=replayed)
    if as_json:
        print_json({"gpus": [reading.as_dict() for reading in found]})
    else:
        output().print(screen(found))


def _watch(sampler: Sampler, interval_s: float, *, as_json: bool, silent: bool = False) -> None:
    """Until the trace ends or the user has seen enough; that is how `top` is left, so it is no failure."""
    try:
        if silent:
            _every(interval_s, sampler, lambda found: None)
        elif as_json:
            _every(interval_s, sampler, _json_line)
        elif not sys.stdout.isatty():
            console = output()
            _every(interval_s, sampler, lambda found: console.print(screen(found)))
        else:
            _live(sampler, interval_s, Console(highlight=False))
    except KeyboardInterrupt:
        return


def _live(sampler: Sampler, interval_s: float, console: Console) -> None:
    # Drawn when there is something new, not four times a second: watching is to cost nothing.
    with Live(console=console, auto_refresh=False, screen=False) as live:
        _every(interval_s, sampler, lambda found: live.update(screen(found, console.width), refresh=True))


def _every(interval_s: float, sampler: Sampler, show: Callable[[list[Reading]], object]) -> None:
    due_s = time.monotonic()
    first = True
    while sampler.poll():
        if not first:
            show(readings(sampler))
        first = False
        now_s = time.monotonic()
        due_s = due_s + interval_s if due_s + interval_s > now_s else now_s + interval_s
        time.sleep(due_s - now_s)


def _json_line(found: Sequence[Reading]) -> None:
    click.echo(msgspec.json.encode({"gpus": [reading.as_dict() for reading in found]}).decode())


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
    """One line for each: what holds a clock back, what cannot be read, and why."""
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
