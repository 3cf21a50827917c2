"""The matmul ceiling: what this very device reaches now, when it does nothing but large matrix products.

A datasheet's peak holds at a clock that the power limit may not allow, so a run is best read beside two
measured figures: `burst` (the best short run: the silicon before the power limit cuts in) and `sustained`
(the second half of a longer run: what a training job can hope for).

    each dtype: search over shapes, burst ─► then each dtype: hold its best shape ─► values, and the gap

All bursts come first, so that no dtype is measured on a chip that another one has heated. The gap to the
datasheet splits into two factors, whose product is the rate over the datasheet's:

    clock_of_datasheet = clock run at / datasheet's clock     the power limit's, or the chip's own, doing
    pipe_of_clock      = rate / peak at the clock run at      how full the kernel keeps the arithmetic pipe

Nothing outside changes: own random generator, torch's TF32 setting put back, operands freed after each shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..counters.executed import datasheet_clock_hz
from ..detect import dtype_name, spec_of
from ..tiles import Shape
from .clock_watch import Watch, observed
from .search import Progress, Tried, hold, search

if TYPE_CHECKING:
    import torch

_ACCELERATOR_DTYPES = ("bf16", "fp16", "tf32", "fp8")
_CPU_DTYPES = ("fp32", "bf16")

# Under a matrix product an H200 is at its power limit after 0.1 s, and its clock swings for another second
# before it settles: the second half of 2 s is after that.
_ACCELERATOR_SECONDS = 2.0
_CPU_SECONDS = 0.5

_OFTEN = 0.5


@dataclass(frozen=True, kw_only=True)
class CeilingRun:
    """The best shape of one dtype, in a burst or held.

    `clock_hz` is counted by the SMs, `reported_clock_hz` is what the driver asked for: under load the first
    is lower, and the true one. `power_w` is the mean of about the last second, so a burst has
    none. `throttle` says in which share of the driver's readings each reason held the clock back.
    `limited_by` names the larger loss: the reason that held the clock back (`power_limit`, `clock` where no
    reason is told) or `pipe`. What is not known is None.
    """

    shape: Shape
    seconds: float
    flops_per_s: float
    of_datasheet: float | None = None
    clock_of_datasheet: float | None = None
    pipe_of_clock: float | None = None
    clock_hz: float | None = None
    reported_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle: dict[str, float] | None = None
    limited_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class MatmulCeiling:
    """What one dtype reached. Where the device cannot run it, there are no runs and `skipped` says why.

    `notes` say what could not be read of this device, and why.
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
        """That of the burst; the one held may be another."""
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
    four seconds more per dtype on an accelerator. `progress` is told in words what is measured next.
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
    tell = progress or _silent
    where: AbstractContextManager[object] = (
        torch.cuda.device(target) if target.type == "cuda" else nullcontext()
    )
    watch = Watch.open(target)
    try:
        with where, torch.no_grad():
            bursts = {name: search(target, name, watch, tell) for name in names}
            held: dict[str, Tried] = {}
            for name, tried in bursts.items():
                if not isinstance(tried, str):
                    held[name] = hold(target, name, tried, watch, seconds, tell, rested=not held)
    finally:
        watch.close()
    return tuple(_ceiling(target, name, tried, held.get(name), watch.notes) for name, tried in bursts.items())


def limited_by(
    clock_of_datasheet: float | None, pipe_of_clock: float | None, throttle: Mapping[str, float] | None
) -> str | None:
    """What cost more of the datasheet's peak: the clock, by the reason that held it back, or the pipe.

    Without the two factors it is the reason the driver told, where it told one. Idling is no reason.
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
        # Where nothing slows the chip, or something else did during the search, a part of the held run wins.
        bursts += [replace(held, runs=(run,), loaded_s=run.seconds) for run in held.runs]
    burst = max(bursts, key=lambda one: one.flops_per_s, default=None)
    return MatmulCeiling(
        dtype=dtype,
        device_name=_name_of(device),
        burst=None if burst is None else _ran(burst, peak, clock_hz),
        sustained=None if held is None else _ran(held, peak, clock_hz),
        datasheet_flops_per_s=peak,
        datasheet_clock_hz=clock_hz,
        skipped=tried if isinstance(tried, str) else None,
        notes=notes,
    )


def _ran(tried: Tried, peak_flops_per_s: float | None, datasheet_clock_hz: float | None) -> CeilingRun:
    """A shape's runs beside the datasheet."""
    seen = observed(tried.runs, tried.loaded_s)
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


def _silent(_: str) -> None:
    """Nobody watches."""


def _as_device(device: torch.device | str | int | None) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return accelerator or torch.device("cpu")
    if isinstance(device, int):
        if accelerator is None:
            raise UsageError(f"there is no accelerator here, so no device {device}; use device='cpu'")
        device = f"{accelerator.type}:{device}"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device must be one torch can open, such as 'cuda:0'; got {device!r}") from None
    if found.type == "cpu":
        return found
    if accelerator is None or accelerator.type != found.type:
        raise UsageError(f"there is no {found.type} device here; use device='cpu'")
    count = torch.accelerator.device_count()
    if found.index is not None and found.index >= count:
        raise UsageError(f"there is no {found}; this machine has {count}, counted from 0")
    return found


def _name_of(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    return str(device)
