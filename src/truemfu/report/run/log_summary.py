"""A run's summary so far, only from its log: for a run that is still running or was killed.

The monitor's own summary is better if there is one: it knows the number of steps between two rows, and the
cost of the monitor.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from math import isfinite
from operator import gt, mul

from ...records import LeftOut, RunHardware, RunSummary, WaterfallPart, WaterfallRecord
from ...waterfall import (
    COMMUNICATION,
    USEFUL,
    Part,
    WaterfallInputs,
    between_steps_notes,
    limiter_of,
    waterfall,
)
from .load import LastWindow
from .log_rows import LogRows

_LOSS = "perf/loss/"


def summary_of_log(rows: LogRows, last_window: LastWindow | None = None) -> RunSummary:
    """Medians over the rows after warm-up, or over all if there are no others; hardware figures are those of
    the last window."""
    times = rows.column("step_time_s")
    steady = bytes(map(gt, map(isfinite, times), rows.is_warmup))
    observed = rows.rare("is_observed")
    measured = bytes(at not in observed for at in range(len(rows)))
    over = steady if any(steady) else measured
    between_share = _share_of_time(rows, "between_steps_s", steady)
    counted = rows.rare("forwards_between_steps")
    forwards = sum(passes for at, passes in counted.items() if steady[at])
    methods = Counter(method for method in rows.texts("method") if method is not None)
    unknown = Counter(reason for reason in rows.texts("mfu_unknown") if reason is not None)
    return RunSummary(
        steps=len(rows),
        warmup_steps=sum(rows.is_warmup),
        observed_steps=len(observed),
        medians_over="steps after warm-up" if over is steady else "all steps (none after warm-up)",
        median_step_time_s=_median(rows, "step_time_s", over),
        median_mfu=_median(rows, "mfu", over),
        median_mfu_estimate=_median(rows, "mfu_estimate", over),
        median_hfu=_median(rows, "hfu", over),
        median_tokens_per_second=_median(rows, "tokens_per_s", over),
        median_samples_per_second=_median(rows, "samples_per_s", over),
        padding_lost=_padding_lost(rows),
        data_wait_share=_share_of_time(rows, "data_wait_s", steady),
        between_steps_share=between_share,
        forwards_between_steps=forwards,
        left_out=_left_out(rows),
        method=methods.most_common(1)[0][0] if methods else None,
        methods=dict(methods),
        mfu_unknown=dict(unknown),
        hardware=None if last_window is None else _hardware(last_window, rows),
        notes=between_steps_notes(between_share, forwards),
    )


PAUSES = {
    "evaluation": "evaluation_s",
    "checkpoint": "checkpoint_s",
    "generation": "generation_s",
    "other": "other_pause_s",
}
"""What may run without belonging to a step, and the value of a row with its seconds."""


def _left_out(rows: LogRows) -> dict[str, LeftOut]:
    """What ran without belonging to a step, by kind."""
    seconds = {kind: _finite(rows, name) for kind, name in PAUSES.items() if rows.has(name)}
    run_s = sum(_finite(rows, "step_time_s")) + sum(map(sum, seconds.values()))
    return {
        kind: LeftOut(times=len(found), seconds=sum(found), share=sum(found) / run_s)
        for kind, found in seconds.items()
        if found and run_s
    }


def peak_flops_per_s(rows: LogRows) -> float | None:
    """The peak of one device, by the last MFU: FLOP/s over MFU."""
    for row in reversed(rows):
        own_mfu = row.mfu if row.mfu_per_gpu is None else row.mfu_per_gpu
        if own_mfu and row.tflops_per_gpu:
            return 1e12 * row.tflops_per_gpu / own_mfu
    return None


def _finite(rows: LogRows, name: str, of: bytes | None = None) -> list[float]:
    """The known values of a column, of all rows or of those for which `of` is 1."""
    column = rows.column(name)
    return list(filter(isfinite, column if of is None else compress(column, of)))


def _median(rows: LogRows, name: str, of: bytes | None) -> float | None:
    known = _finite(rows, name, of) if rows.has(name) else []
    return statistics.median(known) if known else None


def _padding_lost(rows: LogRows) -> float | None:
    """1 − useful tokens / tokens; a row's tokens are its rate times its time."""
    tokens = list(map(mul, rows.column("tokens_per_s"), rows.column("step_time_s")))
    useful = list(map(mul, tokens, rows.column("padding_efficiency")))
    is_known = bytes(map(isfinite, useful))
    of_known = sum(compress(tokens, is_known))
    return 1 - sum(compress(useful, is_known)) / of_known if of_known else None


def _share_of_time(rows: LogRows, name: str, of: bytes) -> float | None:
    """Seconds spent on something in each step, over the time of all steps; None without values."""
    spent = _finite(rows, name, of) if rows.has(name) else []
    time_s = sum(_finite(rows, "step_time_s", of))
    return sum(spent) / time_s if spent and time_s else None


def _hardware(window: LastWindow, rows: LogRows) -> RunHardware:
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
        limiter=limiter_of(parts[:-1]),
        waterfall=WaterfallRecord(parts=parts, peak_flops_per_s=peak) if parts else None,
    )


def _parts(shares: Mapping[str, float]) -> list[WaterfallPart]:
    """The parts of a waterfall from `perf/loss/<key>`, in the row's order, with the waterfall's names."""
    if USEFUL not in shares:
        return []
    every = _every_part(
        is_clock_gain=shares.get("clock", 0.0) < 0,
        has_between_steps="idle_between_steps" in shares,
        has_communication=COMMUNICATION in shares,
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


def _every_part(*, is_clock_gain: bool, has_between_steps: bool, has_communication: bool) -> dict[str, Part]:
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
            collective_share=0.0 if has_communication else None,
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
