"""Which steps are observed, and from where to where; lives on the training thread.

    step 1            first forward pass ─────────────────────► log_step
    step 2, and later when due         end of log_step ───────► log_step     seen as a whole
    a batch of a new shape             its forward pass ──────► log_step

An observed step runs the user's code once, as every step does: a dispatch mode sees each operator as it runs
(`flops/observe/`). Four free signals show in every step whether it did the same work as an observed one: the
shapes of its batches, how many autograd nodes its thread made, which backward passes it started, and which
parameters had a gradient when their optimizers stepped. What they do not show (a frozen weight, a swapped
layer) shows in the modules themselves (`model_states.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...convention import Convention
from ...flops import StepObserver, cuda_captures, replaced_modules, take_out_left_behind
from ...torch_private import backward_passes
from ...torch_private.dispatch import next_sequence_nr
from ...torch_private.profiling import is_profiled
from ...torch_private.watching import backward_number, functorch_level
from .. import forks
from ..step_note import ObservedStep
from ..watching.batch_notes import Batch, StepBatches, Template, TensorSizes, tensor_sizes
from ..watching.generation import Generation
from ..watching.gradients import MOST_PARAMETERS, gradients_found
from ..watching.model_hooks import ModelHooks
from .model_states import ModelChange, ModelStates
from .plan import ObservationPlan

_MOST_KINDS = 4096
_MOST_PASSES_APART = 64
"""Passes without gradients whose sizes are kept; of more only a hash."""
_now_s = time.perf_counter
PROFILED = "steps were not observed while a profiler was active, which would record each operator twice"
Kind = tuple[tuple[int, ...], int | None, int | None, bytes | None]


def kind_of(batches: StepBatches, nodes: int | None, passes: int | None, gradients: bytes | None) -> Kind:
    """Equal for steps with batches of the same shapes, and the same other signals."""
    return tuple([note.template.number for note in batches.notes]), nodes, passes, gradients


class ObservedKinds:
    """Which kinds of steps were observed, in the present state of the models."""

    def __init__(self) -> None:
        self._templates: Counter[int] = Counter()
        """Of the batches of observed steps, and how often each was."""
        self.known: set[Kind] = set()
        self.wants_repeats = True
        """Whether a shape is to be observed twice: no repeated observation has agreed yet."""
        self.are_outdated = False
        """Whether the work of a kind has changed, so that those of others may have; set on the row side."""

    def add(self, kind: Kind) -> None:
        """A step of this kind was observed."""
        self._templates.update(kind[0])
        if len(self.known) > _MOST_KINDS:
            self.known.clear()
        self.known.add(kind)

    def wants(self, template: Template) -> bool:
        """Whether steps with such batches were observed too seldom."""
        return self._templates[template.number] < 1 + self.wants_repeats

    def clear(self) -> None:
        """The models have changed."""
        self.are_outdated = False
        self._templates.clear()
        self.known.clear()


class StepSignals:
    """What a step does on its thread: how many autograd nodes it makes, which backward passes it starts, and
    which parameters its optimizers find with a gradient."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.first: int | None = None
        """The number of nodes before the step; None before the first one."""
        self._before_pause: int | None = None
        self._resumed_at = self._in_pause = 0
        """The number of nodes at the end of the last pause, and how many were made in it."""
        self.passes: int | None = None
        """A hash of the backward passes, 0 if there were none; None in a step whose begin was not seen."""
        self.gradients: bytes | None = None
        """Which parameters had a gradient when their optimizers stepped, a byte each; None if none did."""
        self.apart: tuple[TensorSizes, ...] = ()
        """The batches of the watched modules' passes without gradients, but for those of `generate`."""
        self.is_generating = False
        self.generations: list[Generation] = []
        """Calls of `generate` since the last step."""

    def begin(self) -> None:
        """A step begins on this thread."""
        self._thread, self.first = threading.get_ident(), next_sequence_nr()
        self._before_pause, self._resumed_at, self.passes, self.gradients = None, 0, 0, None
        self.apart, self.generations = (), []

    def nodes_made(self) -> int | None:
        """So far in this step; None if unknown."""
        if self.first is None or threading.get_ident() != self._thread:
            return None
        return next_sequence_nr() - self.first

    def backward_begins(self, numbers: Sequence[int], asked: Hashable, makes_graph: bool) -> None:
        """A backward pass from these nodes begins on some thread; one inside another belongs to that."""
        if self._is_here and backward_number() == -1:
            now = next_sequence_nr()
            ages = [now - n - (self._in_pause if n < self._resumed_at else 0) for n in numbers]
            self.passes = hash((self.passes, *ages, asked))

    def evaluation_begins(self, batch: Batch | None) -> None:
        """A watched module's forward pass without gradients begins on some thread."""
        if self._is_here and not self.is_generating:
            sizes = () if batch is None else tensor_sizes(batch)
            is_full = len(self.apart) >= _MOST_PASSES_APART
            self.apart = ((("", (hash((self.apart, sizes)),)),),) if is_full else (*self.apart, sizes)

    def backward_ended(self) -> None:
        """It has returned: nothing to note."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step on some thread: a hook of torch."""
        if torch.compiler.is_compiling() or not self._is_here:
            return
        found = self.gradients or b""
        if len(found) < 2 * MOST_PARAMETERS:  # each parameter may have an optimizer
            try:
                self.gradients = found + gradients_found(optimizer)
            except Exception:  # not for the training
                return

    @property
    def _is_here(self) -> bool:
        """Whether this thread runs the step, and no code outside of it."""
        is_within = self.passes is not None and self._before_pause is None
        return is_within and threading.get_ident() == self._thread

    def suspend(self) -> None:
        """Code outside of the step runs now."""
        self._before_pause = self.nodes_made()

    def resume(self) -> None:
        """The step continues; nodes made meanwhile are not its own."""
        before, self._before_pause = self._before_pause, None
        if before is not None and threading.get_ident() == self._thread and self.first is not None:
            self._resumed_at = next_sequence_nr()
            self._in_pause = self._resumed_at - self.first - before
            self.first += self._in_pause


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
        self._is_enabled, self._device, self._hooks = is_enabled, device, hooks
        self._observer: StepObserver | None = None
        self._is_whole = False
        self._kinds = ObservedKinds()
        self._needs_whole_steps = self._is_wanted = False
        self.hindrance: str | None = None
        """Why steps that were to be observed were not."""
        self.models = ModelStates(hooks, plan)
        self._forks, self.signals = forks.number, StepSignals()
        self._leave = contextlib.ExitStack()
        if is_enabled:
            captures = cuda_captures(convention)
            captures.hold()
            self._leave.callback(captures.release)
            self._leave.callback(backward_passes.listen(self.signals))
            self._leave.callback(register_optimizer_step_pre_hook(self.signals.optimizer_steps).remove)

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
        self._kinds.wants_repeats = False

    def observe_again(self) -> None:
        """On the row side: the work of a kind has changed, so what was observed of others may be outdated."""
        self._kinds.are_outdated = True

    def observe_next_batch(self) -> None:
        """Observe the step that begins with its first forward pass now, whatever is known of it."""
        self._is_wanted = True

    def batch_begins(self, template: Template, *, is_first: bool) -> None:
        """A micro-batch begins its forward pass; if it is the step's first, the step may be observed."""
        take_out_left_behind()
        if self.signals.first is None:  # the first step begins here
            self.signals.begin()
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
            self._kinds.wants(template) and not self._needs_whole_steps and self.plan.wants_unknown(_now_s())
        )

    def step_ends(self) -> ObservedStep | None:
        """The current step ends: what was observed of it."""
        observer, self._observer = self._observer, None
        return None if observer is None else ObservedStep(observer.leave(), is_whole=self._is_whole)

    def note_step(self, number: int, kind: Kind, *, is_observed: bool) -> None:
        """The step of this number was of this kind: an unknown one is to be observed later."""
        if self._kinds.are_outdated:
            self._kinds.clear()
        if is_observed:
            self._kinds.add(kind)
            self.plan.known_kind(kind)
        elif self._is_enabled and kind not in self._kinds.known:
            self.plan.unknown_kind(number, kind)
            self.models.check_soon()

    def next_begins(self, logged: int) -> None:
        """`log_step` is about to return, after so many steps: the next one begins."""
        self.signals.begin()
        if self._is_enabled and self.plan.is_due(logged + 1, _now_s()):
            self._enter(is_whole=True)

    def _enter(self, *, is_whole: bool) -> None:
        if backward_number() != -1 or functorch_level() is not None or self._is_capturing():
            return
        if is_profiled():
            self.hindrance = PROFILED
            return
        observer = StepObserver(self.convention)
        roots = self._hooks.models.roots
        if names := replaced_modules(module for model in roots for module in model.modules()):
            observer.fail(
                f"kernels of {', '.join(names)} cannot be observed while they run; count_flops counts "
                "them by the forward that is registered for them"
            )
        observer.enter()
        self._observer, self._is_whole, self.hindrance = observer, is_whole, None

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def suspend(self) -> None:
        """Code outside of the step runs now."""
        self.signals.suspend()
        if self._observer is not None:
            self._observer.suspend()

    def resume(self) -> None:
        """The step continues."""
        self.signals.resume()
        if self._observer is not None:
            self._observer.resume()

    def close(self) -> None:
        """The run is over, maybe within an observed step."""
        if forks.number == self._forks:
            self.step_ends()
        self._leave.close()

    def forget_models(self) -> None:
        """Other models are watched from now on."""
        self.models.forget()
        self._kinds.clear()

    def check_models(self, logged: int, *, now: bool = False) -> ModelChange | None:
        """After so many steps, with `now` at the end: look for a change of the modules."""
        change = self.models.check(logged, now=now)
        if change is not None:
            self._kinds.clear()
        return change
