"""A run's summary so far, only from its log: for a run that is still running or was killed.

The monitor's own summary is better if there is one: it knows the number of steps between two rows, and the
cost of the monitor.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..records import LeftOut, RunHardware, RunSummary, WaterfallPart, WaterfallRecord
from ..waterfall import USEFUL, Part, WaterfallInputs, between_steps_notes, waterfall
from .run_load import LastWindow, LogRow

_LOSS = "perf/loss/"


def summary_of_log(rows: Sequence[LogRow], last_window: LastWindow | None = None) -> RunSummary:
    """Medians over the rows after warm-up, or over all if there are no others; hardware figures are those of
    the last window."""
    steady = [row for row in rows if not row.is_warmup and row.step_time_s is not None]
    over = steady or rows
    between_share = _share_of_time((row.between_steps_s, row.step_time_s) for row in steady)
    forwards = sum(row.forwards_between_steps for row in steady)
    methods = Counter(row.method for row in rows if row.method is not None)
    return RunSummary(
        steps=len(rows),
        warmup_steps=sum(row.is_warmup for row in rows),
        medians_over="steps after warm-up" if steady else "all steps (none after warm-up)",
        median_step_time_s=_median(row.step_time_s for row in over),
        median_mfu=_median(row.mfu for row in over),
        median_hfu=_median(row.hfu for row in over),
        median_tokens_per_second=_median(row.tokens_per_s for row in over),
        median_samples_per_second=_median(row.samples_per_s for row in over),
        padding_lost=_padding_lost(rows),
        data_wait_share=_share_of_time((row.data_wait_s, row.step_time_s) for row in steady),
        between_steps_share=between_share,
        forwards_between_steps=forwards,
        left_out=_left_out(rows),
        method=methods.most_common(1)[0][0] if methods else None,
        hardware=None if last_window is None else _hardware(last_window, rows),
        notes=between_steps_notes(between_share, forwards),
    )


def _left_out(rows: Sequence[LogRow]) -> dict[str, LeftOut]:
    """What ran without belonging to a step, by kind."""
    paused = {
        "evaluation": [row.evaluation_s for row in rows],
        "checkpoint": [row.checkpoint_s for row in rows],
        "generation": [row.generation_s for row in rows],
        "other": [row.other_pause_s for row in rows],
    }
    seconds = {kind: [s for s in found if s is not None] for kind, found in paused.items()}
    run_s = sum(row.step_time_s or 0.0 for row in rows) + sum(map(sum, seconds.values()))
    return {
        kind: LeftOut(times=len(found), seconds=sum(found), share=sum(found) / run_s)
        for kind, found in seconds.items()
        if found and run_s
    }


def peak_flops_per_s(rows: Sequence[LogRow]) -> float | None:
    """The peak of one device, by the last MFU: FLOP/s over MFU."""
    for row in reversed(rows):
        own_mfu = row.mfu if row.mfu_per_gpu is None else row.mfu_per_gpu
        if own_mfu and row.tflops_per_gpu:
            return 1e12 * row.tflops_per_gpu / own_mfu
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _padding_lost(rows: Iterable[LogRow]) -> float | None:
    """1 − useful tokens / tokens; a row's tokens are its rate times its time."""
    tokens = useful = 0.0
    for row in rows:
        if (
            row.padding_efficiency is not None
            and row.tokens_per_s is not None
            and row.step_time_s is not None
        ):
            amount = row.tokens_per_s * row.step_time_s
            tokens += amount
            useful += amount * row.padding_efficiency
    return 1 - useful / tokens if tokens else None


def _share_of_time(spent: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Seconds spent on something in each step, over the time of all steps; None without values."""
    seconds = list(spent)
    known = [spent_s for spent_s, _ in seconds if spent_s is not None]
    time_s = sum(step_time_s or 0.0 for _, step_time_s in seconds)
    return sum(known) / time_s if known and time_s else None


def _hardware(window: LastWindow, rows: Sequence[LogRow]) -> RunHardware:
    """A row's metrics of a window in the summary's form; a row is not enough for advice."""
    metric = window.metrics.get
    rate_tflops, hfu, clock_mhz = (
        metric(f"perf/{name}") for name in ("executed_tflops_per_gpu", "executed_hfu", "sm_clock_mhz")
    )
    peak = 1e12 * rate_tflops / hfu if rate_tflops and hfu else peak_flops_per_s(rows)
    parts = _parts({k.removeprefix(_LOSS): v for k, v in window.metrics.items() if k.startswith(_LOSS)})
    return RunHardware(
        executed_flops_per_s=None if rate_tflops is None else 1e12 * rate_tflops,
        executed_hfu=hfu,
        executed_over_activity=metric("perf/executed_over_activity"),
        executed_over_counted=metric("perf/executed_over_counted"),
        executed_over_expected=metric("perf/executed_over_expected"),
        clock_hz=None if clock_mhz is None else 1e6 * clock_mhz,
        clock_source=window.clock_source,
        power_w=metric("perf/power_w"),
        energy_j_per_step=metric("perf/energy_j_per_step"),
        energy_j_per_million_tokens=metric("perf/energy_j_per_million_tokens"),
        tensor_active=metric("perf/tensor_active"),
        sm_active=metric("perf/sm_active"),
        dram_active=metric("perf/dram_active"),
        limiter=_limiter(parts),
        waterfall=WaterfallRecord(parts=parts, peak_flops_per_s=peak) if parts else None,
    )


def _parts(shares: Mapping[str, float]) -> list[WaterfallPart]:
    """The parts of a waterfall from `perf/loss/<key>`, in the row's order, with the waterfall's names."""
    if USEFUL not in shares:
        return []
    every = _every_part(
        is_clock_gain=shares.get("clock", 0.0) < 0, has_between_steps="idle_between_steps" in shares
    )
    inner_keys = {inner.key for part in every.values() for inner in part.of}
    keys = [key for key in shares if key not in inner_keys and key != USEFUL]
    return [
        WaterfallPart(
            key=key,
            name=_name(key, shares, every),
            share=shares[key],
            of=_inner(every[key], shares) if key in every else [],
        )
        for key in (*keys, USEFUL)
    ]


def _every_part(*, is_clock_gain: bool, has_between_steps: bool) -> dict[str, Part]:
    """All possible parts by key: those of a waterfall with all values known."""
    fall = waterfall(
        WaterfallInputs(
            peak_flops_per_s=1.0,
            model_flops_per_s=0.1,
            hardware_flops_per_s=0.2,
            executed_flops_per_s=0.2,
            datasheet_clock_hz=1.0,
            mean_clock_hz=1.5 if is_clock_gain else 0.5,
            gpu_busy_share=0.9,
            sm_active_share=0.8,
            tensor_active_share=0.7,
            data_wait_share=0.0,
            between_steps_share=0.0 if has_between_steps else None,
            launch_gap_share=0.0,
            tile_factor=1.0,
            masked_flops_per_s=0.0,
            padding_efficiency=1.0,
        )
    )
    assert fall is not None
    return {part.key: part for part in fall.parts}


def _name(key: str, shares: Mapping[str, float], every: Mapping[str, Part]) -> str:
    if key == USEFUL and "padding_tokens" not in shares:
        return "the model's FLOPs, padding tokens included"
    if key == "unexplained":
        return "not separated"
    return _either([every[one].name if one in every else one.replace("_", " ") for one in key.split("_or_")])


def _inner(outer: Part, shares: Mapping[str, float]) -> list[WaterfallPart]:
    """The parts of a part; the rest is in the last of them."""
    known = [inner for inner in outer.of if inner.key in shares]
    unknown = [inner.name for inner in outer.of if inner.key not in shares]
    return [
        WaterfallPart(
            key=inner.key,
            name=_either([*unknown, inner.name]) if inner is outer.of[-1] else inner.name,
            share=shares[inner.key],
        )
        for inner in known
    ]


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _limiter(parts: Sequence[WaterfallPart]) -> str | None:
    """Key of the largest loss, or of the largest part of it."""
    largest = max(parts[:-1], key=_share, default=None)
    if largest is None or _share(largest) <= 0:
        return None
    return max(largest.of, key=_share, default=largest).key


def _share(part: WaterfallPart) -> float:
    return part.share or 0.0
