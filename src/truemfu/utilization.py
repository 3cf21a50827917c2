"""FLOPs + seconds + a peak → MFU and HFU, with their sources.

    MFU = model FLOPs / (seconds × peak)          what the model needs
    HFU = executed FLOPs / (seconds × peak)       recomputation included

An unknown value is None, never 0, and values are never clamped: one above 1 is shown unchanged, with one
warning that names the likely causes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .convention import Convention
from .errors import warn_once
from .hardware.detect import known_peak, known_spec, override_flops_per_s

if TYPE_CHECKING:
    import torch

    from .flops import FlopCount

ABOVE_ONE = (
    "a utilisation above 1 was measured and is reported unchanged; likely causes: a wrong peak (wrong chip, "
    "a wrong override, a dense peak under sparse kernels), a time that is too short because the device was "
    "not synchronised, a peak for a different dtype, or the FLOPs of several devices over the time of one"
)


def calculate_mfu(
    flops: float | None, compute_time: float | None, gpu_peak_flops: float | None
) -> float | None:
    """`flops / (compute_time × gpu_peak_flops)`: FLOPs, seconds, FLOP/s.

    None if a value is None, not finite or negative, or if the time or the peak is zero. Never clamped:
    a value above 1 is returned unchanged, with one warning.
    """
    utilisation = share_of_peak(flops, compute_time, gpu_peak_flops)
    if utilisation is not None and utilisation > 1:
        warn_once(ABOVE_ONE)
    return utilisation


def share_of_peak(flops: float | None, seconds: float | None, peak_flops_per_s: float | None) -> float | None:
    """`flops / (seconds × peak)` as `calculate_mfu` gives it, without its warning."""
    return ratio(ratio(flops, seconds), peak_flops_per_s)


def ratio(amount: float | None, per: float | None) -> float | None:
    """`amount / per`, the division behind every utilisation in this package; None as above."""
    if amount is None or per is None:
        return None
    usable = math.isfinite(amount) and amount >= 0 and math.isfinite(per) and per > 0
    return amount / per if usable else None


def ideal_flops_per_s(
    flops_by_dtype: Mapping[str, int], device: torch.device | str | int | None = None
) -> tuple[float | None, str | None]:
    """The peak for a mix of dtypes on a device, and where it comes from.

    `TRUEMFU_PEAK_TFLOPS` overrides the table for every dtype.
    """
    override = override_flops_per_s()
    if override is not None:
        return override, "override"
    return datasheet_flops_per_s(flops_by_dtype, device)


def datasheet_flops_per_s(
    flops_by_dtype: Mapping[str, int], device: torch.device | str | int | None
) -> tuple[float | None, str | None]:
    """The same by the table alone: the peak for which the ideal times add up, total / Σ (flops_d / peak_d).

    A dtype without a known peak makes the whole unknown; so does an empty mix.
    """
    spec = known_spec(device)
    if spec is None:
        return None, None
    ideal_time_s = 0.0
    for dtype, flops in flops_by_dtype.items():
        if flops:
            peak = known_peak(spec, dtype)
            if peak is None:
                return None, None
            ideal_time_s += flops / peak
    if not ideal_time_s:
        return None, None
    return sum(flops_by_dtype.values()) / ideal_time_s, f"datasheet: {spec.name}"


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """How well one step used one device.

    `peak_source` names the source of the peak: "datasheet: NVIDIA H200", "override", "measured matmul
    ceiling", or the caller's own text. `method` and `convention` are those of the count.
    """

    mfu: float | None
    hfu: float | None
    achieved_flops_per_s: float | None
    executed_flops_per_s: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    step_time_s: float | None
    method: str
    convention: Convention

    @classmethod
    def of(
        cls,
        count: FlopCount,
        step_time_s: float | None,
        *,
        device: torch.device | str | int | None = None,
        peak_flops_per_s: float | None = None,
        peak_source: str | None = None,
    ) -> Utilization:
        """The utilisation of a counted step of `step_time_s` on `device` (None: the current accelerator).

        A `peak_flops_per_s` given here overrides the environment and the table; `peak_source` labels it.
        """
        if peak_flops_per_s is None:
            peak_flops_per_s, peak_source = ideal_flops_per_s(count.by_dtype, device)
        return cls(
            mfu=calculate_mfu(count.model_flops, step_time_s, peak_flops_per_s),
            hfu=calculate_mfu(count.hardware_flops, step_time_s, peak_flops_per_s),
            achieved_flops_per_s=ratio(count.model_flops, step_time_s),
            executed_flops_per_s=ratio(count.hardware_flops, step_time_s),
            peak_flops_per_s=peak_flops_per_s,
            peak_source=None if peak_flops_per_s is None else peak_source or "override",
            step_time_s=step_time_s,
            method=count.method,
            convention=count.convention,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return asdict(self)
