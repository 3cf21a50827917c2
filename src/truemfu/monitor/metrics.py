"""The metrics of a step: their names and arithmetic, without torch and without clocks.

    StepAmounts (a step's tokens, FLOPs …) + StepTime (how long it took) ─► performance: the `perf/` metrics

Similar steps share one `StepAmounts`, so what depends on it alone is computed once. Rates without a suffix
are the job's: what all ranks did in this step, over the time it took rank 0. Rates `_per_gpu` are this rank's
own. Unknown metrics are omitted from a row.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..run_summary.sums import NO_PAUSES, PAUSES, PHASES
from ..utilization import share_of_peak
from .ranks.amounts import PEAK, Amounts, Exact, exact
from .ranks.role import WHOLE, RankRole
from .step_flops.source import ApartFlops, StepFlops, UnknownFlops

WINDOW_STEPS = 100
_PAUSE_METRICS = {kind: f"perf/{kind}_time" for kind in PAUSES} | {"other": "perf/other_pause_time"}
_PHASES_WITHOUT_TRAINING = ("data_wait", "no_grad")
"""All others may train: a frozen encoder that is called before the watched model is in "other"."""
_PHASE_METRICS = {phase: f"perf/phase/{phase}" for phase in PHASES}


class StepTime(NamedTuple):
    """How long a step took on this rank; it represents several if the ones before it were not logged."""

    steps: int
    elapsed_s: float | None
    data_wait_s: float | None
    between_s: float | None = None
    """From the end of the last step to the first forward pass, without known data wait."""
    forwards: int = 0
    """Forward passes without gradients in that time."""
    left_out_s: Mapping[str, float] = NO_PAUSES
    """Seconds since the last step that are excluded from this one, by what ran in them."""
    phases_s: Mapping[str, float] | str | None = None
    """Seconds in each phase, which add up to `elapsed_s`, or why they are unknown; None if not asked for."""
    gap_s: float | None = 0.0
    """Those of them that the caller did not exclude: an unusual gap before the step. None if unknown."""


_SIZES = {
    "samples": "perf/samples_per_second",
    "tokens": "perf/tokens_per_second",
    "useful_tokens": "perf/real_tokens_per_second",
}
"""Amounts of a batch, and the rates that they are."""
_MODEL_FLOPS, _MEASURED_PEAK = "model_flops", "measured_peak_flops_per_s"
_PER_GPU_IN_JOB = (*_SIZES.values(), "perf/mfu", "perf/hfu")
"""Rates that a row also has for this rank alone."""


def _share(flops: float | Exact | None, peak: float | Exact | None) -> float | None:
    if flops is None or peak is None:
        return None
    return share_of_peak(float(flops), 1.0, float(peak))


@dataclass(frozen=True, kw_only=True)
class StepAmounts:
    """What was counted on this rank in a step; MFU and HFU are model and executed FLOPs over the peak's."""

    samples: int | None
    tokens: int | None
    useful_tokens: float | None
    flops: StepFlops | None
    warmup: bool
    """Whether its time is not representative: a first step, one that compiles, is profiled or observed."""
    unknown: UnknownFlops | None = None
    """Why there are no `flops`, and the estimate in their place."""
    apart: ApartFlops | None = None
    """What this rank did without gradients; None if the run did nothing of the kind so far."""
    observed: bool = False
    role: RankRole = WHOLE
    """Which part of these amounts is this rank's."""
    in_job: bool = False
    """Whether the rates without a suffix are those of a job, which `job` has; else they are this rank's."""
    job: Amounts | None = None
    """The sums over all ranks, this one included; None if unknown."""
    measured_peak_flops_per_s: float | None = None
    """What `truemfu peak` measured, if the user configured it."""

    @cached_property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The metrics that are divided by a step's seconds, as they are for a step of one second."""
        own = self._rates_of(self.own)
        found = own.copy()
        if self.in_job:
            found = {} if self.job is None else self._rates_of(self.job)
        per_gpu = _PER_GPU_IN_JOB if self.in_job else _SIZES.values()
        found |= {f"{name}_per_gpu": own[name] for name in per_gpu if name in own}
        if self.flops is not None:
            found["perf/tflops_per_gpu"] = float(self.own[_MODEL_FLOPS]) / 1e12
        estimate = None if self.unknown is None else self.unknown.estimate
        if estimate is not None:
            flops = exact(estimate.model_flops, self.role.flops_shared_by)
            if (mfu := _share(flops, estimate.peak_flops_per_s)) is not None:
                found["perf/mfu_estimate"] = mfu
        return tuple(found.items())

    def _rates_of(self, sums: Mapping[str, Exact]) -> dict[str, float]:
        """The rates of some amounts that were processed in one second."""
        found = {rate: float(sums[name]) for name, rate in _SIZES.items() if name in sums}
        flops, peak, prefix = sums.get(_MODEL_FLOPS), sums.get(PEAK), f"{_MODEL_FLOPS}/"
        mfu, hfu = _share(flops, peak), _share(sums.get(self._hardware_flops_name), peak)
        if mfu is not None:
            found["perf/mfu"] = mfu
            found["perf/mfu_percent"] = 100 * mfu
            of_measured = _share(flops, sums.get(_MEASURED_PEAK))
            if of_measured is not None:
                found["perf/mfu_of_measured_peak"] = of_measured
        for name, own_flops in sums.items():
            if name.startswith(prefix) and (own := _share(own_flops, peak)) is not None:
                found[f"perf/mfu/{name.removeprefix(prefix)}"] = own
        if hfu is not None:
            found["perf/hfu"] = hfu
            found["perf/hfu_percent"] = 100 * hfu
        return found

    @property
    def _hardware_flops_name(self) -> str:
        """Executed FLOPs that were found in different ways are not added up."""
        method = None if self.flops is None else self.flops.executed_method
        return "hardware_flops" if method is None else f"hardware_flops by {method}"

    @cached_property
    def shares(self) -> dict[str, Exact]:
        """What this rank did, and adds to the sums of its job."""
        role = self.role
        found: dict[str, Exact] = {}
        for name, amount in zip(_SIZES, (self.samples, self.tokens, self.useful_tokens), strict=True):
            if not role.has_tokens:
                found[name] = 0
            elif amount is not None and role.is_known:
                found[name] = exact(amount, role.tokens_shared_by)
        flops = self.flops
        if flops is not None:
            found[_MODEL_FLOPS] = exact(flops.model_flops, role.flops_shared_by)
            if flops.hardware_flops is not None:
                found[self._hardware_flops_name] = exact(flops.hardware_flops, role.flops_shared_by)
            if flops.peak_flops_per_s is not None:
                found[PEAK] = exact(flops.peak_flops_per_s)
            for model, own_flops in flops.by_model.items():
                found[f"{_MODEL_FLOPS}/{model}"] = exact(own_flops, role.flops_shared_by)
        if self.measured_peak_flops_per_s is not None:
            found[_MEASURED_PEAK] = exact(self.measured_peak_flops_per_s)
        return found

    @cached_property
    def own(self) -> dict[str, Exact]:
        """The shares as this rank's own figures: tokens that count on another rank are unknown, not 0."""
        known = self.shares
        return known if self.role.has_tokens else {n: v for n, v in known.items() if n not in _SIZES}

    @cached_property
    def timeless(self) -> dict[str, Any]:
        """The metrics that do not depend on the seconds of a step."""
        found: dict[str, Any] = {}
        if self.tokens and self.useful_tokens is not None:
            found["perf/padding_efficiency"] = self.useful_tokens / self.tokens
        if self.flops is not None:
            found["perf/method"] = self.flops.method
        if self.unknown is not None:
            found["perf/mfu_unknown"] = self.unknown.reason
        if self.apart is not None and self.apart.reason is not None:
            found["perf/no_grad_unknown"] = self.apart.reason
        elif self.apart is not None:
            found["perf/no_grad_flops"] = self.apart.flops
            found["perf/no_grad_method"] = self.apart.method
        if self.warmup:
            found["perf/warmup"] = True
        if self.observed:
            found["perf/observed"] = True
        return found

    @cached_property
    def _least_training_s(self) -> float | None:
        """The time of this rank's model FLOPs at its peak."""
        flops = self.flops
        if flops is None or flops.peak_flops_per_s is None:
            return None
        return float(self.own[_MODEL_FLOPS]) / flops.peak_flops_per_s

    def whole_step_mfu(self, time: StepTime) -> float | None:
        """All counted work of this rank over all time of the step, unusual gaps included."""
        apart = self.apart
        if apart is None or apart.least_s is None or self._least_training_s is None:
            return None
        if not time.elapsed_s or time.gap_s is None:
            return None
        return (self._least_training_s + apart.least_s) / (time.elapsed_s + time.gap_s)

    def training_mfu(self, time: StepTime) -> float | None:
        """The work of this rank's training over the time of the step without that of phases that do none."""
        phases_s = time.phases_s
        if self._least_training_s is None or not isinstance(phases_s, Mapping):
            return None
        seconds = sum(s for phase, s in phases_s.items() if phase not in _PHASES_WITHOUT_TRAINING)
        return self._least_training_s / seconds if seconds > 0 else None

    @cached_property
    def hfu_method(self) -> str | None:
        """How HFU was measured, where it is not based on the count; None without an HFU."""
        flops = self.flops
        is_known = flops is not None and any(name == "perf/hfu" for name, _ in self.rates)
        return flops.executed_method if flops is not None and is_known else None


NOTHING = StepAmounts(samples=None, tokens=None, useful_tokens=None, flops=None, warmup=False)
"""For a step of which nothing is known."""


class LastAmounts:
    """Steps that are alike share one object: what depends on their amounts alone is computed once."""

    def __init__(self) -> None:
        self._amounts = NOTHING

    def same_as(self, amounts: StepAmounts) -> StepAmounts:
        """The last step's object if it is equal, else this one from now on."""
        if amounts != self._amounts:
            self._amounts = amounts
        return self._amounts


def performance(amounts: StepAmounts, time: StepTime) -> dict[str, Any]:
    """The `perf/` metrics of one step."""
    steps, seconds, data_wait_s, between_s, forwards, left_out_s, phases_s, _ = time
    row = amounts.timeless.copy()
    if steps != 1 and (flops := row.get("perf/no_grad_flops")) is not None:
        row["perf/no_grad_flops"] = flops / steps
    if seconds is not None and seconds > 0:
        row["perf/step_time"] = seconds / steps
        row["perf/steps_per_second"] = steps / seconds
        row.update({name: amount / seconds for name, amount in amounts.rates})
        if amounts.hfu_method is not None:
            row["perf/hfu_method"] = amounts.hfu_method
        if (whole := amounts.whole_step_mfu(time)) is not None:
            row["perf/mfu_whole_step"] = whole
        if (training := amounts.training_mfu(time)) is not None:
            row["perf/mfu_training"] = training
    if data_wait_s is not None:
        row["perf/data_wait"] = data_wait_s / steps
    if between_s is not None:
        row["perf/between_steps"] = between_s / steps
    if forwards:
        row["perf/forwards_between_steps"] = forwards
    for kind, paused_s in left_out_s.items():
        row[_PAUSE_METRICS[kind]] = paused_s
    if isinstance(phases_s, str):
        row["perf/phases_unknown"] = phases_s
    elif phases_s is not None:
        row.update({_PHASE_METRICS[phase]: phase_s / steps for phase, phase_s in phases_s.items()})
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
