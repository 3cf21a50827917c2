"""Which steps are observed, and from where to where; lives on the training thread.

    step 1            first forward pass ─────────────────────► log_step
    step 2, and later when due         end of log_step ───────► log_step     seen as a whole
    a batch of a new shape             its forward pass ──────► log_step

An observed step runs the user's code once, as every step does: a dispatch mode sees each operator as it runs
(`flops/observe/`). Two free signals show in every step whether it did the same work as an observed one: the
shapes of its batches, and how many autograd nodes its thread made. What they do not show (a frozen weight, a
swapped layer) shows in a fingerprint of the modules, taken as often as its own cost allows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch

from ...convention import Convention
from ...flops import StepObserver, cuda_captures, replaced_modules, take_out_left_behind
from ...torch_private.dispatch import next_sequence_nr
from ...torch_private.profiling import is_profiled
from ...torch_private.watching import backward_number, functorch_level
from .. import forks
from ..step_note import Observed
from ..watching.batch_notes import StepBatches, Template
from ..watching.fingerprint import Fingerprint, fingerprint, has_uninitialized
from ..watching.model_hooks import ModelHooks
from .plan import ObservationPlan

_CHECK_COST_S = 10e-6
"""What fingerprints may cost in a step, on average."""
_FIRST_CHECK_S = 100e-6
_STEPS_TO_CHECK = 8
"""After a check, until one follows an unknown kind of step: it may come from a change."""
_MOST_IDLE_CHANGES = 2
"""After so many changes of a module's own numbers that did not change its work, these are ignored."""
_MOST_KINDS = 4096
_MOST_STATES = 64
_now_s = time.perf_counter
PROFILED = "steps were not observed while a profiler was active, which would record each operator twice"
Kind = tuple[tuple[int, ...], int | None]


def kind_of(batches: StepBatches, nodes: int | None) -> Kind:
    """Equal for steps with batches of the same shapes and as many nodes."""
    return tuple([note.template.number for note in batches.notes]), nodes


@dataclass(frozen=True)
class ModelChange:
    """The modules changed between two checks, after which steps of this run."""

    after_step: int
    until_step: int


class StepWatch:
    """Lives on the training thread; the row side tells it what it has learned."""

    def __init__(
        self,
        plan: ObservationPlan,
        convention: Convention,
        *,
        is_enabled: bool,
        device: torch.device,
        hooks: ModelHooks,
    ) -> None:
        self.plan, self.convention = plan, convention
        self._captures = cuda_captures(convention) if is_enabled else None
        if self._captures is not None:
            self._captures.hold()
        self._is_enabled, self._device, self._hooks = is_enabled, device, hooks
        self._observer: StepObserver | None = None
        self._is_whole = False
        self._seen: Counter[int] = Counter()
        """The templates of observed steps, and how often each was."""
        self._wants_repeats = True
        self._kinds: set[Kind] = set()
        """The kinds of observed steps."""
        self._needs_whole_steps = self._is_wanted = False
        self.hindrance: str | None = None
        """Why steps that were to be observed were not."""
        self.state = self._last_state = 0
        """Which modules are watched and how they are: a number that returns if they change back."""
        self._states: dict[tuple[int, ...], int] = {}
        """The states before this one, by their fingerprint."""
        self.change: ModelChange | None = None
        """The last change."""
        self._fingerprint: Fingerprint | None = None
        self._models_checked = 0
        self._number_changes = 0
        self._checked_after = self._check_at = 0
        self.check_s, self._check_cost_s = 0.0, _FIRST_CHECK_S
        """The time of all checks, and of the quickest."""
        self._forks, self._thread = forks.number, threading.get_ident()
        self._nodes: int | None = None
        self._nodes_before_pause: int | None = None

    @property
    def observer(self) -> StepObserver | None:
        """That of the current step, if it is observed."""
        return self._observer

    def observe_whole_steps(self) -> None:
        """On the row side: steps do work before their first forward pass, so none begins to be observed
        there."""
        self._needs_whole_steps = True

    def repeats_agree(self) -> None:
        """On the row side: a repeated observation has agreed, so each shape needs one alone."""
        self._wants_repeats = False

    def observe_next_batch(self) -> None:
        """Observe the step that begins with its first forward pass now, whatever is known of it."""
        self._is_wanted = True

    def batch_begins(self, template: Template, *, is_first: bool) -> None:
        """A micro-batch begins its forward pass; if it is the step's first, the step may be observed."""
        take_out_left_behind()
        if self._nodes is None:  # the first step begins here
            self._thread, self._nodes = threading.get_ident(), next_sequence_nr()
        if self._observer is None and is_first and self._is_enabled and self._wants(template):
            self._enter(is_whole=False)
        if self._observer is not None and is_profiled():  # it began since: let it see what it would see alone
            self._observer.leave()
            self._observer, self.hindrance = None, PROFILED
        if self._observer is not None:
            self._observer.batch_begins(may_be_packed=bool(template.value_paths))

    def _wants(self, template: Template) -> bool:
        """Whether a step that begins with such a batch is to be observed from here on."""
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted or (
            self._seen[template.number] < 1 + self._wants_repeats
            and not self._needs_whole_steps
            and self.plan.wants_unknown(_now_s())
        )

    def step_ends(self) -> Observed | None:
        """The current step ends: what was observed of it."""
        observer, self._observer = self._observer, None
        return None if observer is None else Observed(observer.leave(), is_whole=self._is_whole)

    def note_step(self, number: int, batches: StepBatches, nodes: int | None, *, is_observed: bool) -> None:
        """The step of this number had these batches and nodes: an unknown kind is to be observed later."""
        kind = kind_of(batches, nodes)
        if is_observed:
            self._seen.update(note.template.number for note in batches.notes)
            self._kinds.add(kind)
            self.plan.known_kind(kind)
        elif self._is_enabled and kind not in self._kinds:
            self.plan.unknown_kind(number, kind)
            self._check_at = min(self._check_at, self._checked_after + _STEPS_TO_CHECK)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.clear()

    def next_begins(self, logged: int) -> None:
        """`log_step` is about to return, after so many steps: the next one begins."""
        self._thread, self._nodes = threading.get_ident(), next_sequence_nr()
        self._nodes_before_pause = None
        if self._is_enabled and self.plan.is_due(logged + 1, _now_s()):
            self._enter(is_whole=True)

    def nodes(self) -> int | None:
        """How many autograd nodes this step made on its thread; None if unknown."""
        if self._nodes is None or threading.get_ident() != self._thread:
            return None
        return next_sequence_nr() - self._nodes

    def _enter(self, *, is_whole: bool) -> None:
        if backward_number() != -1 or functorch_level() is not None or self._is_capturing():
            return
        if is_profiled():
            self.hindrance = PROFILED
            return
        observer = StepObserver(self.convention)
        if names := replaced_modules(module for model in self._hooks.roots for module in model.modules()):
            observer.fail(
                f"kernels of {', '.join(names)} cannot be seen while they run; count_flops counts by the "
                "forward that is registered for them"
            )
        observer.enter()
        self._observer, self._is_whole, self.hindrance = observer, is_whole, None

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def suspend(self) -> None:
        """Code outside of the step runs now."""
        self._nodes_before_pause = self.nodes()
        if self._observer is not None:
            self._observer.suspend()

    def resume(self) -> None:
        """The step continues; nodes made meanwhile are not its own."""
        before, self._nodes_before_pause = self._nodes_before_pause, None
        if before is not None and threading.get_ident() == self._thread:
            self._nodes = next_sequence_nr() - before
        if self._observer is not None:
            self._observer.resume()

    def close(self) -> None:
        """The run is over, maybe within an observed step."""
        if forks.number == self._forks:
            self.step_ends()
        if self._captures is not None:
            self._captures.release()
            self._captures = None

    def forget_models(self) -> None:
        """Other models are watched from now on."""
        self._fingerprint, self._check_at = None, 0
        self._states.clear()
        self._enter_state(None)

    def _enter_state(self, found: tuple[int, ...] | None) -> None:
        """The modules are as this fingerprint says: as they were before, or else in a new state."""
        if len(self._states) > _MOST_STATES:
            self._states.clear()
        self.state = self._last_state + 1 if found is None else self._states.get(found, self._last_state + 1)
        self._last_state = max(self._last_state, self.state)
        self._seen.clear()
        self._kinds.clear()

    def check_models(self, logged: int, *, now: bool = False) -> None:
        """After so many steps: check whether the modules have changed; `now`, at the end, or if it is due."""
        if not now and logged < self._check_at:
            return
        began_s, models = _now_s(), self._hooks.roots
        if any(has_uninitialized(model) for model in models):
            return
        found = fingerprint(models)
        if len(models) != self._models_checked:  # others are watched, or one was freed: no change of a model
            self._models_checked, self._fingerprint = len(models), None
        last, self._fingerprint = self._fingerprint, found
        if last is not None and now:  # after the last step an evaluation may have left its mode
            found = found._replace(modes=last.modes)
        if last is not None and found[:2] != last[:2]:
            self._states[last[:2]] = self.state
            self._enter_state(found[:2])
            self.change = ModelChange(self._checked_after, logged)
            self.plan.ask("the model changed")
        elif last is not None and found.numbers != last.numbers and self._number_changes < _MOST_IDLE_CHANGES:
            self._number_changes += 1
            self.plan.ask("a number of the model changed")
        self._checked_after = logged
        took_s = _now_s() - began_s
        self.check_s += took_s
        self._check_cost_s = min(took_s, self._check_cost_s)  # the first one is slow
        self._check_at = logged + 1 + int(self._check_cost_s / _CHECK_COST_S)
