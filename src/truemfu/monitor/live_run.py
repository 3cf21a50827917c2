"""A run from its first batch or step on: what the training thread notes, and the objects that process it.

    a forward pass ──► note_batch: its template, the last batch's if both have the same signature; a step
                       that is observed begins here, or at the end of the last log_step
    log_step       ──► one StepNote: what it was given, a mark on the device's clock, what it shares with the
                       step before ──► resolver ──► row ──► trackers

Between two calls a training step has evicted the processor's caches: each function and object that is touched
then costs a microsecond or more. So numbers, rates and rows are computed on the resolver's thread, and device
values are sent to the host together, every few seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..convention import Convention
from ..errors import one_line
from ..flops import HostCopy
from ..hardware.counters.executed import CYCLE_COUNTERS, executed_method, has_rate
from ..hardware.detect import spec_of
from ..hardware.nsight.audited import AuditedKernels
from ..torch_private.loading import listen
from ..torch_private.watching import backward_number, miss_compiled_calls
from .config import MonitorConfig
from .hybrid.hardware_windows import HardwareWindows
from .notices import Notices
from .ranks.reporter import ROW_EVERY_S
from .ranks.this_rank import ThisRank
from .row_side.audit_step import AuditStep
from .row_side.frequency import DETAILS_S, StepsOrSeconds
from .row_side.output import Output
from .row_side.resolver import Resolver, peak_memory_bytes
from .step_flops.known import KnownSteps
from .step_flops.plan import ObservationPlan
from .step_flops.source import FlopsSource
from .step_flops.watch import StepWatch
from .summary import RunFigures, info_of
from .training_side import forks
from .training_side.batch_notes import Batch, BatchNotes, StepBatches, Template
from .training_side.between_steps import BetweenSteps
from .training_side.clock import Mark, StepClock, clock_for
from .training_side.compilations import compilations
from .training_side.datasets import PendingDatasetMetrics
from .training_side.hardware_watch import HardwareWatch, open_watch
from .training_side.host_values import HostValues
from .training_side.intake import LARGEST_STEP, Intake
from .training_side.measuring import Measuring
from .training_side.model_facts import facts_of
from .training_side.model_hooks import ModelHooks
from .training_side.signals import write_at_signals
from .training_side.step_note import (
    NO_EXTRAS,
    WARMUP_STEPS,
    Observed,
    StepExtras,
    StepNote,
    StepPosition,
)
from .training_side.watched import Watched

_ROWS_TIMEOUT_S = 5.0
_RANKS_TIMEOUT_S = 2.0
"""At the end, for what other ranks have not reported yet."""
_UNSENT_TIMEOUT_S = 1.0
"""When device values could not be sent: earlier steps may still become rows."""
_SLOW_STEP_S = 1.0
"""Device values of a longer step are sent at once: the cost is small compared with the step."""
_MAX_HOLD_S = 6.0
"""After that the resolver sends held values; the training thread has done so unless its step is long."""
_LOCK_TIMEOUT_S = 0.3
_BUSY_TIMEOUT_S = 5.0
"""How long `close` and `save_logs` wait for a call of the monitor on the training thread to return."""
_CHANGES_SHOWN = 5
_SPLIT_SEQUENCES = (
    "sequences are split over ranks (context parallel), and ring attention skips chunks, so the pairs of the "
    "whole sequence are unknown: pass its FLOPs to log_step"
)
_READY = (float, type(None))
"""Types of numbers that are taken as they are."""
Datasets = Sequence[tuple[PendingDatasetMetrics, HostCopy]]


class LiveRun:
    """Lives on the training thread, which holds `training_lock` in every call unless stated otherwise.

    `training_lock` guards the training thread's state, which threads of the monitor read at times.
    """

    def __init__(
        self,
        config: MonitorConfig,
        folder: Path,
        *,
        device: torch.device,
        hooks: ModelHooks,
        measuring: Measuring,
        between: BetweenSteps,
        audited: AuditedKernels | None,
        output: Output,
        notices: Notices,
        training_lock: threading.RLock,
    ) -> None:
        self._config, self._device, self._hooks = config, device, hooks
        self._measuring, self._between = measuring, between
        self._output, self._notices, self._training_lock = output, notices, training_lock
        self._forks = forks.number
        self._model_facts = facts_of(hooks.roots)
        self._ranks = ThisRank.current(notices)
        # What holds for all ranks of a job is one warning, rank 0's.
        about_figures = notices if self._ranks.is_first else self._ranks.note
        self._values = HostValues(notices)
        self._intake = Intake(self._values, notices)
        self._clock = StepClock(clock_for(device))
        between.mark_with(self._clock)
        self._watch, executed = self._opened_watch(audited, about_figures)
        self._audit = AuditStep.from_environment(self._ranks, device, notices)
        self._plan = ObservationPlan(config.flops_profile_freq, time.perf_counter())
        self._steps = StepWatch(
            self._plan,
            Convention(attention=config.attention),  # type: ignore[arg-type]
            is_enabled=not config.estimates_only,
            is_possible=self._can_observe,
            models=lambda: hooks.roots,
        )
        self._batches = BatchNotes(self._values)
        self._flops = FlopsSource(
            config,
            KnownSteps(
                self._plan,
                self._steps.convention,
                notice=about_figures,
                needs_whole_steps=self._steps.observe_whole_steps,
                repeats_agree=self._steps.repeats_agree,
                hindrance=lambda: self._steps.hindrance,
            ),
            models=lambda: hooks.roots,
            module_of=hooks.module_of,
            notice=about_figures,
            device=device,
            executed_method=executed,
        )
        self.logged = self._steps_done = 0
        """Steps that were handed over, and how many they represent."""
        self._ranks.join(
            folder,
            device=device,
            reads_gpu=config.hardware_counters_enabled,
            clock_hz=self._counted_clock_hz,
            memory_bytes=lambda: peak_memory_bytes(device),
        )
        if self._ranks.is_first:
            output.other_files += self._ranks.files
        self._has_more_to_begin = True
        self._left: tuple[Observed | None, int | None] = None, None
        """What was observed of the step that ends, and the autograd nodes it made."""
        self._begun: tuple[Template, bool] | None = None
        """The template of the batch that was noted last, and whether it is the first of its step."""
        self._compilations = compilations()
        self.own_time_s = 0.0
        """The monitor's time on the training thread."""
        self._resolver = Resolver(
            clock=self._clock.clock,
            device=device,
            flops=self._flops,
            plan=self._plan,
            ranks=self._ranks,
            output=output,
            notices=notices,
            details=StepsOrSeconds(config.detailed_log_freq, DETAILS_S, began_s=time.perf_counter()),
            audit=self._audit,
            send_held=self._send_held,
            measured_peak_flops_per_s=_times(config.measured_peak_tflops, 1e12),
            audited_tiles={} if audited is None else audited.tile_factors(),
            hardware=None
            if self._watch is None
            else HardwareWindows(
                self._watch,
                spec=spec_of(device),
                audited=audited,
                world_size=self._ranks.world_size,
                collective_share=lambda: self._ranks.collective_share,
                notice=about_figures,
            ),
        )
        self._leave_loaders = listen(between)
        if self._ranks.is_first:
            output.start(self.info())
        is_held = training_lock._is_owned  # type: ignore[attr-defined]  # as threading.Condition does
        self._leave_signals = (
            write_at_signals(self._write_out, is_held) if self._ranks.is_first else lambda: None
        )

    def _counted_clock_hz(self) -> float | None:
        """The clock by the cycle counters of `hybrid`, of its last window unless that is long over."""
        hardware = self._resolver.hardware
        if hardware is None or hardware.latest is None:
            return None
        is_recent = time.monotonic() - hardware.latest_at_s < 2 * ROW_EVERY_S
        return (
            hardware.latest.clock_hz if is_recent and hardware.latest.clock_source == CYCLE_COUNTERS else None
        )

    def _opened_watch(
        self, audited: AuditedKernels | None, notice: Callable[[str], None]
    ) -> tuple[HardwareWatch | None, str]:
        """The counters of `hybrid`, if there are any, and how HFU is measured unless it is counted."""
        if self._config.mode != "hybrid":
            return None, "profiler"
        if not self._config.hardware_counters_enabled:
            self._go_without_counters(None)
            return None, "profiler"
        try:
            watch = open_watch(self._device, notice)
        except Exception as error:
            watch = one_line(error)
        if not isinstance(watch, HardwareWatch):
            self._go_without_counters(watch)
            return None, "profiler"
        if has_rate(spec_of(self._device)):
            is_corrected = audited is not None and audited.executed_over_activity is not None
            return watch, executed_method(is_corrected=is_corrected)
        self._go_without_counters(f"the FLOP per cycle of {_device_name(self._device)} are not known")
        return watch, "profiler"

    def _go_without_counters(self, reason: str | None) -> None:
        self._measuring.go_without_counters(reason if self._ranks.is_first else None)

    @property
    def has_batches(self) -> bool:
        """Whether a batch of the current step was noted."""
        return self._batches.has_notes

    def next_position(self) -> StepPosition | None:
        """Which step comes next, as far as that is known."""
        return self._intake.next_position()

    def forget_models(self) -> None:
        """Other models are watched from now on."""
        self._ranks.role_is_due = True
        self._steps.forget_models()

    def _find_role(self) -> None:
        self._ranks.find_role(self._hooks.roots)
        self._flops.refusal = _SPLIT_SEQUENCES if self._ranks.role.splits_sequences else None

    def forget_batches(self) -> None:
        """Drop the notes of the current step: its batches are passed to `observe` instead."""
        self._batches.take()

    def note_batch(
        self, batch: Batch | None, began_s: float, slot: int | None, watched: Watched | None
    ) -> None:
        """Note a micro-batch of a module; the first one of a step also begins the step.

        `slot` is None for a batch that gives only the step's samples and tokens, `watched` for one that was
        passed to `observe`.
        """
        if self._ranks.role_is_due:
            self._find_role()
        batches, between, in_backward = self._batches, self._between, backward_number() != -1
        is_first = not batches.has_notes
        name = None if watched is None else watched.name
        if not batches.note(batch, slot, name, in_backward=in_backward):
            return
        if not is_first:
            if between.last_s is not None:
                between.last_s = began_s
        elif not in_backward:  # else a checkpoint wraps the model, and its first run was not seen
            between.begun(began_s)
        if is_first and self._has_more_to_begin:
            self._begin_step()
        template = batches.last_template
        is_counted = slot is not None and not in_backward
        self._begun = (template, is_first) if is_counted and template is not None else None
        self.own_time_s += time.perf_counter() - began_s

    def batch_begins(self) -> None:
        """After `note_batch`, where modes may be entered: the forward pass of the noted batch begins."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        template, is_first = begun
        self._steps.batch_begins(template, is_first=is_first)
        if is_first and self._measuring.profiles and self._steps.observer is None:
            # Not an observed step, of which a profiler would record each operator twice.
            self._measuring.begin_step(self._steps.convention)

    def evaluation_begins(self) -> bool:
        """A forward pass without gradients begins; whether its end is to be told."""
        return self.pass_begins(None, is_training=False)

    def pass_begins(self, name: str | None, *, is_training: bool) -> bool:
        """A forward pass of a watched module begins; whether its end is to be told."""
        observer = self._steps.observer
        if observer is None:
            return False
        observer.pass_begins(is_training=is_training, name=name)
        return True

    def pass_ends(self) -> None:
        """It has ended, by return or exception."""
        observer = self._steps.observer
        if observer is not None:
            observer.pass_ends()

    def _begin_step(self) -> None:
        if not self.logged:  # later steps begin where the last one ended
            self._clock.begin()
        if self._audit is not None and self._audit.begin_step(self.logged, compilations()):
            self._steps.observe_next_batch()
        self._has_more_to_begin = self._audit is not None

    def leave_step(self) -> None:
        """Before `log_step`, with modes as the program has them: the step ends, and its observation."""
        self._left = self._steps.step_ends(), self._steps.nodes()

    def stop_observing(self) -> None:
        """No step is observed from now on, nor the rest of this one."""
        self._steps.close()

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
        datasets: Datasets,
        now_s: float,
    ) -> None:
        """End a step: hand over one note of it."""
        intake, measuring, extras = self._intake, self._measuring, NO_EXTRAS
        # The mark is placed first, since a device that waits for the host would wait for all of this. With
        # counters it follows their cut: once the mark has passed, so has the cut.
        span = self._clock.end(now_s) if self._watch is None else None
        if self._audit is not None:
            self._audit.end_step()
        (observed, nodes), self._left = self._left, (None, None)
        if attention_mask is not None or flops is not None or datasets or measuring.profiler is not None:
            extras = self._extras(attention_mask, flops, datasets)
        if self._hooks.are_unsettled:
            self._hooks.settle()
        batches = self._batches.take()
        if observed is not None:
            extras = extras._replace(observed=observed)
        self._steps.note_step(self.logged + 1, batches, nodes, is_observed=observed is not None)
        if not batches.notes or not self._hooks.see_whole_batches:
            self._without_forward_passes(batches)
        if type(step) is not int or not -LARGEST_STEP <= step <= LARGEST_STEP:
            step = intake.step_number(step)
        steps = intake.steps_since_last(step)
        compiled = compilations()
        is_warmup = (
            self.logged < WARMUP_STEPS
            or compiled != self._compilations
            or extras.profile is not None
            or observed is not None
        )
        if self._watch is not None:
            # Windows exclude steps that compile, are profiled or observed.
            if is_warmup:
                self._watch.restart()
            elif (cut := self._watch.cut(now_s)) is not None:
                extras = extras._replace(cut=cut)
        last_end_s = self._between.end_s
        is_slow = last_end_s is not None and now_s - last_end_s > _SLOW_STEP_S
        take = intake.number  # floats and None need no conversion
        note = StepNote(
            step,
            steps,
            epoch if type(epoch) in _READY else take("epoch", epoch),
            loss if type(loss) in _READY else take("loss", loss),
            grad_norm if type(grad_norm) in _READY else take("grad_norm", grad_norm),
            learning_rate if type(learning_rate) in _READY else take("learning_rate", learning_rate),
            batches,
            self.logged + 1,
            self._steps.state,
            nodes,
            measuring.is_counted,
            is_warmup,
            self._between.take(),
            span or self._clock.end(now_s),
            skip_remote if type(skip_remote) is bool else intake.flag("skip_wandb", skip_remote),
            extras,
        )
        self._values.flush_if_due(now_s, is_due=is_slow)
        if self._audit is not None:
            self._audit.hand_over(note)
        self._resolver.put(note)
        if observed is not None:
            self._resolver.wake()  # the sooner its count is known, the sooner rows are written
        self.logged += 1
        self._compilations = compiled
        self._steps_done += steps
        if self._steps_done >= measuring.plan_at:
            measuring.plan_next(self._steps_done)
            self._plan.set_frequency(measuring.frequency)
        self._check_models()

    def begin_next_step(self) -> None:
        """The last thing that `log_step` does: the next step begins, and may be observed as a whole."""
        self._steps.next_begins(self.logged)

    def _check_models(self, *, now: bool = False) -> None:
        change = self._steps.change
        self._steps.check_models(self.logged, now=now)
        if self._steps.change is not change and (change := self._steps.change) is not None:
            self._notices(
                f"the model changed between the logged steps {change.after_step} and {change.until_step}: "
                "steps between them may have the FLOPs before the change",
                about=f"model change {self._steps.state if self._steps.state < _CHANGES_SHOWN else ''}",
            )

    def _extras(self, attention_mask: Any, flops: Any, datasets: Datasets) -> StepExtras:
        """The optional parts of a step, absent from most."""
        tokens, useful_tokens = (None, None) if attention_mask is None else self._intake.mask(attention_mask)
        return StepExtras(
            tokens,
            useful_tokens,
            given_flops=None if flops is None else self._intake.flops(flops),
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

    def _can_observe(self) -> bool:
        """Whether a step may be observed from now on: no CUDA graph is being captured."""
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def pause(self) -> Mark:
        """Exclude what runs from now on from the step, until `resume` gets the mark."""
        mark = self._clock.moment()
        self._values.flush()
        self._steps.suspend()
        self._measuring.interrupt()
        if self._audit is not None:
            self._audit.pause()
        if self._watch is not None:
            self._watch.restart()
        return mark

    def resume(self, mark: Mark, kind: str, began_s: float) -> None:
        """Continue the step; `kind` is what ran since the mark, which was requested at `began_s`."""
        self._clock.pause(mark, kind)
        self._steps.resume()
        if self._audit is not None:
            self._audit.resume()
        self._between.shift(time.perf_counter() - began_s)

    def save(self, timeout_s: float) -> None:
        """On any thread: write every step so far, and wait for that."""
        is_sent = self._send_all()
        if not self._finish_rows(timeout_s if is_sent else _UNSENT_TIMEOUT_S):
            self._notices("some steps were not processed in time and are not saved yet")
        self._output.flush(timeout_s)

    def finish(self) -> None:
        """On any thread: process the remaining steps, and end everything except the output."""
        in_closing = self._notices.in_closing
        in_closing(self._leave_loaders)
        in_closing(self.stop_observing)
        in_closing(self._check_models_at_end)
        self._ranks.expect_last_reports()
        ends_s = time.monotonic() + _RANKS_TIMEOUT_S
        try:
            in_closing(self._finish_last_rows)
        finally:  # also after a KeyboardInterrupt
            in_closing(self._resolver.stop, _ROWS_TIMEOUT_S)
            in_closing(self._ranks.leave, ends_s)
            in_closing(self._ranks.store.stop)
            if self._audit is not None:
                in_closing(self._audit.close, self.logged)
            in_closing(self._close_watch)

    def _check_models_at_end(self) -> None:
        if self.logged:
            self._check_models(now=True)

    def _finish_last_rows(self) -> None:
        is_sent = self._send_all()
        patience_s = 0.0 if self._audit is None else self._audit.patience_s
        timeout_s = max(_ROWS_TIMEOUT_S, patience_s) if is_sent else _UNSENT_TIMEOUT_S
        if not self._finish_rows(timeout_s, hold_s=_RANKS_TIMEOUT_S) and not self._resolver.finish_pending(
            timeout_s, hold_s=0.0
        ):
            self._notices("the last steps were not processed in time and are lost")

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes files and logs to trackers."""
        return self._ranks.is_first

    def leave_signals(self) -> None:
        """Stop handling signals."""
        self._leave_signals()

    def _close_watch(self) -> None:
        if self._watch is None:
            return
        hardware = self._resolver.hardware
        if hardware is not None and (why := hardware.why_nothing()) is not None:
            self._notices(why)
        try:
            self._watch.close()
        except Exception as error:
            self._notices(f"the hardware counters could not be closed: {one_line(error)}")

    def _finish_rows(self, timeout_s: float, *, hold_s: float | None = None) -> bool:
        """Wait for the rows of all steps so far."""
        return self._resolver.finish_pending(timeout_s, hold_s=hold_s)

    def _send_all(self) -> bool:
        """Send the device values that the rows so far need; whether that succeeded."""
        if not self._training_lock.acquire(timeout=_BUSY_TIMEOUT_S):
            self._notices(
                f"the training thread has not returned from a call of the monitor for {_BUSY_TIMEOUT_S:g} s: "
                "rows are written as far as they are complete"
            )
            return False
        try:
            if threading.get_ident() != self._between.thread:
                return self._send_behind_training()
            self._values.flush()
        except Exception as error:
            self._notices(f"values that are still on the device cannot be fetched: {one_line(error)}")
            return False
        finally:
            self._training_lock.release()
        return True

    def _send_held(self) -> bool:
        """On the resolver's thread: send values that were held too long; whether there were any."""
        oldest_s = self._values.oldest_s
        return (
            oldest_s is not None
            and time.perf_counter() - oldest_s > _MAX_HOLD_S
            and self._send_from_other_thread(_LOCK_TIMEOUT_S)
        )

    def _send_from_other_thread(self, timeout_s: float) -> bool:
        """On a monitor thread: send the training thread's held values; False if it is busy with them."""
        if not self._training_lock.acquire(timeout=timeout_s):
            return False
        try:
            return self._send_behind_training()
        finally:
            self._training_lock.release()

    def _send_behind_training(self) -> bool:
        """On another thread: send all values, queued after the training's work; False during a capture."""
        with self._clock.clock.on_other_thread() as is_possible:
            if is_possible:
                self._values.flush()
            return is_possible

    def _write_out(self, timeout_s: float) -> None:
        """On a monitor thread: write all steps so far to disk, as far as the time allows."""
        ends_s = time.perf_counter() + timeout_s
        if forks.number != self._forks:
            return
        with contextlib.suppress(Exception):  # the device may have failed: earlier rows are complete
            self._send_from_other_thread(_LOCK_TIMEOUT_S)
        left_s = ends_s - time.perf_counter()
        self._resolver.finish_pending(0.75 * left_s, hold_s=0.25 * left_s)
        self._output.write_local(max(ends_s - time.perf_counter(), 0.0))

    def batch_shapes(self) -> list[dict[str, list[int]]]:
        """The shapes of the batches so far."""
        return self._batches.shapes()

    def info(self) -> dict[str, Any]:
        """The description of the whole run."""
        return info_of(
            self._config,
            device=_device_name(self._device),
            time_source=self._clock.clock.source,
            world_size=self._ranks.world_size,
            rank=self._ranks.rank,
            model=self._model_facts,
            batch_shapes=self.batch_shapes(),
        ) | ({} if self._ranks.job is None else {"scope": self._ranks.job.scope})

    def figures(self) -> RunFigures:
        """The figures of the run so far."""
        resolver, known = self._resolver, self._flops.known
        return RunFigures(
            self.info(),
            logged=self.logged,
            totals=resolver.totals,
            own_time_s=self.own_time_s,
            own_check_s=self._steps.check_s,
            background_s=resolver.own_time_s,
            observing_s=self._plan.spent_s,
            observed=known.number_counted,
            observed_steps=known.steps,
            profiling_s=resolver.profile_cost_s,
            hardware=None if resolver.hardware is None else resolver.hardware.as_dict(),
            job=self._ranks.figures(),
            notes=[*resolver.notes, *self._ranks.notes],
            left_out_last=self._clock.left_out_since_last_step(),
            held_up_steps=resolver.lost_steps,
            failed_steps=resolver.failed_steps,
            stranded_steps=resolver.stranded_steps,
        )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
