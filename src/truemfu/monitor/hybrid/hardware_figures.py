"""A window of counters combined with its steps: executed FLOPs, cross-check, waterfall, energy.

    steps ─► StepSums ─┐
    counters ─► MeasuredWindow ┼─► figures_of ─► HardwareFigures ─► metrics of a row, the closing summary
    one count by shape ─► KnownWork ─┘

Pure arithmetic. The numerator of MFU stays the count; counters measure executed FLOPs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from ...crosscheck import CrossCheck, KnownWork, crosscheck
from ...hardware.counters.executed import datasheet_clock_hz, executed_flops_per_s, on_tensor_pipes
from ...hardware.counters.samples import GpuProcess
from ...hardware.nsight.audited import AuditedKernels
from ...hardware.specs import DeviceSpec
from ...utilization import ratio
from ...waterfall import Waterfall, WaterfallInputs, waterfall
from ..metrics import StepAmounts, StepTime
from ..ranks.amounts import plus
from .hardware_watch import MeasuredWindow

_PARTS = ("attention_flops", "few_channel_flops", "grouped_flops", "grouped_padded_flops", "unaligned_flops")


@dataclass(kw_only=True)
class StepSums:
    """Sums over steps; a value that is unknown for one step is unknown for all."""

    steps: int = 0
    elapsed_s: float = 0.0
    data_wait_s: float = 0.0
    between_s: float = 0.0
    forwards: int = 0
    model_flops: float | None = 0.0
    hardware_flops: float | None = 0.0
    peak_flops: float | None = 0.0
    """Σ seconds × peak: the FLOPs possible at the peak."""
    tokens: float | None = 0.0
    useful_tokens: float | None = 0.0
    collective_s: float = 0.0
    timed_s: float = 0.0
    """Time in collectives, and the time in which they were timed: set at the end of a window."""

    def add(self, amounts: StepAmounts, time: StepTime) -> None:
        """Add a step whose `flops` are the counted ones."""
        shares, elapsed_s = amounts.own, time.elapsed_s
        peak = None if amounts.flops is None else amounts.flops.peak_flops_per_s
        self.steps += time.steps
        self.elapsed_s += elapsed_s or 0.0
        self.data_wait_s += time.data_wait_s or 0.0
        self.between_s += time.between_s or 0.0
        self.forwards += time.forwards
        self.model_flops = plus(self.model_flops, shares.get("model_flops"))
        self.hardware_flops = plus(self.hardware_flops, shares.get("hardware_flops"))
        self.peak_flops = plus(
            self.peak_flops, None if peak is None or elapsed_s is None else peak * elapsed_s
        )
        self.tokens = plus(self.tokens, shares.get("tokens"))
        self.useful_tokens = plus(self.useful_tokens, shares.get("useful_tokens"))

    def merge(self, other: StepSums) -> None:
        """Add the sums over other steps."""
        for name, amount in vars(other).items():
            total = getattr(self, name)
            setattr(self, name, None if total is None or amount is None else total + amount)

    @property
    def is_complete(self) -> bool:
        """Whether every step had its FLOPs."""
        return self.hardware_flops is not None

    def per_s(self, name: str) -> float | None:
        """One of the sums, per second."""
        amount: float | None = getattr(self, name)
        return None if amount is None or not self.elapsed_s else amount / self.elapsed_s


@dataclass(frozen=True, kw_only=True)
class HardwareFigures:
    """What the GPU did in a window; None where unknown."""

    measured: MeasuredWindow
    steps: int
    executed_flops_per_s: float | None
    executed_hfu: float | None
    executed_over_activity: float | None
    """The audit's correction of the tensor pipe's activity; None: executed is an upper bound."""
    power_w: float | None
    energy_j_per_step: float | None
    energy_j_per_million_tokens: float | None
    check: CrossCheck | None
    fall: Waterfall | None

    def metrics(self) -> dict[str, float | str]:
        """The `perf/` metrics of the window."""
        rate, clock_hz, window = self.executed_flops_per_s, self.measured.clock_hz, self.measured.window
        row: dict[str, float | str | None] = {
            "perf/executed_tflops_per_gpu": None if rate is None else rate / 1e12,
            "perf/executed_hfu": self.executed_hfu,
            "perf/executed_over_activity": self.executed_over_activity,
            "perf/sm_clock_mhz": None if clock_hz is None else clock_hz / 1e6,
            "perf/clock_source": None if clock_hz is None else self.measured.clock_source,
            "perf/power_w": self.power_w,
            "perf/energy_j_per_step": self.energy_j_per_step,
            "perf/energy_j_per_million_tokens": self.energy_j_per_million_tokens,
            "perf/tensor_active": window.tensor_active,
            "perf/sm_active": window.sm_active,
            "perf/dram_active": window.dram_active,
            **({} if self.check is None else self.check.as_metrics()),
            **({} if self.fall is None else self.fall.as_metrics()),
        }
        return {name: value for name, value in row.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the closing summary."""
        check, fall, window = self.check, self.fall, self.measured.window
        return {
            "seconds": window.seconds,
            "steps": self.steps,
            "executed_flops_per_s": self.executed_flops_per_s,
            "executed_hfu": self.executed_hfu,
            "executed_over_activity": self.executed_over_activity,
            "clock_hz": self.measured.clock_hz,
            "clock_source": self.measured.clock_source,
            "reported_clock_hz": window.sm_clock_hz,
            "power_w": self.power_w,
            "energy_j_per_step": self.energy_j_per_step,
            "energy_j_per_million_tokens": self.energy_j_per_million_tokens,
            "tensor_active": window.tensor_active,
            "sm_active": window.sm_active,
            "dram_active": window.dram_active,
            "executed_over_counted": None if check is None else check.executed_flops / check.counted_flops,
            "executed_over_expected": None if check is None else check.ratio,
            "limiter": None if fall is None else fall.limiter,
            "advice": [] if fall is None else list(fall.advice()),
            "waterfall": None if fall is None else fall.as_dict(),
        }


def figures_of(
    sums: StepSums,
    measured: MeasuredWindow,
    work: KnownWork,
    *,
    spec: DeviceSpec | None,
    audited: AuditedKernels | None,
    world_size: int,
    is_datasheet_peak: bool,
) -> HardwareFigures:
    """The figures of a window. `work` is that of a typical step, as shares of its executed FLOPs, by dtype as
    shares of the model's. `audited` corrects the activity; without it, executed is an upper bound.
    `is_datasheet_peak` is False if the user configured a peak: the clock and the pipes' activity then do not
    relate to it."""
    window, executed = measured.window, None
    correction = None if audited is None else audited.executed_over_activity
    is_all_on_tensor_pipes = on_tensor_pipes(work.flops_by_dtype)
    if is_all_on_tensor_pipes:
        executed = executed_flops_per_s(
            window,
            spec,
            # The audit's ratio refers to the executed mix of dtypes, which may differ from the counted one.
            flops_by_dtype=work.flops_by_dtype
            if audited is None or correction is None
            else audited.executed_by_dtype,
            clock_hz=measured.clock_hz,
            executed_over_activity=1.0 if correction is None else correction,
        )
    left_out = None
    if not is_datasheet_peak:
        left_out = "the peak is not the datasheet's"
    elif not is_all_on_tensor_pipes:
        left_out = "some of the work may not run on the tensor pipe (plain fp32 does not)"
    power_w = window.power_w
    if window.energy_j is not None and window.seconds > 0:
        power_w = window.energy_j / window.seconds
    # A job's energy is not known from the counters of one of its GPUs.
    energy_j = None if power_w is None or world_size > 1 else power_w * sums.elapsed_s
    return HardwareFigures(
        measured=measured,
        steps=sums.steps,
        executed_flops_per_s=executed,
        executed_hfu=ratio(executed, sums.per_s("peak_flops")),
        executed_over_activity=correction,
        power_w=power_w,
        energy_j_per_step=None if energy_j is None or not sums.steps else energy_j / sums.steps,
        energy_j_per_million_tokens=None
        if energy_j is None or not sums.tokens
        else energy_j / sums.tokens * 1e6,
        check=_check(sums, executed, work, window.processes, is_upper_bound=correction is None),
        fall=_fall(
            sums,
            measured,
            executed,
            work,
            None if left_out else spec,
            world_size=world_size,
            left_out=left_out,
            is_upper_bound=correction is None,
        ),
    )


def _check(
    sums: StepSums,
    executed: float | None,
    work: KnownWork,
    processes: tuple[GpuProcess, ...] | None,
    *,
    is_upper_bound: bool,
) -> CrossCheck | None:
    counted = sums.hardware_flops
    if counted is None or executed is None:
        return None

    parts = {name: share * counted for name in _PARTS if (share := getattr(work, name)) is not None}
    of_window = replace(
        work,
        flops_by_dtype={dtype: share * counted for dtype, share in work.flops_by_dtype.items()},
        other_processes=_others(processes or ()),
        **parts,
    )
    return crosscheck(counted, executed * sums.elapsed_s, of_window, is_upper_bound=is_upper_bound)


def _others(processes: tuple[GpuProcess, ...]) -> list[int]:
    """The other processes on the GPU; empty if ours is not listed: the driver may report the host's PIDs."""
    own = os.getpid()
    if all(process.pid != own for process in processes):
        return []
    return [process.pid for process in processes if process.pid != own]


def _fall(
    sums: StepSums,
    measured: MeasuredWindow,
    executed: float | None,
    work: KnownWork,
    spec: DeviceSpec | None,
    *,
    world_size: int,
    left_out: str | None,
    is_upper_bound: bool,
) -> Waterfall | None:
    window, counted = measured.window, sums.per_s("hardware_flops")
    busy = window.graphics_active if spec is not None else None
    masked = None
    if counted is not None and work.attention_flops and work.attention_executed_share is not None:
        skipped = 1 - work.attention_executed_share
        # Under the causal convention kernels execute more than was counted: not a separate part.
        masked = counted * work.attention_flops * skipped if skipped > 0 else None
    efficiency = None
    if sums.tokens and sums.useful_tokens is not None:
        efficiency = sums.useful_tokens / sums.tokens
    fall = waterfall(
        WaterfallInputs(
            peak_flops_per_s=sums.per_s("peak_flops"),
            model_flops_per_s=sums.per_s("model_flops"),
            hardware_flops_per_s=counted,
            executed_flops_per_s=executed,
            datasheet_clock_hz=datasheet_clock_hz(spec),
            mean_clock_hz=measured.clock_hz,
            throttle=window.throttle,
            gpu_busy_share=busy,
            sm_active_share=window.sm_active if spec is not None else None,
            tensor_active_share=window.tensor_active if spec is not None else None,
            dram_active_share=window.dram_active,
            data_wait_share=sums.data_wait_s / sums.elapsed_s if sums.elapsed_s else None,
            between_steps_share=sums.between_s / sums.elapsed_s if sums.elapsed_s else None,
            forwards_between_steps=sums.forwards,
            # A single GPU does not wait for others: the remaining idle time is late kernel launches.
            launch_gap_share=1 - busy if busy is not None and world_size == 1 else None,
            tile_factor=_over_everything(work),
            masked_flops_per_s=masked,
            padding_efficiency=efficiency,
            collective_share=sums.collective_s / sums.timed_s if sums.timed_s else None,
            left_out=left_out,
            world_size=world_size,
        )
    )
    if fall is None or executed is None or not is_upper_bound:
        return fall
    return replace(fall, notes=(*fall.notes, _UPPER_BOUND_NOTE))


_UPPER_BOUND_NOTE = (
    "executed FLOPs are an upper bound without an audit, and so are the FLOPs executed beyond the count; for "
    "an audit, type `truemfu audit --json -- python train.py > audit.json`, with a TrainingMonitor in "
    "train.py, and set hybrid_mode.audit to that file (docs/hardware.md)"
)


def _over_everything(work: KnownWork) -> float | None:
    """The tile factor of a whole step: attention's own tiles are unknown and not included."""
    if work.tile_factor is None or work.attention_flops is None:
        return work.tile_factor
    return 1 + (work.tile_factor - 1) * (1 - work.attention_flops)
