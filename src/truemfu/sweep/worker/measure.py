"""The timed steps, and the FLOP count of a step.

    warm up ─► steps in chunks: mark, step, mark, step, … ─► wait for the device ─► stable? ─► next chunk
                        no synchronisation inside a chunk

A step lasts from the end of the previous step to its own end, including the wait for its batch. Marks are
CUDA events on a GPU and the host's clock elsewhere. Memory peaks are read before counting and profiling.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch import Tensor

from ...convention import Attention, Convention
from ...flops import FlopCount, count_step, count_target
from ...hardware.ceiling.products import synchronize
from ...monitor.timing.clock import StepClock, clock_for, duration_s
from ...records import Flops, StepTimes, SweepCase
from ...utilization import Utilization, calculate_mfu
from ..trainers.base import Trainer
from .case_model import Batch, count_target_of


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """The timed steps: their times, losses, and the time they waited for data."""

    steps: StepTimes
    losses: list[float]
    data_wait_s: float


def warm_up(trainer: Trainer, batches: Iterator[Batch], steps: int, device: torch.device) -> None:
    """Untimed steps: kernels are chosen, memory is allocated, code is compiled."""
    for _ in range(steps):
        trainer.step(next(batches))
    synchronize(device)


def time_steps(
    trainer: Trainer,
    batches: Iterator[Batch],
    case: SweepCase,
    device: torch.device,
    *,
    agree: Callable[[int], int] = lambda planned: planned,
    now_s: Callable[[], float] = time.perf_counter,
) -> TimedPass:
    """Time steps until their median is stable, or up to the case's limit.

    `agree` makes of the number of steps that this rank would time next the one that all ranks time.
    """
    times_s: list[float] = []
    waits_s: list[float] = []
    losses: list[Tensor] = []
    began_s, planned = now_s(), case.min_steps
    clock = clock_for(device)
    while planned > 0:
        marks = StepClock(clock, now_s=now_s)
        marks.begin()
        spans = []
        for _ in range(planned):
            asked_s = now_s()
            batch = next(batches)
            waits_s.append(now_s() - asked_s)
            losses.append(trainer.step(batch).detach())
            spans.append(marks.end(now_s()))
        synchronize(device)
        for span in spans:
            has_passed = clock.has_passed(span.end)
            assert has_passed
        times_s += [seconds for span in spans if (seconds := duration_s(span)) is not None]
        planned = agree(_more_steps(times_s, case, now_s() - began_s))
    return TimedPass(
        steps=step_times(times_s, case.target_spread, clock.source),
        losses=torch.stack([loss.float().reshape(()) for loss in losses]).tolist(),
        data_wait_s=statistics.median(waits_s),
    )


def together(ranks: Sequence[TimedPass]) -> TimedPass:
    """The timed steps of all ranks: the times of its slowest rank, and the mean loss of all ranks."""
    return TimedPass(
        steps=max((rank.steps for rank in ranks), key=lambda steps: steps.median_s),
        losses=[statistics.fmean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True)],
        data_wait_s=max(rank.data_wait_s for rank in ranks),
    )


def _more_steps(times_s: list[float], case: SweepCase, elapsed_s: float) -> int:
    """How many further steps to time: as many as so far, within the case's limits; 0 when stable."""
    error = median_error(times_s)
    if error is not None and error <= case.target_spread:
        return 0
    left_s = case.max_timed_s - elapsed_s
    affordable = int(left_s / max(statistics.median(times_s), 1e-9))
    return max(0, min(len(times_s), case.max_steps - len(times_s), affordable))


def step_times(times_s: list[float], target_spread: float, source: str) -> StepTimes:
    """The steps with their statistics."""
    ordered = sorted(times_s)
    error = median_error(times_s)
    return StepTimes(
        times_s=times_s,
        median_s=statistics.median(ordered),
        mean_s=statistics.fmean(ordered),
        p10_s=_quantile(ordered, 0.1),
        p90_s=_quantile(ordered, 0.9),
        relative_error=error,
        source=source,
        stable=error is not None and error <= target_spread,
    )


def median_error(times_s: list[float]) -> float | None:
    """The median's standard error over the median, for any distribution; None below five steps.

    Of n sorted values, those at ranks n/2 ± √n/2 enclose the true median two times in three (the number of
    values below it is binomial, with a standard deviation of √n/2); half their distance is the error.
    """
    count = len(times_s)
    if count < 5:
        return None
    ordered = sorted(times_s)
    reach = math.sqrt(count) / 2 / count
    half_width_s = (_quantile(ordered, 0.5 + reach) - _quantile(ordered, 0.5 - reach)) / 2
    return half_width_s / statistics.median(ordered)


def _quantile(ordered: list[float], share: float) -> float:
    """The quantile of a sorted list, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def count_needed(case: SweepCase) -> FlopCount:
    """The model's FLOPs of one step, counted without a trainer."""
    return count_target(count_target_of(case), convention=_convention(case), backward=True)


def _convention(case: SweepCase) -> Convention:
    return Convention(attention=cast(Attention, case.attention))  # checked there


def count_work(
    trainer: Trainer,
    batch: Batch,
    case: SweepCase,
    device: torch.device,
    step_time_s: float,
    *,
    needed: FlopCount,
) -> Flops:
    """The model's FLOPs (`needed`), and those this trainer executes in a real step."""
    convention = _convention(case)
    executed = count_step(trainer.step, batch, convention=convention)
    used = Utilization.of(needed, step_time_s, device=device)
    return Flops(
        model_flops=needed.model_flops,
        hardware_flops=executed.hardware_flops,
        model_method=needed.method,
        hardware_method=executed.method,
        attention=convention.attention,
        peak_flops_per_s=used.peak_flops_per_s,
        peak_source=used.peak_source,
        mfu=used.mfu,
        hfu=calculate_mfu(executed.hardware_flops, step_time_s, used.peak_flops_per_s),
        uncounted=dict(Counter(needed.uncounted) | Counter(executed.uncounted)),
    )


def summed(ranks: Sequence[Flops], step_time_s: float) -> Flops:
    """The FLOPs of a step of all ranks, over the peak of all their devices together.

    MFU = Σ FLOPs of a rank / (step time × Σ peak of its device); unknown if the peak of one device is.
    """
    first = ranks[0]
    peaks = [rank.peak_flops_per_s for rank in ranks]
    known = [peak for peak in peaks if peak is not None]
    peak = sum(known) if len(known) == len(peaks) else None
    model_flops = sum(rank.model_flops for rank in ranks)
    hardware_flops = sum(rank.hardware_flops for rank in ranks)
    return msgspec.structs.replace(
        first,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        peak_flops_per_s=peak,
        mfu=calculate_mfu(model_flops, step_time_s, peak),
        hfu=calculate_mfu(hardware_flops, step_time_s, peak),
        uncounted=dict(sum((Counter(rank.uncounted) for rank in ranks), Counter())),
    )
