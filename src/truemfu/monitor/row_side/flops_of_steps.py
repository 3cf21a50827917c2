"""From noted batches to FLOPs, on the row side.

    smart      the closed form that was fitted on the training thread (`counts.py`)
    estimate   the model's structure, nothing is run
    profiler   smart for the model FLOPs; executed FLOPs come from a profiled step
    hybrid     smart for the model FLOPs; executed FLOPs come from hardware counters, or else a profiled step

A batch without a count, or without one yet, has the estimate, and its method is "estimate"; a model that
cannot be estimated has no FLOPs: None, with one warning.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import one_line
from ...flops import CLOSED_FORM, AutocastState, Estimator, FlopCount, FlopModel, StepProfile, StepWork
from ...utilization import ideal_flops_per_s
from ..config import MonitorConfig
from ..ranks.rank_link import COUNT, NOTHING, WAITING, RankLink
from ..training_side.batch_notes import BatchNote, Template
from ..training_side.counts import Counts, Request, rank_key
from ..training_side.model_state import ModelState, States, state_in

Notice = Callable[[str], None]

_MAX_CACHED_PEAKS = 256


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The FLOPs of all micro-batches of a step, and the peak for their mix of dtypes."""

    model_flops: float
    hardware_flops: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    method: str
    executed_method: str | None = None
    """How `hardware_flops` were measured, if they are not counted."""
    by_model: Mapping[str, int] = field(default_factory=dict)
    """The model FLOPs of each model, if several are watched."""


class Counting:
    """The FLOPs of the micro-batches of steps, by the configured mode; used from the row thread."""

    def __init__(
        self,
        config: MonitorConfig,
        counts: Counts,
        *,
        ranks: RankLink,
        notice: Notice,
        device: torch.device | None,
        executed_method: str = "profiler",
    ) -> None:
        self._config = config
        self._counts, self._ranks, self._notice = counts, ranks, notice
        self.convention = counts.convention
        self.device = device
        self._peaks: OrderedDict[int, tuple[FlopCount, float | None, str | None]] = OrderedDict()
        self._last: tuple[States, list[Template], StepFlops | None] | None = None
        self._found: dict[tuple[int, int], tuple[ModelState, BatchNote, FlopCount]] = {}
        """Counts found when the next step was checked: by now a count may hold the forms' lock."""
        self.executed_ratio: float | None = None
        """Executed FLOPs over those counted, of the last profiled step or the last window of counters."""
        self._executed_method = executed_method
        self.flops_shared_by = 1
        """How many ranks count the same products, of which each executes its part."""

    @property
    def configured_peak_flops_per_s(self) -> float | None:
        """The peak configured by the user; None to use the table."""
        return None if self._config.peak_tflops is None else self._config.peak_tflops * 1e12

    @property
    def estimates_only(self) -> bool:
        """Whether this mode never counts."""
        return self._config.estimates_only

    def is_settled(self, states: States, notes: Sequence[BatchNote], *, measured: bool) -> bool:
        """Whether the FLOPs of a step are final for its row.

        Counts are requested for batches that no form covers, and the step waits for them for a limited time.
        """
        if not measured or self.estimates_only:
            return True
        if self._is_like_last(states, notes) and not self._awaits_shapes(states, notes):
            return True
        if not self._counts.lock.acquire(blocking=False):
            return False  # a count is running
        self._found = {}
        try:
            different = {_identity(note): note for note in notes}
            settled = [
                self._is_note_settled(state, note)
                for note in different.values()
                if (state := state_of(states, note)) is not None
            ]  # requests all of them
            return all(settled)
        finally:
            self._counts.lock.release()

    def _awaits_shapes(self, states: States, notes: Sequence[BatchNote]) -> bool:
        """Whether a micro-batch is about to be counted by shape, though its FLOPs are known."""
        for note in notes:
            state = state_of(states, note)
            request = None if state is None else self._counts.find(state, note)
            if request is not None and request.wants_work and self._counts.holds_rows(request):
                return True
        return False

    def _is_note_settled(self, state: ModelState, note: BatchNote) -> bool:
        request = self._counts.find(state, note)
        if request is None:
            autocast = note.template.autocast
            form = state.forms.get(autocast)
            batch = note.example()
            is_refused = form is None and autocast in state.forms
            if is_refused or batch is None:
                return True
            if form is not None and form.knows(batch):
                self._found[id(state), _identity(note)] = state, note, form(batch)
                return True
            request = self._counts.ask(state, note)
        if not request.is_ours:
            self._ask_ranks(request)
        return not self._counts.holds_rows(request)

    def _ask_ranks(self, request: Request) -> None:
        """Another rank may count this: use its form once published, or count here if this rank is elected."""
        answer = self._ranks.ask(
            rank_key(request.state, request.autocast, self.convention), request.state.structure
        )
        if answer is WAITING:
            return
        if answer is not COUNT and answer is not NOTHING:
            is_usable = self._counts.received(request.state, request.autocast, answer.data)
            if is_usable:
                request.is_ours = True  # batches that the form does not cover are counted here
                return
        if answer is COUNT:
            request.is_ours = True
        else:
            self._counts.refuse(request)

    def _is_like_last(self, states: States, notes: Sequence[BatchNote]) -> bool:
        last = self._last
        return last is not None and last[0] is states and last[1] == [note.template for note in notes]

    def step(self, states: States, notes: Sequence[BatchNote], *, measured: bool) -> StepFlops | None:
        """The FLOPs of a step; None if unknown or zero. Not `measured`: estimated for now."""
        if self._last is not None and self._is_like_last(states, notes):
            return self._last[2]  # the usual case: the same shapes again
        templates = [note.template for note in notes]
        flops = self._step(states, notes, measured=measured)
        is_final = flops is not None and flops.method == CLOSED_FORM
        self._last = (states, templates, flops) if is_final and not any(n.values for n in notes) else None
        return flops

    def _step(self, states: States, notes: Sequence[BatchNote], *, measured: bool) -> StepFlops | None:
        counts = []
        by_model: Counter[str] = Counter()
        for note in notes:
            if note.template.slot is None:
                continue
            state = state_of(states, note)
            count = None if state is None else self.batch(state, note, measured=measured)
            if count is None:
                return None
            counts.append(count)
            if note.template.model is not None:
                by_model[note.template.model] += count.model_flops
        if not counts:
            return None
        model_flops = sum([c.model_flops for c in counts])
        if not model_flops and any(note.template.samples != 0 for note in notes):
            self._notice(
                "the count of a step is 0, so it has no MFU: the model has no counted operators (matrix "
                "products, convolutions, attention), or skipped its layers during the count"
            )
            return None
        peak, source = self._peak(counts)
        return StepFlops(
            model_flops=model_flops,
            hardware_flops=sum([c.hardware_flops for c in counts]),
            peak_flops_per_s=peak,
            peak_source=source,
            method=" and ".join(dict.fromkeys(c.method for c in counts)),
            by_model=by_model,
        )

    def learn_executed(self, profile: StepProfile, counted: StepFlops | None) -> None:
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
        elif counted is not None and counted.hardware_flops:
            self.executed_ratio = self.flops_shared_by * executed.hardware_flops / counted.hardware_flops

    def with_executed(self, flops: StepFlops | None, *, run_again: bool) -> StepFlops | None:
        """The same step with its executed FLOPs scaled by the last measured ratio.

        A count of the model does not show how much of it a checkpoint around it has `run_again`.
        """
        if flops is None:
            return None
        if self.executed_ratio is None:
            needs_measurement = run_again or (
                self._config.mode == "hybrid" and not self._config.fallback_to_profiler
            )
            return dataclasses.replace(flops, hardware_flops=None) if needs_measurement else flops
        assert flops.hardware_flops is not None
        return dataclasses.replace(
            flops,
            hardware_flops=flops.hardware_flops * self.executed_ratio,
            executed_method=self._executed_method,
        )

    def by_shape(self, state: ModelState, note: BatchNote) -> StepWork | str:
        """The counted work of one micro-batch by shape, or why it is unknown."""
        return state.works.get(note.template, "it was not counted by shape")

    def batch(self, state: ModelState, note: BatchNote, *, measured: bool) -> FlopCount | None:
        """The FLOPs of one micro-batch: from a form that covers it, else the estimate."""
        batch = note.example()
        if batch is None:
            return None
        found = self._found.get((id(state), _identity(note)))
        if found is not None and measured:
            return found[2]
        autocast = note.template.autocast
        if not self.estimates_only and measured and self._counts.lock.acquire(blocking=False):
            try:
                form = state.forms.get(autocast)
                count = None if form is None else _known(form, batch)
                if count is not None:
                    return count
            finally:
                self._counts.lock.release()
        return self._estimate(state, autocast, batch)

    def _estimate(self, state: ModelState, autocast: AutocastState, batch: Any) -> FlopCount | None:
        if autocast not in state.estimators:
            try:
                with autocast.applied():
                    state.estimators[autocast] = Estimator(state.model, convention=self.convention)
            except Exception as error:
                state.estimators[autocast] = None
                self._notice(f"the FLOPs cannot be estimated, so there is no MFU: {one_line(error)}")
        estimator = state.estimators[autocast]
        if estimator is None:
            return None
        try:
            return estimator(batch)
        except Exception as error:
            self._notice(
                f"the FLOPs of a batch cannot be estimated, so its step has no MFU: {one_line(error)}"
            )
            return None

    def _peak(self, counts: Sequence[FlopCount]) -> tuple[float | None, str | None]:
        """The peak for the whole step: total FLOPs over the sum of the micro-batches' ideal times."""
        if self.configured_peak_flops_per_s is not None:
            return self.configured_peak_flops_per_s, "monitoring.peak_tflops"
        ideal_s, source = 0.0, None
        for count in counts:
            peak, source = self._peak_of(count)
            if peak is None:
                return None, None
            ideal_s += count.model_flops / peak
        if not ideal_s:
            return None, None
        return sum([c.model_flops for c in counts]) / ideal_s, source

    def _peak_of(self, count: FlopCount) -> tuple[float | None, str | None]:
        cached = self._peaks.get(id(count))
        if cached is None:
            cached = (count, *ideal_flops_per_s(count.by_dtype, self.device))
            self._peaks[id(count)] = cached  # references the count, so its id is not reused
            if len(self._peaks) > _MAX_CACHED_PEAKS:
                self._peaks.popitem(last=False)
        return cached[1], cached[2]


def state_of(states: States, note: BatchNote) -> ModelState | None:
    """The state of the model that processed this micro-batch; None if unknown."""
    slot = note.template.slot
    return None if slot is None else state_in(states, slot)


def _identity(note: BatchNote) -> int:
    """The note's id if its values matter, else its template's."""
    return id(note if note.values else note.template)


def _known(form: FlopModel, batch: Any) -> FlopCount | None:
    """A form's count of a batch, without a new count of the model."""
    return form(batch) if form.knows(batch) else form.provisional(batch)
