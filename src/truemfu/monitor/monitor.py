"""TrainingMonitor: MFU and HFU on every step, off the step's path.

    forward pass ──► hook: a note of the batch ┐
    log_step ──► a mark on the device's clock  ┴─► StepNote ──► resolver ──► row ──► trackers

The training thread notes and queues: it reads no device value, waits for nothing and writes no file. Once for
each kind of batch it also counts, between two steps; no step time has that in it (`counts.py`). An exception
of ours never leaves these methods; it is said once and the summary repeats it. Only a wrong configuration is
raised, at construction.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError, one_line
from ..flops.host_copy import HostCopy, start_host_copy
from ..flops.interruption import deliver
from ..hardware.audited import read_audit
from ..hardware.detect import override_flops_per_s, spec_of
from ..hardware.executed import executed_method, has_rate
from ..records import RUN_FILE
from ..torch_private.loading import listen
from ..torch_private.table import said as missed
from ..torch_private.watching import backward_number, functorch_level
from ..trackers.base import Tracker
from ..waterfall import between_steps_notes
from .attachment import Attachment
from .audit_step import AuditStep
from .between_steps import BetweenSteps
from .clock import StepClock, clock_for
from .compilations import compilations
from .config import MonitorConfig, load_config
from .counting import Counting, state_of
from .counts import Counts
from .data import WatchedData
from .datasets import DatasetMetrics, PendingDatasetMetrics, shifts_labels
from .frequency import DETAILS_S, StepsOrSeconds
from .hardware_watch import HardwareWatch, open_watch
from .hardware_windows import HardwareWindows
from .host_values import HostValues, SentNumbers
from .intake import LARGEST_STEP, Intake, is_tensor
from .kept_forms import FORMS_FILE, KeptInBackground
from .measuring import Measuring
from .model_state import States, facts_of
from .notices import Notices
from .observe import Batch, BatchNote, BatchNotes, StepBatches, UsualBatch
from .output import Output
from .ranks import RankLink
from .resolver import Resolver
from .signals import write_at_signals
from .step_note import WARMUP_STEPS, StepNote, StepPlace
from .summary import show
from .totals import Totals
from .usual_steps import (
    MOST_MICRO_BATCHES,
    PIECE_S,
    SLOW_STEP_S,
    Common,
    Taken,
    UsualPiece,
    UsualSteps,
    can_be_taken,
)
from .watched import Models, Watched, WatchedModels

_CLOSE_TIMEOUT_S = 20.0
_ROWS_TIMEOUT_S = 5.0
_SAVE_TIMEOUT_S = 60.0
_HELD_S = 6.0
"""The training thread hands steps over before that, unless its next step is long."""
_TURN_TIMEOUT_S = 0.3
_UNSENT_TIMEOUT_S = 1.0
"""For steps that nothing more will come of; those before them may still be under way."""
_UNTOLD = (
    "a batch cannot be told to a count, so its step has no MFU: it holds nested tensors or objects with "
    "tensors in them, is inside vmap or its kin, or mixes arguments by place and by name in a forward that "
    "takes any"
)
_NO_DATASETS: Sequence[tuple[PendingDatasetMetrics, HostCopy]] = ()


class _Default(int):
    """An integer nobody gave: what a configuration file says wins over it."""


class TrainingMonitor:
    """Measures a training run and logs it, off the step's path.

        monitor = TrainingMonitor("out", model=model)
        for step, batch in enumerate(monitor.data(loader)):
            ...  # forward, backward, optimizer
            monitor.log_step(step, epoch, loss, grad_norm, learning_rate)

    `config` is a mapping or a YAML file with the sections `monitoring`, `wandb`, `training`; `trackers` are
    names ("wandb", "tensorboard", "mlflow", "trackio", "prometheus") or objects with the four methods of
    `truemfu.trackers.base.Tracker`. A W&B run that is already active is used without being named.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        log_file: str = "training_log.json",
        flops_profile_freq: int = _Default(500),
        *,
        model: Models | None = None,
        trackers: Sequence[str | Tracker] | None = None,
    ) -> None:
        explicit = None if isinstance(flops_profile_freq, _Default) else flops_profile_freq
        self.config: MonitorConfig = load_config(config, flops_profile_freq=explicit)
        override_flops_per_s()  # raises where the environment's peak is no number
        self._audited = None if self.config.audit is None else read_audit(Path(self.config.audit))
        self.output_dir = Path(output_dir)
        if "\0" in str(self.output_dir) or "\0" in log_file:
            raise UsageError("output_dir and log_file must be names of files: they hold a NUL character")
        others = {RUN_FILE: "what is true of the run", FORMS_FILE: "what was counted"}
        if (name := Path(log_file).name) in others:
            raise UsageError(f"log_file must have another name than {name}, which holds {others[name]}")
        self._notices = Notices()
        self._output = Output(
            self.output_dir.absolute(), log_file, self.config, trackers, notice=self._notices
        )
        self._models: WatchedModels | None = None
        self._attachments: list[Attachment] = []
        self._watch: HardwareWatch | None = None
        self._audit: AuditStep | None = None
        self._is_set_up = self._is_closed = self._is_broken = False
        self._pid = os.getpid()
        self._is_manual = False
        self._pauses = 0
        self._datasets = DatasetMetrics(notice=self._notices)
        self._pending_datasets: list[tuple[PendingDatasetMetrics, HostCopy]] = []
        self._measuring = Measuring(self.config, self._notices)
        self._logged = self._steps_done = self._last_step = 0
        self._unlogged = 0
        """Steps that never reached the resolver: the monitor failed, or was switched off by then."""
        self._is_handed_over = False
        """Whether the step that is being logged has reached it."""
        self._is_looked_at = False
        self._between = BetweenSteps()
        self._leave_loaders: Callable[[], None] | None = None
        self._usual = UsualSteps(self._note_other, self._look_at_next, self._between)
        self._around: UsualBatch | None = None
        self._thread = threading.get_ident()
        self._turn = threading.RLock()
        """Whose turn it is with what the training thread holds: its own, or a thread's of ours."""
        self._leave_signals: Callable[[], None] | None = None
        self._compilations = compilations()
        self._own_time_s = self._own_check_s = 0.0
        self._model_facts: dict[str, Any] | None = None
        atexit.register(self.close)
        if model is not None:
            self.attach(model)

    def attach(self, model: Models) -> TrainingMonitor:
        """Watch this model, or several: each training forward pass notes its batch. Attach what you call.

        Several models (a list, or a mapping of names to them) get one MFU for the step and one each. A model
        without a forward of its own is watched by its parts.
        """
        models = WatchedModels(model)
        self.detach()
        if self._models is None or not self._models.are(model):
            self._models = models
            self._measuring.forget()
            shift = models.first is None or shifts_labels(models.first)
            self._datasets = DatasetMetrics(shift=shift, notice=self._notices)
        for watched in self._models.modules:
            self._watch_module(watched)
        return self

    def _watch_module(self, watched: Watched) -> None:
        module = watched.module
        if module is None:
            return
        try:
            attachment = Attachment(
                module,
                self._usual.saw,
                functools.partial(self._on_forward, watched),
                self._usual.keep,
                self._usual.autocast,
                self._on_evaluation,
            )
        except Exception as error:  # a scripted model takes no such hooks
            self._notices(
                f"the model cannot be watched, call monitor.observe(batch) for each micro-batch: "
                f"{type(module).__name__}: {one_line(error)}"
            )
        else:
            self._attachments.append(attachment)

    def detach(self) -> None:
        """Leave the model as it was before `attach`."""
        self._guarded(self._take_in_usual)
        if self._is_set_up:
            self._values.forget_last()
        for attachment in self._attachments:
            attachment.remove()
        self._attachments = []

    def observe(self, batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> None:
        """Note a micro-batch yourself, where the model's forward does not get it whole.

        The model's hooks are then disabled. Where several models are watched, or the parts of one, the batch
        gives the step's samples and tokens, and the FLOPs still come from the forward pass of each.
        """
        self._guarded(self._watch_again)
        gives_sizes_only = self._models is not None and not self._models.is_one
        if not gives_sizes_only:
            if not self._is_manual and self._is_set_up:
                self._batches.take()  # what a hook noted of this step is observed now, or has just run
            self._is_manual = True
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        if not isinstance(batch, (Mapping, tuple, list)):
            self._notices(
                f"observe expects the batch as the model takes it, got {type(batch).__name__}: not noted"
            )
        elif not self._pauses:
            given: Batch | None
            try:
                given = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
            except Exception:  # a sequence of the caller's own may do anything
                given = None
            self._guarded(self._note, given, time.perf_counter(), None if gives_sizes_only else 0)

    def data(self, loader: Iterable[Any]) -> WatchedData:
        """The same batches, with the time spent waiting for each of them noted.

        Not needed for torch's DataLoaders: waiting for them is noted anyway.
        """
        return WatchedData(loader, self._between)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside (an evaluation, a checkpoint) is no part of a step."""
        mark, began_s = None, time.perf_counter()
        if self._is_set_up and not self._pauses:
            self._guarded(self._watch_again)
            mark = self._guarded(self._clock.moment)
            self._guarded(self._values.flush)
            self._measuring.interrupt()
            if self._audit is not None:
                self._audit.pause()
            if self._watch is not None:
                self._watch.restart()
        self._pauses += 1
        self._between.is_paused = True
        try:
            yield
        finally:
            self._pauses -= 1
            self._between.is_paused = self._pauses > 0
            if mark is not None and not self._pauses:
                self._guarded(self._clock.pause, mark)
                if self._audit is not None:
                    self._audit.resume()
                if self._between.end_s is not None:
                    self._between.end_s += time.perf_counter() - began_s

    def set_phase(self, name: str | None) -> None:
        """Measure as often as this phase of the training asks for; None: as often as without phases."""
        self._guarded(self._take_in_usual)
        self._measuring.set_phase(name)

    def log_step(
        self,
        step: int,
        epoch: float,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        attention_mask: torch.Tensor | None = None,
        skip_wandb: bool = False,
        *,
        flops: float | None = None,
    ) -> None:
        """End an optimizer step: call it once per step, after the optimizer, whatever the accumulation.

        Loss, gradient norm and mask may be device tensors: they are read later, when they are ready. `flops`
        are the model FLOPs of this rank's whole step where you know them: they are used as they are, and
        nothing is counted.
        """
        began_s, usual = time.perf_counter(), self._usual
        with self._turn:
            try:
                if (
                    attention_mask is None
                    and flops is None
                    and usual.took(began_s, step, epoch, loss, grad_norm, learning_rate, skip_wandb)
                ):
                    return
                usual.is_busy = False
                if not self._is_broken:
                    self._log_step(
                        step,
                        epoch,
                        loss,
                        grad_norm,
                        learning_rate,
                        attention_mask,
                        skip_wandb,
                        flops,
                        began_s,
                    )
                else:
                    self._unlogged += not self._is_closed
            except Exception as error:
                usual.is_busy = False
                self._unlogged += not (self._is_handed_over or usual.has_as_last(step))
                self._switch_off(error)
            finally:
                usual.is_busy = self._is_handed_over = False
        self._between.end_s = end_s = time.perf_counter()
        self._own_time_s += end_s - began_s
        if self._is_set_up and self._counts.signals:
            deliver(self._counts.signals)  # they came in a count, which has ended

    def update_dataset_metrics(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        """Loss and accuracy of each dataset of a mixed batch, with the next `log_step`."""
        config = self.config
        if not config.log_dataset_metrics or not config.dataset_metrics_freq or self._pauses:
            return
        self._guarded(self._take_in_usual)
        place = self._intake.next_place() if self._is_set_up else None
        if place is not None and not place.reaches(config.dataset_metrics_freq):
            return
        self._guarded(self._measure_datasets, batch, outputs, aggregated_loss)

    def save_logs(self) -> None:
        """Write everything logged so far to the local log; waits for it, so not for inside the step.

        From another thread than the training's: all but the last seconds, which that one still holds.
        """
        if self._is_set_up and os.getpid() == self._pid:
            try:
                is_sent = self._send_all()
                if not self._finish_rows(_SAVE_TIMEOUT_S if is_sent else _UNSENT_TIMEOUT_S):
                    self._notices("some steps could not be worked out in time and are not saved yet")
                self._output.flush(_SAVE_TIMEOUT_S)
            except Exception as error:
                self._notices(f"the rows so far could not be saved: {one_line(error)}")
            deliver(self._counts.signals)

    @property
    def last(self) -> dict[str, Any]:
        """The newest row that is worked out, all metrics in it; empty before the first."""
        return dict(self._output.last_row)

    def summary(self) -> dict[str, Any]:
        """The run so far in plain data; None for what is not known."""
        totals = self._resolver.totals if self._is_set_up else Totals()
        counting_s = self._counts.spent_s if self._is_set_up else 0.0
        profiling_s = self._resolver.profile_cost_s if self._is_set_up else 0.0
        lost_steps = self._resolver.lost_steps if self._is_set_up else 0
        failed_steps = self._resolver.failed_steps if self._is_set_up else 0
        stranded = self._resolver.stranded_steps if self._is_set_up else 0
        unlogged = self._unlogged + (self._usual.waiting if self._is_closed else 0)
        run = totals.as_dict()
        logged = self._logged + self._usual.waiting
        own_s = (self._own_time_s + self._usual.own_s) / logged if logged else None
        step_s = run["median_step_time_s"]
        return {
            **run,
            **self._run_info(),
            "monitor_cost": {
                "training_thread_us_per_step": None if own_s is None else own_s * 1e6,
                "share_of_step": None if own_s is None or not step_s else own_s / step_s,
                "checks_s": self._own_check_s,
                "background_s": self._resolver.own_time_s if self._is_set_up else 0.0,
                "counting_s": counting_s,
                "counts": self._counts.number_done if self._is_set_up else 0,
                "counted_after_steps": [done.step for done in self._counts.done] if self._is_set_up else [],
                "profiling_s": profiling_s,
            },
            "hardware": self._resolver.hardware.as_dict()
            if self._is_set_up and self._resolver.hardware is not None
            else None,
            "notes": [
                *between_steps_notes(run["between_steps_share"], run["forwards_between_steps"]),
                *([*self._resolver.notes, *self._ranks.notes] if self._is_set_up else []),
            ],
            "lost": [
                *([f"{lost_steps:,} steps: the monitor was held up"] if lost_steps else []),
                *([f"{failed_steps:,} steps: they could not be worked out"] if failed_steps else []),
                *([f"{stranded:,} steps: the run ended before they were worked out"] if stranded else []),
                *([f"{unlogged:,} steps: the monitor failed and was switched off"] if unlogged else []),
                *self._output.lost(),
            ],
            "warnings": list(dict.fromkeys((*self._notices.texts, *missed.values()))),
        }

    def close(self) -> None:
        """Write what is left, close the trackers and print the summary; called at exit by itself."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._in_closing(atexit.unregister, self.close)
        self._in_closing(self._close)

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _close(self) -> None:
        self._usual.is_busy = False  # a handler of a signal may close in the middle of a step
        if self._leave_loaders is not None:
            self._in_closing(self._leave_loaders)
        self._in_closing(self.detach)
        self._in_closing(self._measuring.end_step)
        if not self._is_set_up:
            return
        try:
            self._in_closing(self._finish_last_rows)
            self._in_closing(self._counts.end)
        finally:  # also where the user does not want to wait
            self._in_closing(self._resolver.stop, _ROWS_TIMEOUT_S)
            self._in_closing(self._ranks.stop)
            if self._audit is not None:
                self._in_closing(self._audit.close, self._logged)
            self._in_closing(self._close_watch)
        try:
            if self._ranks.is_first:
                self._in_closing(self._output.close, self.summary, _CLOSE_TIMEOUT_S)
                with contextlib.suppress(Exception):  # stderr is closed or fails; the files have it
                    show(self.summary())
        finally:
            if self._leave_signals is not None:
                self._in_closing(self._leave_signals)
        deliver(self._counts.signals)

    def _in_closing(self, work: Callable[..., object], *args: Any) -> None:
        """One part of closing: what it raises keeps no other part from being done."""
        try:
            work(*args)
        except Exception as error:
            self._notices(f"the monitor could not be closed properly: {one_line(error)}")

    def _finish_last_rows(self) -> None:
        is_sent = self._send_all()
        patience_s = 0.0 if self._audit is None else self._audit.patience_s
        timeout_s = max(_ROWS_TIMEOUT_S, patience_s) if is_sent else _UNSENT_TIMEOUT_S
        if not self._finish_rows(timeout_s) and not self._resolver.finish_pending(timeout_s):
            self._notices("the last steps were not worked out in time and are lost")

    def _finish_rows(self, timeout_s: float) -> bool:
        """Wait for the rows of all steps so far; on the training thread with the counts they wait for."""
        is_here = threading.get_ident() == self._thread and self._can_count()
        return self._resolver.finish_pending(timeout_s, self._run_counts if is_here else None)

    def _can_count(self) -> bool:
        """Whether this is a moment between two steps: no backward pass, no capture of a CUDA graph."""
        if backward_number() != -1 or functorch_level() is not None or self._pauses:
            return False
        if self._counts.is_at_work:  # a signal's handler in the middle of a count
            return False
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _send_all(self) -> bool:
        """Have all that is needed for the rows of the steps so far under way; whether that went well."""
        try:
            with self._turn:
                if self._is_closed or threading.get_ident() == self._thread:  # else the training goes on
                    self._take_in_usual()
                self._clock.moment()
                self._values.flush()
        except Exception as error:
            self._notices(f"what is still on the device cannot be fetched: {one_line(error)}")
            return False
        return True

    def _send_held(self) -> bool:
        """On the resolver's thread: send what is held for too long; whether there was anything."""
        since_s = [
            since_s
            for since_s in (self._usual.oldest_s, self._values.oldest_s, self._clock.unmarked_s)
            if since_s is not None
        ]
        return (
            bool(since_s)
            and time.perf_counter() - min(since_s) > _HELD_S
            and self._send_from_elsewhere(_TURN_TIMEOUT_S)
        )

    def _send_from_elsewhere(self, timeout_s: float) -> bool:
        """On a thread of ours: send what the training thread holds; False where it is at work on that."""
        if not self._turn.acquire(timeout=timeout_s):
            return False
        try:
            with self._clock.clock.from_elsewhere() as is_possible:
                if is_possible:
                    self._take_in_usual()
                    self._clock.moment()
                    self._values.flush()
                return is_possible
        finally:
            self._turn.release()

    def _write_out(self, timeout_s: float) -> None:
        """On a thread of ours: have all steps so far on disk, if that can be done in this time."""
        ends_s = time.perf_counter() + timeout_s
        if os.getpid() != self._pid or not self._ranks.is_first:
            return
        with contextlib.suppress(Exception):  # the device may have failed: rows before that are known
            self._send_from_elsewhere(_TURN_TIMEOUT_S)
        self._resolver.finish_pending(0.75 * (ends_s - time.perf_counter()))
        self._output.write_local(max(ends_s - time.perf_counter(), 0.0))

    def _close_watch(self) -> None:
        if self._watch is None:
            return
        hardware = self._resolver.hardware
        if hardware is not None and (why := hardware.why_nothing()) is not None:
            self._notices(why)
        try:
            self._watch.close()
        except Exception as error:
            self._notices(f"the hardware counters did not close: {one_line(error)}")

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a part of the monitor; what it raises is said once and goes no further."""
        if self._is_broken:
            return None
        try:
            with self._turn:
                return work(*args)
        except Exception as error:
            self._switch_off(error)
            return None

    def _switch_off(self, error: Exception) -> None:
        self._is_broken = True
        try:
            self._take_in_usual()  # the steps before were good
        except Exception as second:
            self._notices(f"the steps noted before that are lost too: {one_line(second)}")
        self._look_at_next()
        self._usual.forget()
        self._notices(
            f"the monitor failed and is switched off, the training goes on: {type(error).__name__}: {error}"
        )

    def _ensure_set_up(self, tensors: Batch) -> None:
        """Set up once, also where two threads come first at the same time."""
        if not self._is_set_up:
            with self._turn:
                if not self._is_set_up:
                    self._set_up(self._model_device(tensors))

    def _set_up(self, device: torch.device) -> None:
        """Make what depends on the device and the job, at the first batch or step."""
        self._device, self._pid = device, os.getpid()
        self._model_facts = facts_of([] if self._models is None else self._models.roots)
        self._ranks = RankLink.current(notice=self._notices)
        self._values = HostValues(self._notices)
        self._intake = Intake(self._values, self._notices)
        self._batches = BatchNotes(self._values)
        self._clock = StepClock(clock_for(device, thins_out=True))
        kept = KeptInBackground(self.output_dir.absolute(), self._notices) if self._ranks.is_first else None
        if kept is not None:
            self._output.other_files.append(kept.lane)
            kept.start()
        about_flops = self._notices if self._ranks.is_first else self._ranks.note
        self._counts = Counts(
            self.config,
            ranks=self._ranks,
            notice=about_flops,
            kept=kept,
        )
        self._counting = Counting(
            self.config, self._counts, ranks=self._ranks, notice=about_flops, device=device
        )
        self._watch = self._opened_watch(device)
        self._audit = AuditStep.from_environment(self._ranks, device, self._notices)
        self._output.finish_rows = self.save_logs
        self._output.batch_shapes = self._batches.shapes
        self._output.close_at_exit = self.close
        self._resolver = Resolver(
            clock=self._clock.clock,
            device=device,
            counting=self._counting,
            counts=self._counts,
            ranks=self._ranks,
            output=self._output,
            notices=self._notices,
            details=StepsOrSeconds(self.config.detailed_log_freq, DETAILS_S, began_s=time.perf_counter()),
            audit=self._audit,
            send_held=self._send_held,
            measured_peak_flops_per_s=_times(self.config.measured_peak_tflops, 1e12),
            audited_tiles={} if self._audited is None else self._audited.tile_factors(),
            hardware=None
            if self._watch is None
            else HardwareWindows(
                self._watch,
                spec=spec_of(device),
                audited=self._audited,
                world_size=self._ranks.world_size,
                notice=self._notices,
            ),
        )
        self._leave_loaders = listen(self._between)
        self._is_set_up = True
        if self._ranks.is_first:
            self._output.start(self._run_info())
            is_held = self._turn._is_owned  # type: ignore[attr-defined]  # as threading.Condition asks
            self._leave_signals = write_at_signals(self._write_out, is_held)

    def _opened_watch(self, device: torch.device) -> HardwareWatch | None:
        """The counters of `hybrid`; where there are none, what comes instead."""
        if self.config.mode != "hybrid" or not self._ranks.is_first:
            return None
        if not self.config.hardware_counters_enabled:
            self._measuring.go_without_counters(None)
            return None
        try:
            watch = open_watch(device, self._notices)
        except Exception as error:
            watch = one_line(error)
        if not isinstance(watch, HardwareWatch):
            self._measuring.go_without_counters(watch)
            return None
        if has_rate(spec_of(device)):
            is_corrected = self._audited is not None and self._audited.executed_over_activity is not None
            self._counting.executed_method = executed_method(is_corrected=is_corrected)
        else:
            self._measuring.go_without_counters(f"no FLOP per cycle is known for {_device_name(device)}")
        return watch

    def _on_forward(self, watched: Watched, batch: Batch | None) -> None:
        if not (self._is_manual or self._pauses or self._is_closed):
            self._guarded(self._note_forward, watched, batch)

    def _note_forward(self, watched: Watched, batch: Batch | None) -> None:
        assert self._models is not None
        self._note(batch, time.perf_counter(), self._models.slot(watched), watched)

    def _on_evaluation(self) -> None:
        if not self._is_closed:
            self._guarded(self._between.evaluated, self._usual.last_forward_s)

    def _note(
        self, batch: Batch | None, began_s: float, slot: int | None = 0, watched: Watched | None = None
    ) -> None:
        """Note a micro-batch; with the first of a step also that the step has begun.

        `slot` is None for one that tells the step's samples and tokens alone.
        """
        is_check = slot is not None and self._measuring.check_is_due(slot)
        self._ensure_set_up(batch or {})
        self._stop_usual()  # sending anything is left to `log_step`: this may be inside a capture
        self._is_looked_at = True
        batches = self._batches
        batches.keeps_integers = self._counts.values_matter
        name = None if watched is None else watched.name
        try:
            template = batches.template_of(batch, slot=slot, model=name)
        except Exception:  # an argument may do anything when it is looked at, or contain itself
            template = None
        if template is None:
            batches.is_incomplete = True
            self._notices(_UNTOLD)
            return
        assert batch is not None
        if not batches.has_notes:
            self._begin_step(began_s)
        elif self._between.last_s is not None:
            self._between.last_s = began_s
        note = batches.note(batch, template)
        if note is None:
            self._notices(
                "a step has too many micro-batches to note, and no MFU: is log_step called for each?"
            )
        if is_check and note is not None:
            assert slot is not None
            self._measuring.check(self._model() if watched is None else watched.module, slot)
        took_s = time.perf_counter() - began_s
        if is_check:
            self._own_check_s += took_s
        else:
            self._own_time_s += took_s

    def _begin_step(self, now_s: float) -> None:
        is_in_backward = backward_number() != -1  # a checkpoint around the model: its first run was not seen
        if not is_in_backward:
            self._between.begun(now_s)
        if not self._logged:  # later steps begin where the last one ended
            self._clock.begin()
        if self._measuring.profiles and not is_in_backward:
            self._measuring.begin_step(self._counting.convention)
        if self._audit is not None:
            self._audit.begin_step(self._logged, compilations())

    def _log_step(
        self,
        step: Any,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        attention_mask: Any,
        skip_wandb: bool,
        flops: Any,
        now_s: float,
    ) -> None:
        if self._is_closed:
            self._notices("log_step was called after close(): the step is not logged")
            return
        self._ensure_set_up({"loss": loss})
        if os.getpid() != self._pid:
            self._is_broken = True
            self._notices("this process was forked from the one that is monitored: its steps are not logged")
            return
        self._watch_again()
        if self._audit is not None:
            self._audit.end_step()
        batches = self._batches.take()
        intake = self._intake
        given_flops = None if flops is None else intake.flops(flops)
        has_batches = batches.notes or batches.is_missing or self._is_manual or given_flops is not None
        is_one = self._models is None or self._models.is_one
        if (not is_one or not has_batches) and self._were_compiled():
            batches = batches._replace(is_missing=True)
        elif not has_batches and self._attachments:
            self._notices(
                "a step without a training forward pass of the attached model has no MFU: "
                "attach what you call (a model compiled later, its wrapper), or call monitor.observe(batch)"
            )
        measuring = self._measuring
        profile = None if measuring.profiler is None else measuring.end_step()
        if type(step) is not int or not -LARGEST_STEP <= step <= LARGEST_STEP:
            step = intake.step_number(step)
        place = StepPlace(step, intake.steps_since_last(step))
        take = intake.number  # floats, the usual case, need no look
        mask_tokens, mask_useful_tokens = (
            (None, None) if attention_mask is None else intake.mask(attention_mask)
        )
        datasets = self._pending_datasets or _NO_DATASETS
        compilations_now = compilations()
        has_compiled = compilations_now != self._compilations
        if has_compiled:
            self._values.look_again()
        last_end_s = self._between.end_s
        is_slow = last_end_s is not None and now_s - last_end_s > SLOW_STEP_S
        is_warmup = self._logged < WARMUP_STEPS or has_compiled or profile is not None
        cut = None
        if self._watch is not None:
            # Before the mark that ends the step: once that has passed, so has the cut. What compiles or is
            # profiled is no window's business.
            if is_warmup:
                self._watch.restart()
            else:
                cut = self._watch.cut(now_s)
        note = StepNote(
            place,
            epoch if type(epoch) is float else take("epoch", epoch),
            loss if type(loss) is float else take("loss", loss),
            grad_norm if type(grad_norm) is float else take("grad_norm", grad_norm),
            learning_rate if type(learning_rate) is float else take("learning_rate", learning_rate),
            mask_tokens,
            mask_useful_tokens,
            batches,
            given_flops,
            measuring.states,
            measuring.is_counted,
            self._between.take(),
            is_warmup,
            profile,
            datasets,
            skip_wandb if type(skip_wandb) is bool else intake.flag("skip_wandb", skip_wandb),
            self._clock.end(now_s, exact=cut is not None or profile is not None or is_slow),
            cut,
        )
        if is_slow:
            self._values.flush()
        else:
            self._values.flush_if_due(now_s)
        if self._audit is not None:
            self._audit.hand_over(note)
        if measuring.is_counted and given_flops is None and not self.config.estimates_only:
            self._ask_for_counts(measuring.states, batches.notes)  # before the row side looks for them
        self._resolver.put(note)
        self._is_handed_over = True
        self._compilations = compilations_now
        if datasets is not _NO_DATASETS:
            self._pending_datasets = []
        self._logged += 1
        self._steps_done += place.steps
        self._last_step = step
        self._thread = threading.get_ident()
        counted_s = self._run_counts() if self._counts.has_waiting else 0.0
        self._own_time_s -= counted_s
        if self._steps_done >= measuring.plan_at:
            measuring.plan_next(self._steps_done)
        types = type(step), type(epoch), type(loss), type(grad_norm), type(learning_rate)
        if not (counted_s or is_slow):  # after a count, the next step has a pause in it
            self._open_usual(now_s, step, batches, types)

    def _open_usual(
        self, now_s: float, last_step: int, batches: StepBatches, types: tuple[type, ...]
    ) -> None:
        """Note the coming steps at the least cost, where they are like this one and nothing is due.

        Only after a step with a micro-batch that was looked at when it came, with what was around it.
        """
        is_looked_at, self._is_looked_at = self._is_looked_at, False
        clock = self._clock.clock
        if not (is_looked_at and clock.runs_behind) or self._logged < WARMUP_STEPS:
            return
        is_marked = clock.due_s <= now_s
        until_s = now_s + PIECE_S if is_marked else clock.due_s
        batch, measuring = self._batches.usual, self._measuring
        if (
            batch is None
            or not self._attachments
            or self._models is None
            or not self._models.is_one
            or self._audit is not None
            or self._is_manual
            or self._pauses
            or self._counts.has_waiting
            or measuring.profiles
            or measuring.check_is_due(0)
            or batches.run_again
            or len(batches.notes) > MOST_MICRO_BATCHES
            or not can_be_taken(types, self._values.may_be_unseen)
        ):
            return
        if self._watch is not None:
            until_s = min(until_s, self._watch.due_s)
        self._around, attachment = batch, self._attachments[0]
        self._usual.open(
            until_s,
            batch=batch,
            places=attachment.batch_hook.places,
            common=Common(self._batches.usual_note, measuring.states, measuring.is_counted, warmup=False),
            last_step=last_step,
            until_step=last_step + measuring.plan_at - self._steps_done,
            types=types,
            compilations=self._compilations,
            is_compiled=attachment.is_compiled,
            mark=clock.mark if is_marked else None,
        )
        attachment.keep_only(self._usual.keeps_batches)

    def _note_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchNote | None:
        """A micro-batch among usual ones that is none; None where it cannot be told."""
        note, attachment, around = None, self._attachments[0], self._around
        assert around is not None
        with contextlib.suppress(Exception):  # there are many kinds of tensors, some of which are gone by now
            note = self._batches.note_later(attachment.batch_hook.batch_of(args, kwargs), around)
        if note is None:
            self._notices(_UNTOLD)
        return note

    def _stop_usual(self) -> None:
        """Look at each micro-batch again; those of the step under way are noted like any other."""
        under_way, began_s = self._usual.stop()
        self._batches.add(under_way)
        if began_s is not None:
            self._between.begun(began_s)

    def _take_in_usual(self) -> None:
        """Go on as ever: the steps that were noted at the least cost go to the resolver."""
        usual = self._usual
        if usual.is_busy or usual.is_empty:
            return
        self._stop_usual()
        waiting = usual.waiting
        try:
            self._hand_over_usual(usual.take())
        except BaseException:
            self._unlogged += waiting - usual.waiting
            raise

    def _hand_over_usual(self, taken: Taken | None) -> None:
        if taken is None:
            return
        if taken.common.warmup:
            self._compilations = taken.compilations
            self._values.look_again()
        columns, last_step = taken.columns, self._intake.last_step
        assert last_step is not None
        self._intake.last_step = columns.step[-1]
        self._steps_done += columns.step[-1] - last_step
        begin, end = self._clock.skip(columns.end)
        self._logged += len(columns.step)
        unseen = columns.unseen()
        sent: dict[str, SentNumbers | None] = dict.fromkeys(unseen)
        try:
            sent = {name: self._values.send_unseen(name, kept) for name, kept in unseen.items()}
        except Exception as error:  # the device fails: the rest of the row is known
            self._notices(f"{' and '.join(unseen)} of some steps is not logged: {one_line(error)}")
        self._resolver.put(UsualPiece(taken, last_step, begin, end, sent))

    def _watch_again(self) -> None:
        """Take in what was noted, and look at each batch when it comes; not for inside a forward pass."""
        self._take_in_usual()
        self._look_at_next()

    def _look_at_next(self) -> None:
        """Have the next micro-batches looked at when they come."""
        for attachment in self._attachments:
            attachment.keep_only(False)

    def _were_compiled(self) -> bool:
        """Whether a watched model was compiled after it was attached; it is then watched where it is called.

        The step that found it so has no MFU; it has a compilation in it.
        """
        followed = [attachment.follow() for attachment in self._attachments]
        return any(followed)

    def _ask_for_counts(self, states: States, notes: Sequence[BatchNote]) -> None:
        """Have batches of new shapes counted; by shape too where the cross-check or an audit wants that."""
        is_audited = self._audit is not None and self._audit.awaits_count
        for note in notes:
            template, state = note.template, state_of(states, note)
            if state is None:
                continue
            is_new = template.asked_for != state.number
            if is_new or (is_audited and template not in state.works):
                wants_work = is_audited or (self._watch is not None and is_new and not state.works)
                template.asked_for = state.number
                self._counts.ask(state, note, wants_work=wants_work)
                self._resolver.wake()

    def _run_counts(self) -> float:
        """Make the counts that are due, outside of every step time; how long that took, 0 where none was."""
        before_s = self._counts.spent_s
        while (
            self._can_count()
            and not self._counts.signals
            and (request := self._counts.next_due()) is not None
        ):
            mark = self._clock.moment()
            self._notices.among(functools.partial(self._counts.run, request, self._last_step))
            self._clock.pause(mark)
            if self._watch is not None:
                self._watch.restart()
            self._resolver.wake()
        took_s = self._counts.spent_s - before_s
        if self._between.end_s is not None:
            self._between.end_s += took_s  # which is stated for itself
        return took_s

    def _measure_datasets(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        pending = self._datasets.measure(batch, outputs, aggregated_loss)
        if pending is not None:
            self._pending_datasets.append((pending, start_host_copy(pending.sums)))

    def _model_device(self, tensors: Batch) -> torch.device:
        """Where the training runs: on CUDA if anything of the model or the batch is there."""
        models = [] if self._models is None else self._models.modules
        of_models = [p for watched in models if (m := watched.module) is not None for p in m.parameters()]
        found = [*of_models, *tensors.values()]
        devices = [t.device for t in found if is_tensor(t)]
        on_cuda = [device for device in devices if device.type == "cuda"]
        return next(iter((*on_cuda, *devices)), torch.device("cpu"))

    def _model(self) -> nn.Module | None:
        return None if self._models is None else self._models.first

    def _run_info(self) -> dict[str, Any]:
        """What is true of the whole run."""
        world_size = self._ranks.world_size if self._is_set_up else 1
        return {
            "mode": self.config.mode,
            "convention": {"attention": self.config.attention},
            "device": _device_name(self._device) if self._is_set_up else None,
            "time_source": self._clock.clock.source if self._is_set_up else None,
            "world_size": world_size,
            "rank": self._ranks.rank if self._is_set_up else 0,
            "scope": "one device" if world_size == 1 else f"this rank × {world_size}",
            "model": self._model_facts,
            "batch_shapes": self._batches.shapes() if self._is_set_up else [],
        }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
