"""The matrix FLOP/s a GPU executed, from a window of activity counters.

    Σ over pipes: activity × SMs × FLOP per cycle and SM × SM clock          (× the audit's correction)

- **Pipes.** `hmma` does bf16, fp16, tf32 and fp8, `imma` int8, `dfma`/`dmma` fp64. A pipe's FLOP per cycle is
  the table's for bf16 times a power of two for the dtype; if several dtypes share the hmma pipe, the mean is
  weighted by their counted FLOPs.
- **Clock.** The clock measured by the SMs if there is one: by `cycle_stamps`, or by a driver with raw cycles.
  Otherwise the clock the driver requested, which under load is above the actual one, as is the resulting
  rate.
- **Upper bound.** The hmma pipe is also active in some kernels without a product, such as strided copies, and
  some kernels with products execute fewer FLOP per active cycle than others: half in Turing's mma (products
  whose sizes are not multiples of eight), two thirds in cuDNN's convolutions with few input channels.
  `truemfu audit` measures the executed FLOPs relative to the activity
  (`executed_over_activity`); without that the rate is an upper bound. On an H200 activity read 1.013 to 1.018
  times what Nsight Compute counted for a GPT of 1.3 B, 1.06 for a ViT and 1.13 for a ResNet-18.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...records import UPPER_BOUND
from ..specs import DeviceSpec
from .samples import CounterWindow

_HMMA_DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp4")
_OWN_PIPE = ("int8", "fp64")
_NEGLIGIBLE = 0.0005

CYCLE_COUNTERS, DRIVER = "cycle counters", "driver"
"""The source of the clock of a rate."""


def executed_method(*, is_corrected: bool) -> str:
    """The method name of executed FLOPs from counters."""
    return f"hardware counters ({'corrected by an audit' if is_corrected else UPPER_BOUND})"


def executed_flops_per_s(
    window: CounterWindow,
    spec: DeviceSpec | None,
    *,
    flops_by_dtype: Mapping[str, float] | None = None,
    clock_hz: float | None = None,
    executed_over_activity: float = 1.0,
) -> float | None:
    """The matrix FLOP/s executed in a window; None if a part of it is not known.

    `flops_by_dtype` is the counted work on the hmma pipe (None: bf16 or fp16), `clock_hz` the clock the SMs
    measured (None: by raw cycles, else the driver's), `executed_over_activity` an audit's correction of the
    hmma pipe. Without one the result is an upper bound.
    """
    if spec is None or spec.sm_count is None or spec.tensor_flops_per_cycle_per_sm is None:
        return None
    clock = clock_hz or counted_clock_hz(window, spec.sm_count) or window.sm_clock_hz
    if clock is None:
        return None
    rate = hmma_rate(spec, flops_by_dtype or {})
    if rate is None or window.hmma_active is None:
        return None
    in_a_cycle = window.hmma_active * executed_over_activity * rate
    fp64 = [share for share in (window.dfma_active, window.dmma_active) if share is not None]
    for dtype, share in (("int8", window.imma_active), ("fp64", max(fp64, default=None))):
        relative = relative_rate(spec, dtype)
        if share is not None and relative is not None:
            in_a_cycle += share * relative
        elif (flops_by_dtype or {}).get(dtype):
            return None  # counted, but its pipe or rate is not known
    return float(in_a_cycle * spec.sm_count * spec.tensor_flops_per_cycle_per_sm * clock)


def on_tensor_pipes(flops_by_dtype: Mapping[str, float]) -> bool:
    """Whether nearly all of a mix runs on pipes whose activity gives its FLOPs; plain fp32 does not."""
    total = sum(flops_by_dtype.values())
    watched = sum(flops_by_dtype.get(dtype, 0.0) for dtype in (*_HMMA_DTYPES, *_OWN_PIPE))
    return total > 0 and watched >= (1 - _NEGLIGIBLE) * total


def has_rate(spec: DeviceSpec | None) -> bool:
    """Whether the table knows this chip's SMs and their FLOP per cycle."""
    return spec is not None and bool(spec.sm_count and spec.tensor_flops_per_cycle_per_sm)


def counted_clock_hz(window: CounterWindow, sm_count: int) -> float | None:
    """The clock from the raw cycles of a newer driver; None without them, or if they are implausible.

    The documentation does not state whether they are summed over the SMs: the reported clock decides,
    although it is too high under load.
    """
    if window.cycles is None or not window.sm_clock_hz or not window.seconds:
        return None
    for summed_over in (1, sm_count):
        clock = window.cycles.elapsed / summed_over / window.seconds
        if 0.8 < clock / window.sm_clock_hz < 1.05:
            return float(clock)
    return None


def hmma_rate(spec: DeviceSpec, flops_by_dtype: Mapping[str, float]) -> float | None:
    """FLOP per cycle of a mix of dtypes on the hmma pipe, relative to bf16, at which their cycles add up."""
    total = cycles = 0.0
    for dtype in _HMMA_DTYPES:
        if flops := flops_by_dtype.get(dtype):
            relative = relative_rate(spec, dtype)
            if relative is None:
                return None
            total += flops
            cycles += flops / relative
    return total / cycles if cycles else 1.0


def relative_rate(spec: DeviceSpec, dtype: str) -> float | None:
    """FLOP per cycle of a dtype relative to bf16: a power of two, the one nearest to the peaks' ratio.

    The ratio itself is not exact: a datasheet states its dtypes at different clocks (an H200's fp64 at 1,980
    MHz, its bf16 at 1,830).
    """
    base, peak = spec.peak("bf16") or spec.peak("fp16"), spec.peak(dtype)
    if not base or not peak:
        return None
    return float(2.0 ** round(math.log2(peak / base)))


def datasheet_clock_hz(spec: DeviceSpec | None, dtype: str = "bf16") -> float | None:
    """The clock of the datasheet's peak for this dtype; None if the row does not have it.

    `boost_clock_hz` is that of the 16-bit tensor peak. Makers quote other peaks at other clocks: an H200's
    66.9 TFLOP/s in fp64 are at 1,980 MHz, its 989.4 in bf16 at 1,830. An SM does a power of two of FLOP per
    cycle in each dtype, so the one nearest to peak / (SMs × boost clock) is it, and the clock follows.
    """
    if spec is None or spec.sm_count is None or spec.boost_clock_hz is None:
        return None
    peak = spec.peak(dtype)
    if peak is None:
        return None
    flops_per_cycle_per_sm = 2.0 ** round(math.log2(peak / (spec.sm_count * spec.boost_clock_hz)))
    return float(peak / (spec.sm_count * flops_per_cycle_per_sm))
