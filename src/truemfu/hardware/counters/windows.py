"""Windows from samples of a GPU's counters: its activity between two samples, and over many.

Pure arithmetic. An invalid interval (time that runs backwards, a share above 1) raises, so that the
caller can drop and count it. Shares of cycles are weighted by cycles: share × mean clock adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...errors import CounterError
from .samples import ACTIVITIES, FASTEST_CLOCK_HZ, CounterSample, CounterWindow, Cycles, GpuInfo, Readings

GPM_LAG_S = 0.1
"""The values of a read are up to this old.

Seen on an H200 (driver 580) at 1,700 reads, one every 50 ms: activity, energy, power and clock are updated
every 100 ms, each at its own time, and every second read was stale. NVIDIA states the same
for Hopper: 100 ms is a hard limit (github.com/NVIDIA/DCGM/issues/310).
"""

# A driver may round a full share up slightly; anything above is invalid.
_FULL = 1.001


def fault_of(sample: CounterSample, *, shares: Sequence[str] = ACTIVITIES) -> str | None:
    """Why this sample is invalid, or None; `shares` are the activities to check."""
    for name in (*shares, "gpu_utilisation"):
        value = getattr(sample, name)
        if value is not None and not 0 <= value <= _FULL:
            return f"{name} is {value:g}, which is not a share"
    for name in ("power_w", "energy_j", "memory_used_bytes"):
        value = getattr(sample, name)
        if value is not None and not 0 <= value < math.inf:
            return f"{name} is {value:g}"
    clock = sample.sm_clock_hz
    if clock is not None and not 0 <= clock < FASTEST_CLOCK_HZ:
        return f"the SM clock is {clock:g} Hz"
    return None if math.isfinite(sample.at_s) else f"the time is {sample.at_s:g}"


def interval_of(before: CounterSample, after: CounterSample, gpu: GpuInfo) -> CounterWindow:
    """The time between two reads of one GPU; a `CounterError` if they are inconsistent.

    The clock, the power and the throttle reasons are read at both ends, and each end represents half of it.
    `with_energy` adds the energy, which is not known at every read.
    """
    assert before.fresh, "a stale read cannot begin an interval"
    assert after.fresh, "a stale read cannot end an interval"
    # The activities of the first read belong to the previous interval.
    fault = fault_of(after) or fault_of(before, shares=())
    if fault is not None:
        raise CounterError(f"the counters returned an impossible value: {fault}")
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        raise CounterError(f"time went backwards by {-seconds:g} s")
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
        memory_used_bytes=after.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        gpu_utilisation=after.gpu_utilisation,
        throttle=throttle_of((before, after)),
        processes=after.processes,
        **{name: getattr(after, name) for name in ACTIVITIES},
    )


def with_energy(
    parts: Iterable[CounterWindow], before: CounterSample, after: CounterSample
) -> list[CounterWindow]:
    """The intervals between two readings of the energy counter, each with its share by time.

    The counter is cumulative, so the sum is exact; a reading is up to `GPM_LAG_S` old, so each end is
    accurate to that much time.
    """
    assert before.energy_j is not None
    assert after.energy_j is not None
    energy_j = after.energy_j - before.energy_j
    if energy_j < 0:
        raise CounterError(f"the energy counter went backwards by {-energy_j:g} J")
    power_w = energy_j / (after.at_s - before.at_s)
    return [msgspec.structs.replace(part, energy_j=power_w * part.seconds) for part in parts]


def combine(windows: Iterable[CounterWindow]) -> CounterWindow | None:
    """Consecutive windows of one GPU combined; None for none.

    The chip counts in cycles, so the share of a long time is the mean of the shares of its parts weighted
    with their cycles (clock × seconds): then share × mean clock is the sum over the parts. If a
    clock is not known, and for units that do not run at the SM clock, the weight is the time.

    The last reading of the energy counter may be a second old: the energy since then is extrapolated by time
    from the known part, if that is at least half.
    """
    parts = list(windows)
    if len(parts) < 2:
        return parts[0] if parts else None
    assert len({part.index for part in parts}) == 1, "windows of different GPUs"
    seconds = [part.seconds for part in parts]
    clocks = [part.sm_clock_hz for part in parts]
    cycles = [s * clock for s, clock in zip(seconds, clocks, strict=True) if clock]
    weights = cycles if len(cycles) == len(parts) else seconds
    last = {name: last_of(parts, name) for name in _LAST_KNOWN}
    shares: dict[str, Any] = {
        name: mean_of([getattr(part, name) for part in parts], seconds if name in _BY_TIME else weights)
        for name in ACTIVITIES
    }
    return CounterWindow(
        index=parts[0].index,
        begin_s=parts[0].begin_s,
        end_s=parts[-1].end_s,
        seconds=sum(seconds),
        intervals=sum(part.intervals for part in parts),
        cycles=_cycles_together([part.cycles for part in parts]),
        sm_clock_hz=mean_of(clocks, seconds),
        power_w=mean_of([part.power_w for part in parts], seconds),
        energy_j=_energy(parts),
        gpu_utilisation=mean_of([part.gpu_utilisation for part in parts], seconds),
        throttle=_throttle_together(parts),
        **last,
        **shares,
    )


def between(
    windows: Iterable[CounterWindow], begin_s: float, end_s: float, *, lag_s: float = GPM_LAG_S
) -> CounterWindow | None:
    """The activity between two times as one window; windows at its ends count by their overlap.

    So the window covers exactly the requested time, which matters if a run changes its pace in it. A read is
    up to `lag_s` old, half of that on average.
    """
    begin_s, end_s = begin_s + lag_s / 2, end_s + lag_s / 2
    parts = (_clipped(part, max(part.begin_s, begin_s), min(part.end_s, end_s)) for part in windows)
    return combine(part for part in parts if part is not None)


def _clipped(part: CounterWindow, begin_s: float, end_s: float) -> CounterWindow | None:
    """The part of an interval between two times, assuming constant activity."""
    if begin_s >= end_s:
        return None
    share = (end_s - begin_s) / (part.end_s - part.begin_s)
    if share == 1:
        return part
    return msgspec.structs.replace(
        part,
        begin_s=begin_s,
        end_s=end_s,
        seconds=part.seconds * share,
        cycles=None if part.cycles is None else Cycles(elapsed=part.cycles.elapsed * share),
        energy_j=None if part.energy_j is None else part.energy_j * share,
    )


_BY_TIME = ("dram_active", "graphics_active")
_LAST_KNOWN = (
    "max_sm_clock_hz",
    "power_limit_w",
    "memory_used_bytes",
    "memory_total_bytes",
    "processes",
)


def _middle(before: float | None, after: float | None) -> float | None:
    return after if before is None else before if after is None else (before + after) / 2


def mean_of(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted mean of the known values."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _energy(parts: Sequence[CounterWindow]) -> float | None:
    known = [(part.energy_j, part.seconds) for part in parts if part.energy_j is not None]
    known_s, seconds = sum(s for _, s in known), sum(part.seconds for part in parts)
    if 2 * known_s < seconds:
        return None
    return sum(energy_j for energy_j, _ in known) * (seconds / known_s)


def last_of(parts: Sequence[Readings], name: str) -> Any:
    """The last known value of this name."""
    return next((value for part in reversed(parts) if (value := getattr(part, name)) is not None), None)


def throttle_of(samples: Iterable[CounterSample]) -> dict[str, float] | None:
    """The share of the samples with each throttle reason; None if it was never read."""
    read = [sample.throttle_reasons for sample in samples if sample.throttle_reasons is not None]
    if not read:
        return None
    reasons = sorted({reason for one in read for reason in one})
    return {reason: sum(reason in one for one in read) / len(read) for reason in reasons}


def _throttle_together(parts: Sequence[CounterWindow]) -> dict[str, float] | None:
    known = [(part.throttle, part.seconds) for part in parts if part.throttle is not None]
    if not known:
        return None
    seconds = sum(s for _, s in known)
    reasons = sorted({reason for shares, _ in known for reason in shares})
    return {reason: sum(shares.get(reason, 0.0) * s for shares, s in known) / seconds for reason in reasons}


def _cycles_between(before: Cycles | None, after: Cycles | None) -> Cycles | None:
    """None if the count does not increase; it is optional."""
    if before is None or after is None:
        return None
    elapsed = after.elapsed - before.elapsed
    return Cycles(elapsed=elapsed) if 0 < elapsed < math.inf else None


def _cycles_together(parts: Sequence[Cycles | None]) -> Cycles | None:
    """None if one is missing: a partial sum would be mistaken for the whole."""
    known = [part.elapsed for part in parts if part is not None]
    return Cycles(elapsed=sum(known)) if len(known) == len(parts) else None
