"""What one step's measurements come to: the names and the arithmetic, apart from torch and from time.

Rates without a suffix are the job's: this rank's times the number of ranks, until ranks are gathered. Those
`_per_gpu` are this rank's own. What is not known is left out of a row.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..utilization import share_of_peak
from .counting import StepFlops

WINDOW_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """A step as it was measured on this rank; `elapsed_s` covers `steps` steps where some were not logged."""

    steps: int
    elapsed_s: float | None
    data_wait_s: float | None
    samples: int | None
    tokens: int | None
    useful_tokens: float | None
    flops: StepFlops | None
    warmup: bool
    world_size: int
    measured_peak_flops_per_s: float | None = None
    """What `truemfu peak` measured, where the user gave it."""

    @property
    def step_time_s(self) -> float | None:
        """Seconds of one step."""
        return None if self.elapsed_s is None else self.elapsed_s / self.steps

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOPs over what the peak would have done in that time."""
        flops = self.flops
        if flops is None:
            return None
        return share_of_peak(flops.model_flops, self.elapsed_s, flops.peak_flops_per_s)

    @cached_property
    def hfu(self) -> float | None:
        """Executed FLOPs over what the peak would have done in that time."""
        flops = self.flops
        if flops is None:
            return None
        return share_of_peak(flops.hardware_flops, self.elapsed_s, flops.peak_flops_per_s)


def performance(measures: StepMeasures) -> dict[str, Any]:
    """The `perf/` metrics of one step."""
    row: dict[str, Any] = {}
    seconds = measures.elapsed_s
    if seconds is not None and seconds > 0:
        step_time_s = seconds / measures.steps
        row["perf/step_time"] = step_time_s
        row["perf/steps_per_second"] = 1 / step_time_s
        for name, amount in (
            ("tokens", measures.tokens),
            ("real_tokens", measures.useful_tokens),
            ("samples", measures.samples),
        ):
            if amount is not None:
                rate = amount / seconds
                row[f"perf/{name}_per_second"] = rate * measures.world_size
                row[f"perf/{name}_per_second_per_gpu"] = rate
        mfu, hfu = measures.mfu, measures.hfu
        if mfu is not None:
            row["perf/mfu"] = mfu
            row["perf/mfu_percent"] = 100 * mfu
            if measures.measured_peak_flops_per_s is not None and measures.flops is not None:
                row["perf/mfu_of_measured_peak"] = share_of_peak(
                    measures.flops.model_flops, seconds, measures.measured_peak_flops_per_s
                )
        if hfu is not None:
            row["perf/hfu"] = hfu
            row["perf/hfu_percent"] = 100 * hfu
            if measures.flops is not None and measures.flops.executed_method is not None:
                row["perf/hfu_method"] = measures.flops.executed_method
        if measures.flops is not None:
            row["perf/tflops_per_gpu"] = measures.flops.model_flops / seconds / 1e12
    if measures.tokens and measures.useful_tokens is not None:
        row["perf/padding_efficiency"] = measures.useful_tokens / measures.tokens
    if measures.data_wait_s is not None:
        row["perf/data_wait"] = measures.data_wait_s / measures.steps
    if measures.warmup:
        row["perf/warmup"] = True
    return row


class Window:
    """The last steps that were no warm-up, and the medians over them."""

    def __init__(self, steps: int = WINDOW_STEPS) -> None:
        self._step_times: deque[float] = deque(maxlen=steps)
        self._mfus: deque[float] = deque(maxlen=steps)

    def add(self, measures: StepMeasures) -> None:
        """Take a step in, unless it was a warm-up."""
        if measures.warmup or measures.step_time_s is None:
            return
        self._step_times.append(measures.step_time_s)
        if (mfu := measures.mfu) is not None:
            self._mfus.append(mfu)

    def medians(self) -> dict[str, float]:
        """Medians beside the last values."""
        row = {}
        if self._step_times:
            row["perf/step_time_median"] = statistics.median(self._step_times)
        if self._mfus:
            row["perf/mfu_median"] = statistics.median(self._mfus)
        return row
