"""When a step measures more than time: the check that a count is still valid, and the profiled step.

    first step ──► check ─(the model has changed)─► a new ModelState, which is then counted
    every flops_profile_freq steps, or at the phase's frequency: check again, and profile if the mode does
    every recalibration_frequency steps: check again

Lives on the training thread.
"""

from __future__ import annotations

import sys

from torch import nn

from ...convention import Convention
from ...errors import closest, one_line
from ...flops import StepProfile, StepProfiler
from ..config import MonitorConfig
from ..notices import Notices
from .fingerprint import has_uninitialized
from .model_state import ModelState, States, state_in


class Measuring:
    """Holds the current state of each model, and decides when to check it again."""

    def __init__(self, config: MonitorConfig, notices: Notices) -> None:
        self._config, self._notices = config, notices
        self.profiles = config.mode == "profiler"
        """Whether this run profiles real steps."""
        self._phase: str | None = None
        self._states_made = 0
        self.profiler: StepProfiler | None = None
        """That of the current step, if it is profiled."""
        self._profile_is_due = True
        self.knows_role = True
        """Whether it is known which part of the job's work this rank does; if not, there is no MFU."""
        self.states: States = ()
        """Indexed by the slot of a batch."""
        self._checked: set[int] = set()
        """Slots that were checked and are not due again."""
        self.is_counted = config.initial_profiling
        """Whether steps are counted already; before, they are estimated."""
        self.plan_at = 0
        """`plan_next` is due after this many steps."""
        self._planned_at = 0

    def forget(self) -> None:
        """Other models are watched from now on."""
        self.states = ()
        self._checked.clear()

    def check_is_due(self, slot: int) -> bool:
        """Whether the next batch of this slot has its model checked."""
        return slot not in self._checked

    def check_all(self) -> None:
        """Check every model again with its next batch."""
        self._checked.clear()

    def set_phase(self, name: str | None) -> None:
        """Measure at the frequency of this phase."""
        known = self._config.phases
        if name is None or (isinstance(name, str) and name in known):
            self._phase, self.plan_at = name, 0
            return
        hint = closest(str(name), known)
        self._notices(f"unknown phase {name!r}, the phase is unchanged; known: {', '.join(known)}{hint}")

    def check(self, model: nn.Module | None, slot: int) -> None:
        """Check whether the model has changed since it was counted; if so, take its new state."""
        self._checked.add(slot)
        if model is None:
            self._notices("no model is attached, so there is no MFU: call monitor.attach(model)")
            return
        try:
            self._check(model, slot)
        except Exception as error:  # some models cannot be inspected, traced ones for example
            self._notices(f"the model cannot be inspected, so there is no MFU: {one_line(error)}")
            self._set(slot, None)

    def _check(self, model: nn.Module, slot: int) -> None:
        if has_uninitialized(model):  # lazy modules know their shapes after the first forward pass
            self._checked.discard(slot)
            return
        last = state_in(self.states, slot)
        if last is not None and last.still_holds(model):
            return
        if not self.knows_role:
            self._set(slot, None)
            return
        self._set(slot, ModelState.of(model, number=self._states_made, last=last))
        self._states_made += 1

    def _set(self, slot: int, state: ModelState | None) -> None:
        """Replace a slot's state in a new tuple: earlier notes keep the old one."""
        states = [*self.states, *[None] * (slot + 1 - len(self.states))]
        states[slot] = state
        self.states = tuple(states)

    def plan_next(self, done: int) -> None:
        """Decide after `done` steps whether the next one measures, and when to decide again."""
        frequency = self._config.flops_profile_freq
        if self._phase is not None:
            frequency = self._config.phases[self._phase]
        if not frequency:
            self.plan_at = sys.maxsize
            return
        recalibration = self._config.recalibration_frequency
        last, self._planned_at = self._planned_at, done
        if _next_multiple(frequency, last) <= done:
            self.check_all()
            self._profile_is_due = True
        if recalibration and _next_multiple(recalibration, last) <= done:
            self.check_all()
            self.is_counted = True
        self.plan_at = min(_next_multiple(every, done) for every in (frequency, recalibration) if every)

    def begin_step(self, convention: Convention) -> None:
        """Profile the step that begins, if that is due; to be called where this run `profiles`."""
        if not self._profile_is_due:
            return
        self._profile_is_due = False
        profiler = StepProfiler(convention)
        try:
            profiler.start()
        except Exception as error:
            self._cannot_profile(error)
        else:
            self.profiler = profiler

    def end_step(self) -> StepProfile | None:
        """The profile of the step that ends; None where it has none."""
        if self.profiler is None:
            return None
        profiler, self.profiler = self.profiler, None
        try:
            return profiler.stop()
        except Exception as error:
            self._cannot_profile(error)
            return None

    def interrupt(self) -> None:
        """Code outside of the step runs now: discard its profile and take another one later."""
        if self.end_step() is not None:
            self._profile_is_due = True

    def _cannot_profile(self, error: Exception) -> None:
        self._notices(f"this step could not be profiled, HFU is based on the count: {error}")

    def go_without_counters(self, reason: str | None) -> None:
        """`hybrid` has no hardware counters: profile instead, if configured. A reason becomes a warning."""
        self.profiles = self._config.fallback_to_profiler
        if reason is not None:
            result = "come from torch.profiler" if self.profiles else "and HFU are unknown"
            self._notices(f"hybrid mode: no hardware counters ({reason}); executed FLOPs {result}")


def _next_multiple(every: int, after: int) -> int:
    return (after // every + 1) * every
