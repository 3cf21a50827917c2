"""In which state the watched modules are: a fingerprint of them, taken as often as its own cost allows."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from ..watching.fingerprint import Fingerprint, fingerprint, has_uninitialized
from ..watching.model_hooks import ModelHooks
from .plan import ObservationPlan

_CHECK_COST_S = 10e-6
"""What fingerprints may cost in a step, on average."""
_STEPS_TO_SECOND_CHECK = 10
_STEPS_TO_CHECK = 8
"""After a check, until one follows an unknown kind of step: it may come from a change."""
_MOST_IDLE_CHANGES = 2
"""After so many changes of a module's own numbers that did not change its work, these are ignored."""
_MOST_STATES = 64
_now_s = time.perf_counter


class ModelChange(NamedTuple):
    """The modules changed between two checks, after which steps of this run."""

    after_step: int
    until_step: int


class ModelStates:
    """Lives on the training thread."""

    def __init__(self, hooks: ModelHooks, plan: ObservationPlan) -> None:
        self._hooks, self._plan = hooks, plan
        self.state = self._last_state = 0
        """Which modules are watched and how they are: a number that returns if they change back."""
        self._states: dict[tuple[int, ...], int] = {}
        """The states before this one, by their fingerprint."""
        self._fingerprint: Fingerprint | None = None
        self._models_checked = self._number_changes = 0
        self._checked_after = self.check_at = 0
        """After which step the last check was, and the next one is due."""
        self.check_s, self._check_cost_s = 0.0, math.inf
        """The time of all checks, and of the quickest but the first, which is slow."""

    def forget(self) -> None:
        """Other models are watched from now on."""
        self._fingerprint, self.check_at = None, 0
        self._states.clear()
        self._enter(None)

    def check_soon(self) -> None:
        """A step was of an unknown kind."""
        self.check_at = min(self.check_at, self._checked_after + _STEPS_TO_CHECK)

    def check(self, logged: int, *, now: bool = False) -> ModelChange | None:
        """After so many steps; with `now` at the end: what has changed since the last check."""
        began_s, models = _now_s(), self._hooks.models.roots
        if any(has_uninitialized(model) for model in models):
            return None
        found, change = fingerprint(models), None
        if len(models) != self._models_checked:  # others are watched, or one was freed: no change of a model
            self._models_checked, self._fingerprint = len(models), None
        last, self._fingerprint = self._fingerprint, found
        if last is not None and now:  # after the last step an evaluation may have left its mode
            found = found._replace(modes=last.modes)
        if last is not None and found[:2] != last[:2]:
            self._states[last[:2]] = self.state
            self._enter(found[:2])
            change = ModelChange(self._checked_after, logged)
            self._plan.ask("the model changed")
        elif last is not None and found.numbers != last.numbers and self._number_changes < _MOST_IDLE_CHANGES:
            self._number_changes += 1
            self._plan.ask("a number of the model changed")
        self._checked_after = logged
        took_s = _now_s() - began_s
        self.check_s += took_s
        if last is None:
            self.check_at = logged + _STEPS_TO_SECOND_CHECK
        else:
            self._check_cost_s = min(took_s, self._check_cost_s)
            self.check_at = logged + 1 + int(self._check_cost_s / _CHECK_COST_S)
        return change

    def _enter(self, found: tuple[int, ...] | None) -> None:
        """The modules are as this fingerprint says: as they were before, or else in a new state."""
        if len(self._states) > _MOST_STATES:
            self._states.clear()
        self.state = self._last_state + 1 if found is None else self._states.get(found, self._last_state + 1)
        self._last_state = max(self._last_state, self.state)
