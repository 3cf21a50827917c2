"""The training thread's part of a run: takes notes of each step, and hands one over when it ends.

    a forward pass ──► note_batch: its template, the last batch's if both have the same signature; a step
                       that is observed begins here, or at the end of the last log_step
    log_step       ──► one StepNote: what it was given, a mark on the device's clock, what it shares with the
                       step before ──► row thread

Between two calls a training step has evicted the processor's caches: each function and object that is touched
then costs a microsecond or more. So numbers, rates and rows are computed on the row thread, and device
values are sent to the host together, every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..flops import HostCopy
from ..torch_private.dispatch import hidden_from_modes
from ..torch_private.watching import backward_number, miss_compiled_calls
from .hybrid.instruments import Instruments
from .notices import Notices
from .ranks.this_rank import ThisRank
from .rows.row_thread import RowThread
from .step_flops.watch import StepWatch, kind_of
from .step_note import (
    NO_EXTRAS,
    WARMUP_STEPS,
    ObservedStep,
    StepExtras,
    StepNote,
)
from .timing.between_steps import BetweenSteps
from .timing.clock import StepClock, TimeMark
from .timing.phases import StepPhases
from .values.datasets import PendingDatasetMetrics
from .values.intake import LARGEST_STEP, Intake
from .watching.batch_notes import Batch, BatchNotes, StepBatches, Template, TensorSizes
from .watching.compilations import NewGraphs
from .watching.generation import Generation
from .watching.measuring import Measuring
from .watching.model_hooks import ModelHooks
from .watching.watched import Watched

_SLOW_STEP_S = 1.0
"""Device values of a longer step are sent at once: the cost is small compared with the step."""
_CHANGES_SHOWN = 5
_now_s = time.perf_counter
_READY = (float, type(None))
"""Types of numbers that are taken as they are."""
Datasets = Sequence[tuple[PendingDatasetMetrics, HostCopy]]


class BegunBatch(NamedTuple):
    """A batch that was noted, and whether it is the first of its step."""

    template: Template
    is_first: bool


class EndedStep(NamedTuple):
    """What was observed of a step that has ended, the autograd nodes it made, and its backward passes.

    `gradients` are those that its optimizers found, `apart` the batches of its passes without gradients.
    `generations` are calls of `generate`.
    """

    observed: ObservedStep | None
    nodes: int | None
    passes: int | None
    gradients: bytes | None
    apart: tuple[TensorSizes, ...]
    generations: tuple[Generation, ...]


class OwnTime:
    """The monitor's time on the training thread: in the first step, when it starts, and in all others."""

    def __init__(self) -> None:
        self.first_step_s: float | None = None
        self.later_s = 0.0

    def add(self, seconds: float) -> None:
        """Add time of the step that goes on."""
        self.later_s += seconds

    def end_step(self) -> None:
        """A step has ended."""
        if self.first_step_s is None:
            self.first_step_s, self.later_s = self.later_s, 0.0


class StepRecorder:
    """Lives on the training thread, which holds the monitor's lock in every call."""

    def __init__(
        self,
        *,
        hooks: ModelHooks,
        measuring: Measuring,
        between: BetweenSteps,
        clock: StepClock,
        intake: Intake,
        batches: BatchNotes,
        watch: StepWatch,
        instruments: Instruments,
        rank: ThisRank,
        rows: RowThread,
        phases: StepPhases | None,
        notices: Notices,
    ) -> None:
        self._phases = phases
        self._hooks, self._measuring, self._between, self._clock = hooks, measuring, between, clock
        self.intake, self.batches, self.watch = intake, batches, watch
        self._instruments, self._rank = instruments, rank
        self._rows, self._notices = rows, notices
        self._graphs = NewGraphs()
        self.logged = 0
        """Steps that were handed over."""
        self.own_time = OwnTime()

    def facts(self) -> dict[str, Any]:
        """What is known of the batches: shapes, and the workers of their loader."""
        return {"batch_shapes": self.batches.shapes(), "loader_workers": self._between.workers}

    def left_out_s(self) -> dict[str, float]:
        """Seconds that were excluded from the step that has begun."""
        return self._clock.left_out_since_last_step()

    def forget_models(self) -> None:
        """Other models are watched from now on."""
        self._rank.role_is_due = True
        self.watch.forget_models()

    def note_batch(
        self, batch: Batch | None, began_s: float, slot: int | None, watched: Watched | None
    ) -> BegunBatch | None:
        """Note a micro-batch of a module; None if its forward pass begins no work of the step.

        The first one of a step also begins the step. `slot` is None for a batch that gives only the step's
        samples and tokens, `watched` for one that was passed to `observe`.
        """
        if self._rank.role_is_due:
            self._rank.find_role(self._hooks.models.roots)
        batches, between, in_backward = self.batches, self._between, backward_number() != -1
        is_first = not batches.has_notes
        name = None if watched is None else watched.name
        if not batches.note(batch, slot, name, in_backward=in_backward):
            return None
        if not is_first:
            if between.last_s is not None:
                between.last_s = began_s
        elif not in_backward:  # else a checkpoint wraps the model, and its first run was not seen
            between.begun(began_s)
        if is_first:
            self._begin_step()
        template = batches.last_template
        self.own_time.add(_now_s() - began_s)
        is_counted = slot is not None and not in_backward
        return BegunBatch(template, is_first) if is_counted and template is not None else None

    def _begin_step(self) -> None:
        if not self.logged:  # later steps begin where the last one ended
            self._clock.begin()
        if self._instruments.step_begins(self.logged):
            self.watch.observe_next_batch()

    def batch_begins(self, begun: BegunBatch) -> None:
        """After `note_batch`, where modes may be entered: the forward pass of the noted batch begins."""
        self.watch.batch_begins(begun.template, is_first=begun.is_first)
        is_recorded = self.watch.observer is not None or self._instruments.is_recording
        if begun.is_first and self._measuring.profiles and not is_recorded:
            # Not an observed step, of which a profiler would record each operator twice.
            self._measuring.begin_step(self.watch.convention)

    def pass_begins(self, name: str | None, *, is_training: bool) -> bool:
        """A forward pass of a watched module begins; whether its end is to be told."""
        self._instruments.pass_begins()
        if self._phases is not None:
            if is_training:
                self._phases.forward_begins()
            elif name is not None and not self.watch.signals.is_generating:
                self._phases.evaluation_begins(name)
        observer = self.watch.observer
        if observer is None:
            return False
        observer.pass_begins(is_training=is_training, name=name if is_training else None)
        return True

    def pass_ends(self) -> None:
        """It has ended, by return or exception."""
        self.pass_returned()
        observer = self.watch.observer
        if observer is not None:
            observer.pass_ends()

    def pass_returned(self) -> None:
        """It has returned."""
        if self._phases is not None:
            self._phases.forward_ends()

    def end_step(self) -> EndedStep:
        """Before `log_step`, with modes as the program has them: the step ends, and its observation."""
        observed, signals = self.watch.step_ends(), self.watch.signals
        return EndedStep(
            observed,
            signals.nodes_made(),
            signals.passes,
            signals.gradients,
            signals.apart,
            tuple(signals.generations),
        )

    def log_step(
        self,
        step: Any,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        attention_mask: Any,
        skip_remote: Any,
        flops: Any,
        ended: EndedStep,
        datasets: Datasets,
        now_s: float,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Hand over one note of a step that has ended."""
        intake, measuring, extras, observed = self.intake, self._measuring, NO_EXTRAS, ended.observed
        instruments = self._instruments
        # The mark is placed first, since a device that waits for the host would wait for all of this. With
        # counters it follows their cut: once the mark has passed, so has the cut.
        span = self._clock.end(now_s) if instruments.counters is None else None
        instruments.step_ends()
        if attention_mask is not None or flops is not None or datasets or measuring.profiler is not None:
            extras = self._extras(attention_mask, flops, datasets)
        if metrics:
            extras = extras._replace(metrics=metrics)
        if skip_remote is not False and intake.flag("skip_wandb", skip_remote):
            extras = extras._replace(skip_remote=True)
        if self._hooks.are_unsettled:
            self._hooks.settle()
        batches = self.batches.take()
        if observed is not None:
            extras = extras._replace(observed=observed)
        kind = kind_of(batches, ended.nodes, ended.passes, ended.gradients)
        self.watch.note_step(self.logged + 1, kind, is_observed=observed is not None)
        if not batches.notes or not self._hooks.models.is_one:
            self._without_forward_passes(batches)
        if type(step) is not int or not -LARGEST_STEP <= step <= LARGEST_STEP:
            step = intake.step_number(step)
        steps = intake.steps_since_last(step)
        is_warmup = (
            self._graphs.appeared()
            or self.logged < WARMUP_STEPS
            or extras.profile is not None
            or observed is not None
            or instruments.is_recording
        )
        cut = instruments.cut(now_s, ended.nodes, is_quiet=not is_warmup)
        if cut is not None:
            extras = extras._replace(cut=cut)
        last_end_s = self._between.end_s
        is_slow = last_end_s is not None and now_s - last_end_s > _SLOW_STEP_S
        take = intake.values.number  # floats and None need no conversion
        note = StepNote(
            step,
            steps,
            epoch if type(epoch) in _READY else take("epoch", epoch),
            loss if type(loss) in _READY else take("loss", loss),
            grad_norm if type(grad_norm) in _READY else take("grad_norm", grad_norm),
            learning_rate if type(learning_rate) in _READY else take("learning_rate", learning_rate),
            batches,
            self.logged + 1,
            self.watch.models.state,
            ended.nodes,
            measuring.is_counted,
            is_warmup,
            self._between.take(),
            span or self._clock.end(now_s),
            extras,
            ended.passes,
            ended.gradients,
            ended.apart,
            ended.generations,
        )
        intake.values.flush_if_due(now_s, is_due=is_slow)
        instruments.hand_over(note)
        self._rows.put(note)
        self.logged += 1
        measuring.add_steps(steps)
        self.watch.plan.set_frequency(measuring.frequency)
        if self.logged >= self.watch.models.check_at:
            self.check_models()

    def begin_next_step(self) -> None:
        """The last thing that `log_step` does: the next step begins, and may be observed as a whole."""
        self.watch.next_begins(self.logged)
        if self.watch.observer is None and self._instruments.wants_pause(self.logged):
            mark = self._clock.moment()
            with hidden_from_modes():
                took_time = self._instruments.between_steps(self.logged)
            if took_time:
                self._clock.pause(mark, "other")

    def check_models(self, *, now: bool = False) -> None:
        """Look for changes of the models; `now` at the end of the run."""
        change = self.watch.check_models(self.logged, now=now)
        if change is not None:
            state = self.watch.models.state
            self._notices(
                f"the model changed between the logged steps {change.after_step} and {change.until_step}: "
                "steps in between may be logged with the FLOPs from before the change",
                about=f"model change {state if state < _CHANGES_SHOWN else ''}",
            )

    def _extras(self, attention_mask: Any, flops: Any, datasets: Datasets) -> StepExtras:
        """The optional parts of a step, absent from most."""
        tokens, useful_tokens = (None, None) if attention_mask is None else self.intake.mask(attention_mask)
        return StepExtras(
            tokens,
            useful_tokens,
            given_flops=None if flops is None else self.intake.flops(flops),
            profile=self._measuring.end_step(),
            datasets=datasets,
        )

    def _without_forward_passes(self, batches: StepBatches) -> None:
        """A step whose forward passes may not have been seen: look for them elsewhere from now on."""
        hooks = self._hooks
        has_batches = batches.notes or batches.missing or hooks.are_disabled
        if hooks.were_compiled() or has_batches or not hooks.are_there:
            return
        miss_compiled_calls()
        hooks.watch_calls()

    def pause(self) -> TimeMark:
        """Exclude what runs from now on from the step, until `resume` gets the mark."""
        mark = self._clock.moment()
        self.intake.values.flush()
        self.watch.suspend()
        self._measuring.interrupt()
        self._instruments.interrupt()
        return mark

    def resume(self, mark: TimeMark, kind: str, began_s: float) -> None:
        """Continue the step; `kind` is what ran since the mark, which was requested at `began_s`."""
        self._clock.pause(mark, kind)
        self.watch.resume()
        self._instruments.resume()
        self._between.shift(_now_s() - began_s)
