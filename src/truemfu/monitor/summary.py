"""A run as plain data, and the closing summary: a table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

import msgspec

from ..errors import one_line
from ..records import UPPER_BOUND, RankSummary, RunHardware, RunRecord, RunSummary, WaterfallPart
from ..run_summary.phases import LIMIT_LABEL, limit_of_steps
from ..run_summary.texts import (
    NO_RATE,
    RunResults,
    facts,
    figures,
    waterfall_basis,
    without_tensor_work,
)
from ..text import counted, duration, printable, share, size
from ..waterfall import between_steps_notes
from .config import MonitorConfig

_PEAK = "where the peak went"
_SMALLEST_SHARE_SHOWN = 0.005
_ROUNDED_AWAY = 0.0005
_RANKS_SHOWN = 16
_STRAGGLERS_SHOWN = 5
NO_COSTS = {
    "first_step_s": 0.0,
    "checks_s": 0.0,
    "background_s": 0.0,
    "observing_s": 0.0,
    "observed": 0,
    "observed_steps": [],
    "profiling_s": 0.0,
    "census_s": 0.0,
}
"""What a run that has not begun has cost so far."""


def info_of(
    config: MonitorConfig,
    *,
    device: str | None = None,
    time_source: str | None = None,
    world_size: int = 1,
    rank: int = 0,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The description of a run; None where a value is unknown before the first step."""
    return {
        "mode": config.mode,
        "convention": {"attention": config.attention},
        "device": device,
        "time_source": time_source,
        "world_size": world_size,
        "rank": rank,
        "scope": "one device" if world_size == 1 else f"rank {rank} of {world_size} alone",
        "model": model,
        "batch_shapes": [],
        "loader_workers": None,
    }


def ended_by(error: BaseException | None, earlier: BaseException | None) -> str | None:
    """What ended the program: this error, or the uncaught one whose traceback was shown since `earlier`."""
    if error is None and not hasattr(sys, "ps1"):  # in a console the last error ended nothing
        shown = uncaught()
        error = None if shown is earlier else shown
    return None if error is None else one_line(error)


def uncaught() -> BaseException | None:
    """The last error whose traceback Python, or a test runner, has shown."""
    return getattr(sys, "last_value", None)


def summary_of(
    info: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    own_s: float | None = None,
    costs: Mapping[str, Any] = NO_COSTS,
    job: Mapping[str, Any] | None = None,
    hardware: Mapping[str, Any] | None = None,
    servers: Sequence[Mapping[str, Any]] = (),
    typical_step: Mapping[str, Any] | None = None,
    without_tensor: Mapping[str, float] = MappingProxyType({}),
    notes: Sequence[str] = (),
    lost_steps: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """A run as plain data: its description and its totals; None where a value is unknown.

    `own_s` is the monitor's time on the training thread per step. `job` is what holds for all ranks, in place
    of rank 0's own values. `lost_steps` are those that became no row, by the reason.
    """
    step_s = run["median_step_time_s"]
    return {
        **run,
        **info,
        **(job or {}),
        "monitor_cost": {
            "training_thread_us_per_step": None if own_s is None else own_s * 1e6,
            "share_of_step": None if own_s is None or not step_s else own_s / step_s,
            **costs,
        },
        "hardware": hardware,
        "generation_servers": list(servers),
        "typical_step": typical_step,
        "without_tensor": dict(without_tensor),
        "notes": [*between_steps_notes(run["between_steps_share"], run["forwards_between_steps"]), *notes],
        "lost": [f"{steps:,} steps: {why}" for why, steps in lost_steps.items() if steps],
    }


_FACTS = ("model", "batches", "steps", "peak", "FLOPs by", "total", "monitor, one-time cost")
"""Those that are printed; the others are in the run's files."""


def lines_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as labels and texts, unknown values included."""
    found = msgspec.convert(summary, RunSummary)
    record = msgspec.structs.replace(msgspec.convert(summary, RunRecord), summary=found)
    run = RunResults(record=record, summary=found)
    lines = [line for line in facts(run) if line[0] in _FACTS]
    lines += [(figure.label, figure.text) for figure in figures(run)]
    if (limit := limit_of_steps(record, found)) is not None:
        lines.append((LIMIT_LABEL, limit))
    if found.method is not None:
        lines += [
            ("MFU unknown", f"{counted(steps, 'step')}: {reason}")
            for reason, steps in found.mfu_unknown.items()
        ]
    return [
        *lines,
        *_hardware(found.hardware, record.scope),
        *[("busy without tensor work", text) for text in [without_tensor_work(found)] if text],
        *_ranks(found.ranks),
        *[("late rank", straggler.text or "") for straggler in found.stragglers[:_STRAGGLERS_SHOWN]],
        *[("note", text) for text in found.notes],
        *[("lost", text) for text in found.lost],
        *[("warning", text) for text in found.warnings],
    ]


def show(summary: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the summary: with rich in a terminal, as plain lines in a file or a pipe."""
    stream = stream or sys.stderr
    lines = [(printable(label), printable(text)) for label, text in lines_of(summary)]
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="truemfu", title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            table.add_row(Text(label), Text(text, style="yellow" if label in ("warning", "lost") else ""))
        Console(file=stream).print(table)
        return
    width = max(len(label) for label, _ in lines)
    stream.write("truemfu\n" + "".join(f"  {label:{width}}  {text}\n" for label, text in lines))
    stream.flush()


def _ranks(ranks: Sequence[RankSummary]) -> list[tuple[str, str]]:
    """A line for each rank of a small job."""
    if len(ranks) > _RANKS_SHOWN:
        return []
    return [(f"rank {rank.rank}", _rank(rank)) for rank in ranks]


def _rank(rank: RankSummary) -> str:
    if rank.host is None or rank.device is None:
        return rank.status or "unknown"
    texts = [rank.device if rank.device.startswith(rank.host) else f"{rank.host} {rank.device}"]
    if rank.steps:
        texts.append(f"{counted(rank.steps, 'step')} after warm-up, mean {duration(rank.step_time_s)}")
    else:
        texts.append("no step after warm-up")
    if rank.data_wait_s is not None:
        texts.append(f"{duration(rank.data_wait_s)} of it waiting for data")
    if rank.collective_s is not None:
        texts.append(f"{duration(rank.collective_s)} in collectives")
    if rank.clock_mhz is not None:
        texts.append(f"{rank.clock_mhz:,.0f} MHz")
    if rank.memory_bytes is not None:
        texts.append(size(rank.memory_bytes))
    if rank.status != "ended":
        texts.append(f"{rank.status}, last seen {rank.last_seen}")
    return ", ".join(texts)


def _hardware(hardware: RunHardware | None, scope: str | None) -> list[tuple[str, str]]:
    """The counters' figures; empty without counters."""
    if hardware is None:
        return []
    lines = [("executed, by counters", _executed(hardware))]
    if hardware.energy_j_per_step is not None and hardware.power_w is not None:
        text = f"{hardware.power_w:.0f} W this GPU; {hardware.energy_j_per_step:.3g} J a step"
        if hardware.energy_j_per_million_tokens is not None:
            text += f", {hardware.energy_j_per_million_tokens / 1e3:.3g} kJ a million tokens"
        lines.append(("energy", f"{text} ({scope})"))
    fall = hardware.waterfall
    if fall is not None:
        if hardware.windows is not None:
            lines.append((_PEAK, waterfall_basis(hardware)))
        lines += [(_PEAK, f"{100 * of_peak:5.1f} %  {name}") for of_peak, name in _shown_parts(fall.parts)]
        lines += [("note", text) for text in fall.notes]
    return lines + [("advice", text) for text in hardware.advice]


def _shown_parts(parts: Sequence[WaterfallPart]) -> list[tuple[float, str]]:
    """The larger parts, and the others in one, so that what is printed adds up to the peak."""
    shares = [(part.share or 0.0, part.name) for part in parts]
    small = [of_peak for of_peak, _ in shares[:-1] if abs(of_peak) < _SMALLEST_SHARE_SHOWN]
    others = [(sum(small), "smaller parts together")] if abs(sum(small)) >= _ROUNDED_AWAY else []
    return [one for one in shares[:-1] if abs(one[0]) >= _SMALLEST_SHARE_SHOWN] + others + shares[-1:]


def _executed(hardware: RunHardware) -> str:
    rate, ratio = hardware.executed_flops_per_s, hardware.executed_over_expected
    if rate is None:
        return f"unknown ({NO_RATE})"
    text = f"{rate / 1e12:.1f} TFLOP/s"
    if hardware.executed_over_activity is None:
        text += f" ({UPPER_BOUND})"
    if hardware.executed_hfu is not None:
        text += f", HFU {share(hardware.executed_hfu)}"
    if ratio is not None:
        text += f", {ratio:.3f} times what the count expects"
    if hardware.clock_hz is not None:
        text += f"; clock {hardware.clock_hz / 1e6:,.0f} MHz by {hardware.clock_source}"
    return text
