"""Samples of a GPU's counters become windows: what it did between two of them, and over many.

Pure arithmetic. An interval that is nonsense (time that runs backwards, a share above 1) raises, so that
whoever samples can drop and count it. Shares of cycles are weighted by cycles: share × mean clock adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import CounterError
from .counters import ACTIVITIES, CounterSample, CounterWindow, Cycles, GpuInfo
from .specs import DeviceSpec

GPM_LAG_S = 0.06
"""GPM lags: up to this long before a sample leaks into the interval it begins (measured on an H200)."""

# A driver may round a full share up by a hair; anything above is nonsense.
_FULL = 1.001
_FASTEST_CLOCK_HZ = 1e10


def fault_of(sample: CounterSample, *, shares: Sequence[str] = ACTIVITIES) -> str | None:
    """Why this sample cannot be true, or None; `shares` are the activities to look at."""
    for name in (*shares, "gpu_utilisation"):
        value = getattr(sample, name)
        if value is not None and not 0 <= value <= _FULL:
            return f"{name} of {value:g}, not a share"
    for name in ("power_w", "energy_j", "memory_used_bytes"):
        value = getattr(sample, name)
        if value is not None and not 0 <= value < math.inf:
            return f"{name} of {value:g}"
    clock = sample.sm_clock_hz
    if clock is not None and not 0 <= clock < _FASTEST_CLOCK_HZ:
        return f"an SM clock of {clock:g} Hz"
    return None if math.isfinite(sample.at_s) else f"a time of {sample.at_s:g}"


def interval_of(before: CounterSample, after: CounterSample, gpu: GpuInfo) -> CounterWindow:
    """The time between two reads of one GPU; a `CounterError` where they make no sense together.

    The clock, the power and the throttle reasons are read at both ends, and each end stands for half of it.
    """
    # The activities of the first read are those of the interval before.
    fault = fault_of(after) or fault_of(before, shares=())
    if fault is not None:
        raise CounterError(f"the counters returned nonsense: {fault}")
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        raise CounterError(f"time went backwards by {-seconds:g} s")
    energy_j = _difference(before.energy_j, after.energy_j)
    if energy_j is not None and energy_j < 0:
        raise CounterError(f"the energy counter went backwards by {-energy_j:g} J")
    return CounterWindow(
        index=after.index,
        begin_s=before.at_s,
        end_s=after.at_s,
        seconds=seconds,
        cycles=_cycles_between(before.cycles, after.cycles),
        sm_clock_hz=_middle(before.sm_clock_hz, after.sm_clock_hz),
        max_sm_clock_hz=gpu.max_sm_clock_hz,
        power_w=_middle(before.power_w, after.power_w),
        power_limit_w=after.power_limit_w,
        energy_j=energy_j,
        memory_used_bytes=after.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        gpu_utilisation=after.gpu_utilisation,
        throttle=_throttle(before.throttle_reasons, after.throttle_reasons),
        processes=after.processes,
        **{name: getattr(after, name) for name in ACTIVITIES},
    )


def combine(windows: Iterable[CounterWindow]) -> CounterWindow | None:
    """Consecutive windows of one GPU as one; None for none.

    The chip counts in cycles, so the share of a long time is the mean of the shares of its parts weighted
    with their cycles (clock × seconds): then share × mean clock is the sum of what each part did. Where a
    clock is not known, and for what does not run at the SM clock, the weight is the time.
    """
    parts = list(windows)
    if len(parts) < 2:
        return parts[0] if parts else None
    assert len({part.index for part in parts}) == 1, "windows of different GPUs"
    seconds = [part.seconds for part in parts]
    clocks = [part.sm_clock_hz for part in parts]
    cycles = [s * clock for s, clock in zip(seconds, clocks, strict=True) if clock]
    weights = cycles if len(cycles) == len(parts) else seconds
    last = {name: _last(parts, name) for name in _LAST_KNOWN}
    shares: dict[str, Any] = {
        name: _mean([getattr(part, name) for part in parts], seconds if name in _BY_TIME else weights)
        for name in ACTIVITIES
    }
    return CounterWindow(
        index=parts[0].index,
        begin_s=parts[0].begin_s,
        end_s=parts[-1].end_s,
        seconds=sum(seconds),
        intervals=sum(part.intervals for part in parts),
        cycles=_cycles_together([part.cycles for part in parts]),
        sm_clock_hz=_mean(clocks, seconds),
        power_w=_mean([part.power_w for part in parts], seconds),
        energy_j=_sum([part.energy_j for part in parts]),
        gpu_utilisation=_mean([part.gpu_utilisation for part in parts], seconds),
        throttle=_throttle_together(parts),
        **last,
        **shares,
    )


def within(
    windows: Iterable[CounterWindow], begin_s: float, end_s: float, *, lag_s: float = GPM_LAG_S
) -> CounterWindow | None:
    """The whole intervals between two times as one window, without those the time before leaks into.

    The counters tell of up to `lag_s` before they are read: an interval that begins later than
    `begin_s + lag_s` and ends by `end_s` is about that time alone, however large the lag really is.
    """
    return combine(part for part in windows if part.begin_s >= begin_s + lag_s and part.end_s <= end_s)


def executed_flops_per_s(
    window: CounterWindow, spec: DeviceSpec | None, dtype: str | None = None
) -> float | None:
    """An upper bound of the matrix FLOP/s a GPU executed; None where a part of it is not known.

        tensor activity × SMs × FLOP per cycle and SM × SM clock

    `dtype` is that of the products (None: bf16 or fp16); fp8 does twice, tf32 half of that in a cycle, as the
    peaks of the table say. The bound is from above because elementwise 16-bit arithmetic ticks the same
    counter. The part of a tile that overhangs its matrix was executed and is in it. Raw cycles stand for
    activity and clock where the driver has them and they agree with both.
    """
    if spec is None or spec.sm_count is None or spec.tensor_flops_per_cycle_per_sm is None:
        return None
    base = spec.peak("bf16") or spec.peak("fp16")
    rate = base if dtype is None else spec.peak(dtype)
    if rate is None or base is None or dtype == "fp32":
        return None
    pipe = {"fp64": "dmma", "int8": "imma"}.get(dtype or "", "hmma")
    share = getattr(window, f"{pipe}_active")
    if share is None:
        share = window.tensor_active
    if share is None or window.sm_clock_hz is None:
        return None
    flops_per_cycle = spec.sm_count * spec.tensor_flops_per_cycle_per_sm * rate / base
    counted = _counted_cycles_per_s(window, pipe, share, spec.sm_count)
    return float(flops_per_cycle * (share * window.sm_clock_hz if counted is None else counted))


def _counted_cycles_per_s(window: CounterWindow, pipe: str, share: float, sm_count: int) -> float | None:
    """Active cycles of a pipe in a second, mean of all SMs, from the raw counters; None where they disagree.

    The documentation does not say whether they are summed over the SMs, so the sampled clock decides; the
    share must come out within five points of the other counter's.
    """
    counts = window.cycles
    active = None if counts is None else getattr(counts, pipe)
    if counts is None or active is None or not window.sm_clock_hz:
        return None
    if abs(active / counts.elapsed - share) > 0.05:
        return None
    for summed_over in (1, sm_count):
        if 0.8 < counts.elapsed / (summed_over * window.seconds * window.sm_clock_hz) < 1.25:
            return float(active / summed_over / window.seconds)
    return None


_BY_TIME = ("dram_active", "graphics_active")
_LAST_KNOWN = (
    "max_sm_clock_hz",
    "power_limit_w",
    "memory_used_bytes",
    "memory_total_bytes",
    "processes",
)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _middle(before: float | None, after: float | None) -> float | None:
    return after if before is None else before if after is None else (before + after) / 2


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one is missing: a part of a sum would pass for the whole."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _last(parts: Sequence[CounterWindow], name: str) -> Any:
    return next((value for part in reversed(parts) if (value := getattr(part, name)) is not None), None)


def _throttle(before: tuple[str, ...] | None, after: tuple[str, ...] | None) -> dict[str, float] | None:
    ends = [end for end in (before, after) if end is not None]
    if not ends:
        return None
    reasons = sorted({reason for end in ends for reason in end})
    return {reason: sum(reason in end for end in ends) / len(ends) for reason in reasons}


def _throttle_together(parts: Sequence[CounterWindow]) -> dict[str, float] | None:
    known = [(part.throttle, part.seconds) for part in parts if part.throttle is not None]
    if not known:
        return None
    seconds = sum(s for _, s in known)
    reasons = sorted({reason for shares, _ in known for reason in shares})
    return {reason: sum(shares.get(reason, 0.0) * s for shares, s in known) / seconds for reason in reasons}


def _cycles_between(before: Cycles | None, after: Cycles | None) -> Cycles | None:
    """None where the counts do not grow together: they help where they are there, and are not needed."""
    if before is None or after is None:
        return None
    grown = {name: _difference(getattr(before, name), getattr(after, name)) for name in _CYCLES}
    elapsed = grown.pop("elapsed")
    if elapsed is None or not 0 < elapsed < math.inf:
        return None
    if not all(count is None or 0 <= count <= elapsed * _FULL for count in grown.values()):
        return None
    return Cycles(elapsed=elapsed, **grown)


def _cycles_together(parts: Sequence[Cycles | None]) -> Cycles | None:
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    sums = {name: _sum([getattr(part, name) for part in known]) for name in _CYCLES}
    elapsed = sums.pop("elapsed")
    assert elapsed is not None
    return Cycles(elapsed=elapsed, **sums)


_CYCLES = Cycles.__struct_fields__
