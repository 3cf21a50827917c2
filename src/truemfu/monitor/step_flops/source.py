"""The one source of a step's FLOPs on the row side: known, pending, or unknown with the reason.

    smart      integers of observed steps (`known.py`)
    estimate   the model's structure, nothing is observed
    profiler   smart for the model FLOPs; executed FLOPs come from a profiled step
    hybrid     smart for the model FLOPs; executed FLOPs come from hardware counters, or else a profiled step

An estimate never takes the place of a count: it is a figure of its own, `perf/mfu_estimate`. Only in mode
`estimate`, and before the first measurement with `initial_profiling: false`, is it the step's FLOPs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import one_line
from ...flops import (
    AutocastState,
    Estimator,
    FlopCount,
    StepProfile,
    Windows,
    uncounted_notice,
    unwrap,
)
from ...hardware.detect import get_gpu_peak_flops, known_spec, override_flops_per_s, spec_of
from ...utilization import ideal_flops_per_s
from ..config import MonitorConfig
from ..ranks.this_rank import ThisRank
from ..step_note import StepNote
from ..watching.batch_notes import BatchNote
from ..watching.model_hooks import ModelHooks
from .apart import WorkApart
from .generation import GenerationFlops
from .known import KnownSteps, Unknown

Notice = Callable[..., None]

ESTIMATE = "estimate"
GIVEN = "given by the caller"
_MAX_CACHED_PEAKS = 256
_MAX_ESTIMATORS = 64
_SPLIT_SEQUENCES = (
    "sequences are split over ranks (context parallel), and ring attention skips chunks, so the pairs of the "
    "whole sequence are unknown: pass the step's FLOPs to log_step"
)
_ZERO = "no matrix products, convolutions or attention were seen in the step"


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The FLOPs of a step, and the peak for their mix of dtypes."""

    model_flops: float
    hardware_flops: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    method: str
    executed_method: str | None = None
    """How `hardware_flops` were measured, if they are not counted."""
    by_model: Mapping[str, int] = field(default_factory=dict)
    """The model FLOPs of each model, if several are watched."""


@dataclass(frozen=True, kw_only=True)
class ApartFlops:
    """The FLOPs of a step's work without gradients, or why they are unknown."""

    flops: int | None = None
    least_s: float | None = None
    """Their time at the peak of one device; None if that is unknown."""
    method: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class UnknownFlops:
    """A step whose FLOPs are unknown."""

    reason: str
    """A clause that every view shows."""
    estimate: StepFlops | None
    """What the structure of the model suggests; None if that is unknown too."""


class FlopsSource:
    """Answers for steps in order; used from the row thread."""

    def __init__(
        self,
        config: MonitorConfig,
        known: KnownSteps,
        *,
        hooks: ModelHooks,
        notice: Notice,
        device: torch.device,
        rank: ThisRank,
        executed_method: str = "profiler",
    ) -> None:
        self._config, self.known, self._rank = config, known, rank
        self._hooks, self._notice, self._device = hooks, notice, device
        self._configured_peak = None if config.peak_tflops is None else config.peak_tflops * 1e12
        """In FLOP/s; None to use the table."""
        self._peaks: OrderedDict[tuple[Any, ...], tuple[float | None, str | None]] = OrderedDict()
        self._estimators: dict[tuple[Any, ...], Estimator | None] = {}
        spec = spec_of(device)
        bandwidth = None if spec is None else spec.memory_bandwidth_bytes_per_s
        self.apart = WorkApart(known.plan, GenerationFlops(known.convention, bandwidth), notice)
        self._last: tuple[FlopCount, StepFlops] | None = None
        self.executed_ratio: float | None = None
        """Executed FLOPs over those counted, of the last profiled step or the last window of counters."""
        self._executed_method = executed_method

    @property
    def refusal(self) -> str | None:
        """Why no step has FLOPs unless the caller gives them."""
        return _SPLIT_SEQUENCES if self._rank.role.splits_sequences else None

    def is_settled(self, note: StepNote) -> bool:
        """Whether the FLOPs of a step are final for its row; learns from an observed one."""
        if note.extras.given_flops is not None or self._is_estimated(note) or self.refusal is not None:
            return True
        return self.known.is_settled(note)

    def learn(self, note: StepNote) -> None:
        """Take what was observed in a step that is about to become a row."""
        if note.extras.observed is None:
            return
        try:
            self.known.take(note)
            self.apart.take(note)
        except Exception as error:
            self._notice(f"an observed step could not be counted: {one_line(error)}")

    def of(self, note: StepNote) -> StepFlops | UnknownFlops:
        """The FLOPs of a step; in its order."""
        given = note.extras.given_flops
        if given is not None:
            return self._given(note, given)
        if self.refusal is not None:
            return UnknownFlops(reason=self.refusal, estimate=None)
        if self._is_estimated(note):
            estimate = self._estimate(note)
            reason = "the FLOPs cannot be estimated from the model's structure"
            return estimate or UnknownFlops(reason=reason, estimate=None)
        found = self.known.answer(note)
        if isinstance(found, Unknown):
            return UnknownFlops(reason=found.reason, estimate=self._estimate(note))
        if not found.model_flops:
            return UnknownFlops(reason=_ZERO, estimate=None)
        if self._last is None or self._last[0] is not found:
            if (text := uncounted_notice(found)) is not None:
                self._notice(text)
            self._note_windows(note)
            names = {batch.template.model for batch in note.batches.notes}
            self._last = found, self._counted(found, names)
        return self._last[1]

    def without_gradients(self, note: StepNote) -> ApartFlops | None:
        """The FLOPs of a step's work without gradients; None if no step so far did any."""
        if self._config.estimates_only or not note.measured:
            return None
        found = self.apart.answer(note)
        if not (self.apart.is_there or note.generations):
            return None
        if isinstance(found, Unknown):
            return ApartFlops(reason=found.reason)
        peak = self._peak(found.by_dtype)[0] if found.flops else None
        least_s = 0.0 if not found.flops else None if peak is None else found.flops / peak
        return ApartFlops(flops=found.flops, least_s=least_s, method=found.method)

    def generation(self, note: StepNote) -> dict[str, float | str]:
        """The metrics of a step's calls of `generate`."""
        observed = note.extras.observed
        found = None if observed is None else observed.apart
        return self.apart.generation.metrics(note.generations, found) if note.generations else {}

    def _note_windows(self, note: StepNote) -> None:
        """Note where the convention counts pairs outside of a model's sliding windows."""
        for batch in note.batches.notes:
            slot, example = batch.template.slot, batch.example()
            model = None if slot is None else self._hooks.models.module_of(slot)
            if model is None or example is None:
                continue
            with contextlib.suppress(Exception):  # a note is not worth a failed row
                found = Windows(unwrap(model), self.known.convention).notes_for_batch(example)
                self.known.notes.update(dict.fromkeys(found))

    def _is_estimated(self, note: StepNote) -> bool:
        return self._config.estimates_only or not note.measured

    def _counted(self, count: FlopCount, models: Collection[str | None]) -> StepFlops:
        peak, source = self._peak(count.by_dtype)
        return StepFlops(
            model_flops=count.model_flops,
            hardware_flops=count.hardware_flops,
            peak_flops_per_s=peak,
            peak_source=source,
            method=count.method,
            by_model={name: flops for name, flops in count.by_module.items() if name in models},
        )

    def _given(self, note: StepNote, flops: float) -> StepFlops:
        """The FLOPs that the caller gave, and the peak of the model's dominant dtype."""
        peak, source = self._configured_peak, "monitoring.peak_tflops"
        first, models = next(iter(note.batches.notes), None), self._hooks.models.roots
        if peak is None and first is not None and models:
            with first.template.autocast.applied():
                dtype = dominant_dtype(models[0], self._device)
            peak = None if dtype is None else get_gpu_peak_flops(self._device, dtype)
            spec = known_spec(self._device) if override_flops_per_s() is None else None
            source = "override" if spec is None else f"datasheet: {spec.name}"
        return StepFlops(
            model_flops=flops,
            hardware_flops=None,
            peak_flops_per_s=peak,
            peak_source=None if peak is None else source,
            method=GIVEN,
        )

    def _estimate(self, note: StepNote) -> StepFlops | None:
        """What the structure of the models suggests for the batches of a step; None if unknown."""
        counts = []
        by_model: dict[str, int] = {}
        for batch in note.batches.notes:
            if batch.template.slot is None:
                continue
            count = self._estimated(note.state, batch)
            if count is None:
                return None
            counts.append(count)
            if (name := batch.template.model) is not None:
                by_model[name] = by_model.get(name, 0) + count.model_flops
        if note.batches.missing is not None or not sum(count.model_flops for count in counts):
            return None
        by_dtype: dict[str, int] = {}
        for count in counts:
            for dtype, flops in count.by_dtype.items():
                by_dtype[dtype] = by_dtype.get(dtype, 0) + flops
        peak, source = self._peak(by_dtype)
        return StepFlops(
            model_flops=sum(count.model_flops for count in counts),
            hardware_flops=sum(count.hardware_flops for count in counts),
            peak_flops_per_s=peak,
            peak_source=source,
            method=ESTIMATE,
            by_model=by_model,
        )

    def _estimated(self, state: int, note: BatchNote) -> FlopCount | None:
        slot, autocast = note.template.slot, note.template.autocast
        assert slot is not None
        batch, estimator = note.example(), self._estimator(state, slot, autocast)
        if batch is None or estimator is None:
            return None
        try:
            return estimator(batch)
        except Exception as error:
            self._notice(f"the FLOPs of a batch cannot be estimated: {one_line(error)}")
            return None

    def _estimator(self, state: int, slot: int, autocast: AutocastState) -> Estimator | None:
        key = state, slot, autocast
        if key not in self._estimators:
            if len(self._estimators) >= _MAX_ESTIMATORS:
                self._estimators.clear()
            self._estimators[key] = None
            model = self._hooks.models.module_of(slot)
            try:
                if model is not None:
                    with autocast.applied():
                        self._estimators[key] = Estimator(model, convention=self.known.convention)
            except Exception as error:
                self._notice(f"the FLOPs cannot be estimated: {one_line(error)}")
        return self._estimators[key]

    def _peak(self, by_dtype: Mapping[str, int]) -> tuple[float | None, str | None]:
        """The peak for this mix of dtypes, and where it comes from."""
        if self._configured_peak is not None:
            return self._configured_peak, "monitoring.peak_tflops"
        key = tuple(sorted(by_dtype.items()))
        if key not in self._peaks:
            self._peaks[key] = ideal_flops_per_s(by_dtype, self._device)
            if len(self._peaks) > _MAX_CACHED_PEAKS:
                self._peaks.popitem(last=False)
        return self._peaks[key]

    def learn_executed(self, profile: StepProfile, counted: StepFlops | UnknownFlops) -> None:
        """Use the ratio of a profiled step's executed FLOPs to the counted ones."""
        try:
            executed = profile.count()
        except Exception as error:
            self._notice(f"the profiled step could not be read, HFU is based on the count: {one_line(error)}")
            return
        if not executed.hardware_flops:
            self._notice(
                "the profile of a step is empty (another profiler was active); HFU is based on the count"
            )
        elif isinstance(counted, StepFlops) and counted.hardware_flops:
            self.executed_ratio = executed.hardware_flops / counted.hardware_flops

    def with_executed(self, flops: StepFlops) -> StepFlops:
        """The same step with its executed FLOPs scaled by the last measured ratio."""
        if self.executed_ratio is None:
            is_needed = self._config.mode == "hybrid" and not self._config.fallback_to_profiler
            return dataclasses.replace(flops, hardware_flops=None) if is_needed else flops
        if flops.hardware_flops is None:
            return flops
        return dataclasses.replace(
            flops,
            hardware_flops=flops.hardware_flops * self.executed_ratio,
            executed_method=self._executed_method,
        )

    def count(self, note: StepNote) -> FlopCount | Unknown:
        """The count behind `of`; unknown where FLOPs are given or estimated."""
        if note.extras.given_flops is not None or self._is_estimated(note):
            return Unknown("the step's FLOPs were not counted")
        return self.known.answer(note) if self.refusal is None else Unknown(self.refusal)


def dominant_dtype(model: nn.Module, device: torch.device | None) -> torch.dtype | None:
    """Autocast's dtype on this thread, or else the dtype most parameters have."""
    device_type = "cpu" if device is None else device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=None)
