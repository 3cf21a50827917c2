"""From noted batches to FLOPs, on the monitor's own thread.

    smart      a closed form, fitted once in the background; another state of the model is fitted anew
    estimate   the model's structure, nothing is run
    profiler   smart for what the model needs; what was executed comes from a profiled step
    hybrid     smart for what the model needs; what was executed comes from hardware counters, else a profile

A model that cannot be counted is estimated, one that cannot be estimated has no FLOPs: None, and it is said.
Fitting costs Python time, and Python has one lock: a model that needs a count for every new shape would slow
its own training down. So counting has a budget, and beyond it a batch is estimated.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from ..convention import Convention
from ..errors import TruemfuError, TruemfuWarning, one_line
from ..flops.background import background
from ..flops.closed_form import PER_VALUES, FlopModel, device_of
from ..flops.count import uncounted_notice
from ..flops.estimate import Estimator
from ..flops.flop_count import FlopCount
from ..flops.form import CLOSED_FORM
from ..flops.off_thread import needs_training_thread
from ..flops.profiler import StepProfile
from ..flops.snapshot import snapshot
from ..flops.step_work import StepWork, step_work
from ..flops.surroundings import AutocastState
from ..utilization import ideal_flops_per_s
from .config import MonitorConfig
from .fingerprint import fingerprint, structure
from .observe import BatchNote, Template
from .ranks import RankLink

Notice = Callable[[str], None]
Result = TypeVar("Result")

_FIRST_BUDGET_S = 60.0
_BUDGET_SHARE = 0.01
_RANK_TIMEOUT_S = 120.0
_MAX_PEAKS_KEPT = 256
_MAX_IDLE_CHANGES = 2


@dataclass(eq=False, kw_only=True)
class ModelState:
    """The model as it was when a count became due: a stand-in without data, and what was fitted to it."""

    number: int
    """Which state of the model it is, counted from 0."""
    fingerprint: tuple[int, int]
    structure: str
    model: nn.Module
    forms: dict[AutocastState, FlopModel | None] = field(default_factory=dict)
    estimators: dict[AutocastState, Estimator | None] = field(default_factory=dict)

    idle_changes: int = 0
    """How often in a row nothing but a number of the model had changed, and its count had not."""
    forms_before: Mapping[AutocastState, FlopModel | None] = field(default_factory=dict)
    """Those of the state before, where nothing but a number had changed since."""

    def still_holds(self, model: nn.Module) -> bool:
        """Whether the model is as it was; a number that only counts something is let be."""
        now = fingerprint(model)
        return now == self.fingerprint or (
            now[0] == self.fingerprint[0] and self.idle_changes >= _MAX_IDLE_CHANGES
        )

    @classmethod
    def of(cls, model: nn.Module, *, number: int, last: ModelState | None) -> ModelState:
        """The model after it was in the state `last`; taken on the training thread, in milliseconds."""
        now = fingerprint(model)
        follows = last is not None and last.fingerprint[0] == now[0]
        return cls(
            number=number,
            fingerprint=now,
            structure=structure(model),
            model=snapshot(model),
            idle_changes=last._idle_changes_so_far() if last is not None and follows else 0,
            forms_before=dict(last.forms) if last is not None and follows else {},
        )

    def _idle_changes_so_far(self) -> int:
        if not self.forms_before or not self.forms:  # the first of its kind, or not yet counted
            return self.idle_changes
        is_same = all(
            autocast in self.forms_before and _is_same_form(form, self.forms_before[autocast])
            for autocast, form in self.forms.items()
        )
        return self.idle_changes + 1 if is_same else 0


def _is_same_form(one: FlopModel | None, other: FlopModel | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.export() == other.export()


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The FLOPs of all micro-batches of a step, and the peak for their mix of dtypes."""

    model_flops: int
    hardware_flops: float | None
    peak_flops_per_s: float | None
    peak_source: str | None
    method: str
    executed_method: str | None = None
    """What `hardware_flops` rests on, where that is not the count."""


class Counting:
    """Counts the micro-batches of steps, by the configured mode; used from one thread."""

    def __init__(
        self,
        config: MonitorConfig,
        *,
        ranks: RankLink,
        notice: Notice,
        device: torch.device | None,
        rest: Callable[[], None],
    ) -> None:
        self._config = config
        self.convention = Convention(attention=config.attention)  # type: ignore[arg-type]
        self._ranks, self._notice = ranks, notice
        self.device = device
        self._rest = rest
        self.give_up = threading.Event()
        """Set when the run ends: nobody waits for another rank or a count any more."""
        self._peaks: OrderedDict[int, tuple[FlopCount, float | None, str | None]] = OrderedDict()
        self._born = time.perf_counter()
        self.notes: dict[str, None] = {}
        """What the counts rest on, each thing once."""
        self.spent_s = 0.0
        self._last: tuple[ModelState, list[Template], StepFlops | None] | None = None
        self.is_at_work = False
        self.executed_ratio: float | None = None
        """Executed FLOPs over those counted, of the last profiled step or the last window of counters."""
        self.executed_method = "profiler"
        self.values_matter = False
        """Whether the integers of a batch, beyond its shape, were seen to decide its work."""

    @property
    def estimates_only(self) -> bool:
        """Whether this mode never counts."""
        return self._config.mode == "estimate" or not self._config.calibration_enabled

    def is_busy_with(self, state: ModelState) -> bool:
        """Whether a count of this state is under way, or will be as soon as its first step is worked out."""
        return not self.estimates_only and (self.is_at_work or not state.forms)

    def fit_on_training_thread(
        self, state: ModelState, model: nn.Module, note: BatchNote, batch: Any
    ) -> None:
        """Fit here and now what cannot be fitted in the background: some models share state with training."""
        reason = None if self.estimates_only else needs_training_thread(model, batch)
        if reason is None or not self._ranks.is_first:
            return
        self._notice(f"the model is counted on the training thread, which makes that step longer: {reason}")
        self._fit(state, note.template.autocast, batch, model)

    def step(self, state: ModelState, notes: Sequence[BatchNote], *, measured: bool) -> StepFlops | None:
        """The FLOPs of a step; None where they are not known, or none. Not `measured`: estimated for now."""
        templates = [note.template for note in notes]
        last = self._last
        if last is not None and last[0] is state and last[1] == templates:
            return last[2]  # the usual case: the same shapes again
        flops = self._step(state, notes, measured=measured)
        is_final = flops is not None and flops.method == CLOSED_FORM
        self._last = (state, templates, flops) if is_final and not any(n.values for n in notes) else None
        return flops

    def _step(self, state: ModelState, notes: Sequence[BatchNote], *, measured: bool) -> StepFlops | None:
        counts = []
        for note in notes:
            count = self.batch(state, note, measured=measured)
            if count is None:
                return None
            counts.append(count)
        if not counts:
            return None
        model_flops = sum([c.model_flops for c in counts])
        if not model_flops and any(note.template.samples != 0 for note in notes):
            self._notice(
                "the count of a step is 0, so it has no MFU: the model does nothing that is counted (matrix "
                "products, convolutions, attention), or left its layers out when it was counted"
            )
            return None
        peak, source = self._peak(counts)
        return StepFlops(
            model_flops=model_flops,
            hardware_flops=sum([c.hardware_flops for c in counts]),
            peak_flops_per_s=peak,
            peak_source=source,
            method=" and ".join(dict.fromkeys(c.method for c in counts)),
        )

    def learn_executed(self, profile: StepProfile, counted: StepFlops | None) -> None:
        """Take over what a profiled step executed, against what was counted for it."""
        try:
            executed = profile.count()
        except Exception as error:
            self._notice(f"the profiled step could not be read, HFU rests on the count: {one_line(error)}")
            return
        if not executed.hardware_flops:
            self._notice(
                "the profiled step shows no work (another profiler ran in it); HFU rests on the count"
            )
        elif counted is not None and counted.hardware_flops:
            self.executed_ratio = executed.hardware_flops / counted.hardware_flops

    def with_executed(self, flops: StepFlops | None, *, run_again: bool) -> StepFlops | None:
        """The same step with what was last measured to be executed beyond its count, or less.

        How much of a model is `run_again` by a checkpoint around it, no count of the model tells.
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
            executed_method=self.executed_method,
        )

    def by_shape(self, state: ModelState, note: BatchNote) -> StepWork:
        """One micro-batch counted by shape, in the background; raises where that cannot be."""

        def work() -> StepWork:
            with background(self._rest), note.template.autocast.applied():
                return step_work(
                    state.model, note.example(), convention=self.convention, place=device_of(state.model)
                )

        return self._timed(work)

    def batch(self, state: ModelState, note: BatchNote, *, measured: bool) -> FlopCount | None:
        """The FLOPs of one micro-batch."""
        batch = note.example()
        if batch is None:
            return None
        autocast = note.template.autocast
        if not self.estimates_only and measured:
            form = state.forms.get(autocast)
            if form is not None and form.knows(batch):
                return form(batch)
            if form is not None or autocast not in state.forms:
                count = self._count_anew(state, autocast, batch)
                if count is not None:
                    return count
        return self._estimate(state, autocast, batch)

    def _count_anew(self, state: ModelState, autocast: AutocastState, batch: Any) -> FlopCount | None:
        """Fit a first form, or a new kind of batch; None, said once, where that cannot be."""
        if self.spent_s > _FIRST_BUDGET_S + _BUDGET_SHARE * (time.perf_counter() - self._born):
            self._notice(
                f"counting took {self.spent_s:.0f} s so far, more than {_BUDGET_SHARE:.0%} of the run: "
                "batches of new kinds are estimated"
            )
            return None
        return self._timed(lambda: self._fit_and_count(state, autocast, batch))

    def _fit_and_count(self, state: ModelState, autocast: AutocastState, batch: Any) -> FlopCount | None:
        with background(self._rest), autocast.applied():
            form = state.forms.get(autocast) or self._fit(state, autocast, batch, state.model)
            try:
                count = None if form is None else form(batch)
            except Exception as error:
                self._notice(f"a batch could not be counted and is estimated: {one_line(error)}")
                return None
        if count is not None:
            self.notes.update(dict.fromkeys(count.notes))
            if PER_VALUES in count.method:
                self.values_matter = True
                self._notice(
                    "the model's work depends on the values of a batch (a mask, labels, a number): the "
                    "FLOPs of a step are those of the first batch of its shape"
                )
            text = uncounted_notice(count)
            if text is not None:
                self._notice(text)
        return count

    def _fit(
        self, state: ModelState, autocast: AutocastState, batch: Any, model: nn.Module
    ) -> FlopModel | None:
        key = f"{state.number}/{autocast}/{self.convention.attention}"
        shares = self._ranks.is_first and self._ranks.world_size > 1
        if shares:
            self._ranks.announce(key, state.structure)
        form = None if self._ranks.is_first else self._received(key, state)
        if form is None:
            try:
                form = FlopModel.fit(model, batch, convention=self.convention)
            except TruemfuWarning:  # a filter makes an error of it: whoever keeps warnings tries again
                raise
            except Exception as error:
                self._notice(f"the model cannot be counted, its FLOPs are estimated: {one_line(error)}")
            if shares:
                self._ranks.publish(key, {} if form is None else form.export(), fingerprint=state.structure)
        state.forms[autocast] = form
        return form

    def _received(self, key: str, state: ModelState) -> FlopModel | None:
        data = self._ranks.poll(
            key, timeout_s=_RANK_TIMEOUT_S, fingerprint=state.structure, stop=self.give_up
        )
        if not data:
            return None
        try:
            return FlopModel.from_export(state.model, data)
        except TruemfuError as error:
            self._notice(
                f"the count of rank 0 cannot be used, this rank counts for itself: {one_line(error)}"
            )
            return None

    def _timed(self, work: Callable[[], Result]) -> Result:
        began_s, self.is_at_work = time.thread_time(), True
        try:
            return work()
        finally:
            self.is_at_work = False
            self.spent_s += time.thread_time() - began_s

    def _estimate(self, state: ModelState, autocast: AutocastState, batch: Any) -> FlopCount | None:
        if autocast not in state.estimators:
            try:
                with autocast.applied():
                    state.estimators[autocast] = Estimator(state.model, convention=self.convention)
            except Exception as error:
                state.estimators[autocast] = None
                self._notice(f"the model cannot be estimated either, so there is no MFU: {one_line(error)}")
        estimator = state.estimators[autocast]
        if estimator is None:
            return None
        try:
            return estimator(batch)
        except Exception as error:
            self._notice(f"a batch cannot be estimated, so its step has no MFU: {one_line(error)}")
            return None

    def _peak(self, counts: Sequence[FlopCount]) -> tuple[float | None, str | None]:
        """The peak at which the ideal times of all micro-batches add up."""
        if self._config.peak_tflops is not None:
            return self._config.peak_tflops * 1e12, "monitoring.peak_tflops"
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
        kept = self._peaks.get(id(count))
        if kept is None:
            kept = (count, *ideal_flops_per_s(count.by_dtype, self.device))
            self._peaks[id(count)] = kept  # holds the count, so its id stays its own
            if len(self._peaks) > _MAX_PEAKS_KEPT:
                self._peaks.popitem(last=False)
        return kept[1], kept[2]
