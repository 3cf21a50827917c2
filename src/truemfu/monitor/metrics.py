"""The metrics of a step: their names and arithmetic, without torch and without clocks.

    StepAmounts (a step's tokens, FLOPs …) + StepTime (how long it took) ─► performance: the `perf/` metrics

Similar steps share one `StepAmounts`, so what depends on it alone is computed once. Rates without a suffix
are the job's: this rank's times the number of ranks. Rates `_per_gpu` are this rank's own. Unknown metrics
are omitted from a row.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from ..utilization import share_of_peak
from .row_side.flops_of_steps import StepFlops

WINDOW_STEPS = 100
PAUSES = ("evaluation", "checkpoint", "generation", "other")
"""What runs between and inside steps without belonging to them."""
_PAUSE_METRICS = {kind: f"perf/{kind}_time" for kind in PAUSES} | {"other": "perf/other_pause_time"}
NOTHING_LEFT_OUT: Mapping[str, float] = MappingProxyType({})


class StepTime(NamedTuple):
    """How long a step took on this rank; it represents several if the ones before it were not logged."""

    steps: int
    elapsed_s: float | None
    data_wait_s: float | None
    between_s: float | None = None
    """From the end of the last step to the first forward pass, without known data wait."""
    forwards: int = 0
    """Forward passes without gradients in that time."""
    left_out_s: Mapping[str, float] = NOTHING_LEFT_OUT
    """Seconds since the last step that are excluded from this one, by what ran in them."""


@dataclass(frozen=True, kw_only=True)
class StepAmounts:
    """What a step processed on this rank; MFU and HFU are model and executed FLOPs over the peak's."""

    samples: int | None
    tokens: int | None
    useful_tokens: float | None
    flops: StepFlops | None
    warmup: bool
    world_size: int
    measured_peak_flops_per_s: float | None = None
    """What `truemfu peak` measured, if the user configured it."""

    @cached_property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The metrics that are divided by a step's seconds, as they are for a step of one second."""
        found: dict[str, float] = {}
        for name, amount in (
            ("tokens", self.tokens),
            ("real_tokens", self.useful_tokens),
            ("samples", self.samples),
        ):
            if amount is not None:
                found[f"perf/{name}_per_second"] = amount * self.world_size
                found[f"perf/{name}_per_second_per_gpu"] = amount
        flops = self.flops
        if flops is not None:
            peak = flops.peak_flops_per_s
            mfu, hfu = (share_of_peak(f, 1.0, peak) for f in (flops.model_flops, flops.hardware_flops))
            if mfu is not None:
                found["perf/mfu"] = mfu
                found["perf/mfu_percent"] = 100 * mfu
                of_measured = share_of_peak(flops.model_flops, 1.0, self.measured_peak_flops_per_s)
                if of_measured is not None:
                    found["perf/mfu_of_measured_peak"] = of_measured
            for name, own_flops in flops.by_model.items():
                own = share_of_peak(own_flops, 1.0, peak)
                if own is not None:
                    found[f"perf/mfu/{name}"] = own
            if hfu is not None:
                found["perf/hfu"] = hfu
                found["perf/hfu_percent"] = 100 * hfu
            found["perf/tflops_per_gpu"] = flops.model_flops / 1e12
        return tuple(found.items())

    @cached_property
    def rates_by_name(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The names of `rates`, and their amounts."""
        names, amounts = zip(*self.rates, strict=True) if self.rates else ((), ())
        return names, amounts

    @cached_property
    def timeless(self) -> dict[str, Any]:
        """The metrics that do not depend on the seconds of a step."""
        found: dict[str, Any] = {}
        if self.tokens and self.useful_tokens is not None:
            found["perf/padding_efficiency"] = self.useful_tokens / self.tokens
        if self.flops is not None:
            found["perf/method"] = self.flops.method
        if self.warmup:
            found["perf/warmup"] = True
        return found

    @cached_property
    def hfu_method(self) -> str | None:
        """How HFU was measured, where it is not based on the count; None without an HFU."""
        flops = self.flops
        is_known = flops is not None and any(name == "perf/hfu" for name, _ in self.rates)
        return flops.executed_method if flops is not None and is_known else None


NOTHING = StepAmounts(samples=None, tokens=None, useful_tokens=None, flops=None, warmup=False, world_size=1)
"""For a step of which nothing is known."""


def performance(amounts: StepAmounts, time: StepTime) -> dict[str, Any]:
    """The `perf/` metrics of one step."""
    steps, seconds, data_wait_s, between_s, forwards, left_out_s = time
    row = amounts.timeless.copy()
    if seconds is not None and seconds > 0:
        row["perf/step_time"] = seconds / steps
        row["perf/steps_per_second"] = steps / seconds
        names, per_second = amounts.rates_by_name
        row.update(zip(names, [amount / seconds for amount in per_second], strict=True))
        if amounts.hfu_method is not None:
            row["perf/hfu_method"] = amounts.hfu_method
    if data_wait_s is not None:
        row["perf/data_wait"] = data_wait_s / steps
    if between_s is not None:
        row["perf/between_steps"] = between_s / steps
    if forwards:
        row["perf/forwards_between_steps"] = forwards
    for kind, paused_s in left_out_s.items():
        row[_PAUSE_METRICS[kind]] = paused_s
    return row


class Window:
    """The last steps after warm-up, and the medians over them."""

    def __init__(self, steps: int = WINDOW_STEPS) -> None:
        self._step_times: deque[float] = deque(maxlen=steps)
        self._mfus: deque[float] = deque(maxlen=steps)

    def add_all(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the metrics of steps; warm-up steps are left out."""
        timed = [row for row in rows if "perf/step_time" in row and "perf/warmup" not in row]
        self._step_times.extend([row["perf/step_time"] for row in timed])
        self._mfus.extend([row["perf/mfu"] for row in timed if "perf/mfu" in row])

    def medians(self) -> dict[str, float]:
        """The medians over the window."""
        row = {}
        if self._step_times:
            row["perf/step_time_median"] = statistics.median(self._step_times)
        if self._mfus:
            row["perf/mfu_median"] = statistics.median(self._mfus)
        return row
