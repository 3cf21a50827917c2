"""The matmul ceiling: the rate this device reaches now with nothing but large matrix products.

A datasheet's peak assumes a clock that the power limit may not allow, so a run is best compared with two
measured figures: `burst` (the best short run, before the power limit takes effect) and `sustained` (the
second half of a longer run: what a training job can reach).

    each dtype: search over shapes, burst ─► then each dtype: hold its best shape ─► values, and the gap

All bursts come first, so that no dtype is measured on a chip that another one has heated. The gap to the
datasheet is two factors, whose product is the rate relative to the datasheet's:

    clock_of_datasheet = clock run at / datasheet's clock     set by the power limit or the chip itself
    pipe_of_clock      = rate / peak at the clock run at      how full the kernel keeps the arithmetic pipe

No side effects: own random generator, torch's TF32 setting restored, operands freed after each shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..counters.executed import datasheet_clock_hz
from ..detect import device_name, dtype_name, spec_of
from ..tiles import Shape
from .clock_watch import Conditions, Watch, conditions_of
from .search import Progress, Tried, hold, search

if TYPE_CHECKING:
    import torch

_ACCELERATOR_DTYPES = ("bf16", "fp16", "tf32", "fp8")
_CPU_DTYPES = ("fp32", "bf16")

# In matrix products an H200 reaches its power limit after 0.1 s, and its clock oscillates for another second
# before it settles: the second half of 2 s is after that.
_ACCELERATOR_SECONDS = 2.0
_CPU_SECONDS = 0.5

_OFTEN = 0.5


@dataclass(frozen=True, kw_only=True)
class CeilingRun(Conditions):
    """The best shape of one dtype, in a burst or held.

    `clock_hz` is measured by the SMs, `reported_clock_hz` is requested by the driver: under load the first
    is lower, and the actual one. `power_w` is the mean of about the last second, so a burst has
    none. `throttle` has the share of the driver's readings with each throttle reason.
    `limited_by` names the larger loss: the throttle reason (`power_limit`, `clock` if none is reported)
    or `pipe`. Unknown values are None.
    """

    shape: Shape
    seconds: float
    flops_per_s: float
    of_datasheet: float | None = None
    clock_of_datasheet: float | None = None
    pipe_of_clock: float | None = None
    limited_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class MatmulCeiling:
    """The rates of one dtype. If the device cannot run it, there are no runs and `skipped` has the reason.

    `notes` name what could not be read on this device, and why.
    """

    dtype: str
    device_name: str
    burst: CeilingRun | None = None
    sustained: CeilingRun | None = None
    datasheet_flops_per_s: float | None = None
    datasheet_clock_hz: float | None = None
    skipped: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape | None:
        """The shape of the burst; that of the sustained run may differ."""
        return None if self.burst is None else self.burst.shape

    @property
    def burst_flops_per_s(self) -> float | None:
        return None if self.burst is None else self.burst.flops_per_s

    @property
    def sustained_flops_per_s(self) -> float | None:
        return None if self.sustained is None else self.sustained.flops_per_s

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return {
            "dtype": self.dtype,
            "device_name": self.device_name,
            "shape": self.shape,
            "burst_flops_per_s": self.burst_flops_per_s,
            "sustained_flops_per_s": self.sustained_flops_per_s,
            **asdict(self),
        }


def measure_ceiling(
    device: torch.device | str | int | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> tuple[MatmulCeiling, ...]:
    """Time large matrix products on `device` (None: the current accelerator, else the CPU), dtype by dtype.

    `dtypes` defaults to bf16, fp16, tf32 and fp8 on an accelerator, fp32 and bf16 on a CPU; `seconds` is the
    length of each sustained run, 2 s on an accelerator and 0.5 s on a CPU. The search takes about
    four seconds more per dtype on an accelerator. `progress` is called with a text on what is measured next.
    """
    import torch

    target = _as_device(device)
    on_cpu = target.type == "cpu"
    if dtypes is None:
        dtypes = _CPU_DTYPES if on_cpu else _ACCELERATOR_DTYPES
    if seconds is None:
        seconds = _CPU_SECONDS if on_cpu else _ACCELERATOR_SECONDS
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds must be a positive number; got {seconds!r}")
    names = tuple(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))
    report = progress or (lambda text: None)
    where: AbstractContextManager[object] = (
        torch.cuda.device(target) if target.type == "cuda" else nullcontext()
    )
    watch = Watch.open(target)
    try:
        with where, torch.no_grad():
            bursts = {name: search(target, name, watch, report) for name in names}
            held: dict[str, Tried] = {}
            for name, tried in bursts.items():
                if not isinstance(tried, str):
                    held[name] = hold(target, name, tried, watch, seconds, report, rested=not held)
    finally:
        watch.close()
    return tuple(_ceiling(target, name, tried, held.get(name), watch.notes) for name, tried in bursts.items())


def limited_by(
    clock_of_datasheet: float | None, pipe_of_clock: float | None, throttle: Mapping[str, float] | None
) -> str | None:
    """What cost more of the datasheet's peak: the clock, by its throttle reason, or the pipe.

    Without the two factors it is the reason the driver reported, if any. Idling is not a reason.
    """
    often = {
        name: share for name, share in (throttle or {}).items() if share >= _OFTEN and name != "gpu_idle"
    }
    reason = max(often, key=lambda name: often[name], default=None)
    if clock_of_datasheet is None or pipe_of_clock is None:
        return reason
    if clock_of_datasheet < min(pipe_of_clock, 1.0):
        return reason or "clock"
    return "pipe"


def _ceiling(
    device: torch.device, dtype: str, tried: list[Tried] | str, held: Tried | None, notes: tuple[str, ...]
) -> MatmulCeiling:
    spec = spec_of(device)
    peak = None if spec is None else spec.peak(dtype)
    clock_hz = None if spec is None else datasheet_clock_hz(spec, dtype)
    bursts = [] if isinstance(tried, str) else tried[:1]
    if held is not None:
        # Part of the sustained run is faster if nothing slows the chip, or something did during the search.
        bursts += [replace(held, runs=(run,), loaded_s=run.seconds) for run in held.runs]
    burst = max(bursts, key=lambda one: one.flops_per_s, default=None)
    return MatmulCeiling(
        dtype=dtype,
        device_name=device_name(device),
        burst=None if burst is None else _ceiling_run(burst, peak, clock_hz),
        sustained=None if held is None else _ceiling_run(held, peak, clock_hz),
        datasheet_flops_per_s=peak,
        datasheet_clock_hz=clock_hz,
        skipped=tried if isinstance(tried, str) else None,
        notes=notes,
    )


def _ceiling_run(
    tried: Tried, peak_flops_per_s: float | None, datasheet_clock_hz: float | None
) -> CeilingRun:
    """A shape's runs compared with the datasheet."""
    seen = conditions_of(tried.runs, tried.loaded_s)
    share = None if peak_flops_per_s is None else tried.flops_per_s / peak_flops_per_s
    clock = seen.clock_hz / datasheet_clock_hz if seen.clock_hz and datasheet_clock_hz else None
    pipe = None if share is None or clock is None else share / clock
    return CeilingRun(
        shape=tried.shape,
        seconds=tried.seconds,
        flops_per_s=tried.flops_per_s,
        of_datasheet=share,
        clock_of_datasheet=clock,
        pipe_of_clock=pipe,
        limited_by=limited_by(clock, pipe, seen.throttle),
        **asdict(seen),
    )


def _as_device(device: torch.device | str | int | None) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return accelerator or torch.device("cpu")
    kind = "cuda" if accelerator is None else accelerator.type
    try:
        found = torch.device(f"{kind}:{device}" if isinstance(device, int) else device)
    except RuntimeError:
        raise UsageError(f"device must be one torch can open, such as 'cuda:0'; got {device!r}") from None
    count = 0 if accelerator is None or found.type != kind else torch.accelerator.device_count()
    if found.type != "cpu" and (found.index or 0) >= count:
        raise UsageError(f"no device {found}: this machine has {count}, numbered from 0; use device='cpu'")
    return found
