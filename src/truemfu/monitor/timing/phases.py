"""What a step does one after the other, by marks where the program goes from one to the next.

    log_step  ⟨next batch⟩  copies     model, loss   .backward()  clip_grad_norm_  .step()     log_step
       other  │ data_wait  │ input    │ forward     │ backward  │other│ clipping  │ optimizer │ other
                    │ no_grad │ in other, in input, and between a model's forward pass and the backward pass

The marks are those of the step's own clock, so the phases of a step add up to its time: what lies between
two marks belongs to one phase, whatever else the device did beside it. What runs inside a backward pass, a
clipping or a loader belongs to that; passes inside an optimizer's closure are told apart from it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...records import StepPart
from ...run_summary.sums import GENERATE, PAUSE, PHASES
from ...torch_private.watching import backward_number
from .. import forks
from .between_steps import BetweenSteps
from .clock import MOST_CHANGES, Span, StepClock, TimeMark, seconds_between

DATA_WAIT, INPUT, FORWARD, NO_GRAD, BACKWARD, CLIPPING, OPTIMIZER, OTHER = PHASES
_OPEN = (OTHER, INPUT, FORWARD)
"""Phases without an end of their own: they last until another one begins."""
_IN_COMPILED_CODE = "it may be part of compiled code or of a CUDA graph, which cannot be separated"
_thread = threading.get_ident
_is_compiling = torch.compiler.is_compiling


class StepPhases:
    """Is told where a program goes from one phase to the next; other threads and pauses are ignored."""

    def __init__(self, clock: StepClock, between: BetweenSteps) -> None:
        self._clock, self._between, self._forks = clock, between, forks.number
        self._optimizing: TimeMark | None = None
        """Where the step began in which an optimizer steps now."""
        self._hook: RemovableHandle | None = None
        """The hook after optimizer steps."""
        self._optimizers = 0
        """Those that step now, one inside another."""
        self._passing: TimeMark | None = None
        """The same of a forward pass with gradients."""
        self._after_switch = self._after_backward = OTHER

    def _now(self) -> str | None:
        """The current phase, if this thread runs the step and no code outside of it."""
        between = self._between
        is_here = _thread() == between.thread and not between.pauses and forks.number == self._forks
        return self._clock.phase if is_here else None

    @property
    def _base(self) -> str:
        """The phase between backward passes and clippings: inside a closure, the optimizer's."""
        return OTHER if self._optimizing is None or self._optimizing is not self._clock.begun else OPTIMIZER

    def wait_begins(self) -> None:
        """A batch is requested from a loader."""
        if self._now() in _OPEN:
            self._clock.enter(DATA_WAIT)

    def wait_ends(self, *, has_batch: bool) -> None:
        """The loader has returned: the batch is the input of the next forward pass."""
        if self._now() == DATA_WAIT:
            self._clock.enter(INPUT if has_batch else OTHER)

    def forward_begins(self) -> None:
        """A watched module begins a forward pass with gradients; its loss belongs to that."""
        phase = self._now()
        if phase in (OTHER, INPUT, NO_GRAD, OPTIMIZER):
            self._clock.enter(FORWARD)
        if self._clock.phase == FORWARD and phase is not None:
            self._passing = self._clock.begun

    def forward_ends(self) -> None:
        """It, or one without gradients, has returned; one that raised ends with its step at the latest."""
        self._passing = None
        if self._clock.model is not None and self._now() == NO_GRAD:
            self._clock.enter(NO_GRAD)

    def evaluation_begins(self, model: str) -> None:
        """A watched module of this model begins a forward pass without gradients."""
        if self._now() == NO_GRAD:
            self._clock.enter(NO_GRAD, model)

    def gradients_switched(self, *, are_enabled: bool, is_clipping: bool) -> None:
        """Gradients were disabled, or enabled again; a module that does so is in its forward pass still."""
        phase = self._now()
        if are_enabled:
            if phase in (NO_GRAD, CLIPPING):
                self._clock.enter(self._after_switch)
        elif is_clipping and phase not in (None, BACKWARD, DATA_WAIT):
            self._after_switch = self._base
            self._clock.enter(CLIPPING)
        elif phase in _OPEN and (self._passing is None or self._passing is not self._clock.begun):
            self._after_switch = phase
            self._clock.enter(NO_GRAD)

    def backward_begins(self, numbers: Sequence[int], asked: Hashable, makes_graph: bool) -> None:
        """A backward pass begins; after one whose gradients are differentiated, the forward pass goes on."""
        phase = self._now()
        if phase is not None and phase not in (BACKWARD, DATA_WAIT) and backward_number() == -1:
            self._after_backward = phase if makes_graph or phase == NO_GRAD else self._base
            self._clock.enter(BACKWARD)

    def backward_ended(self) -> None:
        """It has returned, or raised."""
        if self._now() == BACKWARD and backward_number() == -1:
            self._clock.enter(self._after_backward)

    def optimizer_begins(self, *_: Any) -> None:
        """A hook of torch: an optimizer is about to step."""
        if not _is_compiling() and self._now() not in (None, BACKWARD, DATA_WAIT):
            if self._hook is None:  # not before: a monitor may begin while torch goes through these hooks
                try:
                    self._hook = register_optimizer_step_post_hook(self.optimizer_ended)
                except Exception:  # its end would not be seen
                    return
            self._optimizers = self._optimizers + 1 if self._base == OPTIMIZER else 1
            self._optimizing = self._clock.begun
            self._clock.enter(OPTIMIZER)

    def optimizer_ended(self, *_: Any) -> None:
        """A hook of torch: it has stepped."""
        phase = None if _is_compiling() else self._now()
        if phase is not None and phase != BACKWARD and self._base == OPTIMIZER:
            self._optimizers -= 1
            if not self._optimizers:
                self._optimizing = None
                self._clock.enter(OTHER)

    def leave(self) -> None:
        """No optimizer's end is told from now on."""
        if self._hook is not None:
            self._hook.remove()


def phases_of(span: Span, *, has_compiled_code: bool) -> Mapping[str, float] | str | None:
    """Device seconds of a step in each phase that it had, which add up to its time.

    A reason in their place where they are unknown; None for a step whose time is unknown.
    """
    if span.begin is None:
        return None
    seen = {phase for _, phase in span.changes}
    if len(span.changes) >= MOST_CHANGES:
        return f"the step changed its phase {MOST_CHANGES:,} times or more, which is not followed further"
    if FORWARD not in seen:
        return f"no forward pass of the watched model was seen in this step: {_IN_COMPILED_CODE}"
    if BACKWARD not in seen:
        return f"no backward pass was seen in this step: {_IN_COMPILED_CODE}"
    if OPTIMIZER not in seen and has_compiled_code:
        return f"no optimizer was seen to step: {_IN_COMPILED_CODE}"
    found: dict[str, float] = {}
    for begin, mark, phase, _ in _stretches(span):
        seconds = seconds_between(begin, mark)
        if seconds is None:
            return "a mark could not be placed: a CUDA graph was captured, or the device was too far behind"
        for pause in span.pauses:
            seconds -= _overlap(pause.begin.device_s, pause.end.device_s, begin.device_s, mark.device_s)
        found[phase] = found.get(phase, 0.0) + seconds
    return found


def _stretches(span: Span) -> Iterator[tuple[TimeMark, TimeMark, str, str | None]]:
    """What lies between two marks, pauses included: its phase, and the model that runs without gradients."""
    begin, phase, model = span.begin, OTHER, None
    for place, (mark, following) in enumerate((*span.changes, (span.end, OTHER))):
        if begin is not None:
            yield begin, mark, phase, model
        begin, phase, model = mark, following, span.models.get(place)


def parts_of(span: Span, calls: Sequence[tuple[TimeMark, TimeMark]]) -> list[StepPart]:
    """A step whose phases are known, from begin to end, with its pauses and with calls of `generate`.

    The parts of each phase add up to its seconds in `phases_of`; no pause lies in another, and no call.
    """
    layers: list[tuple[TimeMark, TimeMark, int, Any]] = [
        *((begin, end, 0, (phase, model)) for begin, end, phase, model in _stretches(span)),
        *((pause.begin, pause.end, 1, pause.kind or OTHER) for pause in span.pauses),
        *((begin, end, 2, GENERATE) for begin, end in calls),
    ]
    changes: list[tuple[float, bool, int, Any]] = []
    """What ends and what begins, in which layer; of one moment, what ends is first."""
    for begin, end, layer, what in layers:
        if begin.device_s is not None and end.device_s is not None and begin.device_s < end.device_s:
            changes += (begin.device_s, True, layer, what), (end.device_s, False, layer, None)
    found: list[StepPart] = []
    now, last_s = [None, None, None], 0.0
    for change_s, _, layer, what in sorted(changes, key=lambda change: change[:2]):
        inside, pause, call = now
        if inside is not None and change_s > last_s:
            phase, model = inside
            kind, work = phase if pause is None else PAUSE, call or model or pause
            is_more = bool(found) and (found[-1].phase, found[-1].work) == (kind, work)
            before_s = found.pop().seconds if is_more else 0.0
            found.append(StepPart(phase=kind, work=work, seconds=before_s + change_s - last_s))
        last_s, now[layer] = change_s, what
    return found


def _overlap(
    begin_s: float | None, end_s: float | None, other_begin_s: float | None, other_end_s: float | None
) -> float:
    if begin_s is None or end_s is None or other_begin_s is None or other_end_s is None:
        return 0.0  # the time of the whole step is unknown then
    return max(0.0, min(end_s, other_end_s) - max(begin_s, other_begin_s))
