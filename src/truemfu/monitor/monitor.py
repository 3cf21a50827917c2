"""TrainingMonitor: MFU and HFU on every step, off the step's path.

    forward pass ──► hook: a note of the batch ┐
    log_step ──► a mark on the device's clock  ┴─► StepNote ──► row thread ──► row ──► trackers

The training thread notes and queues: it reads no device value, waits for nothing and writes no file. A few
steps are observed operator by operator while they run (`step_flops/`). No exception of the
monitor leaves these methods: it becomes one warning, which the summary repeats. Only an invalid configuration
raises, at construction. The work behind these methods is in `live_run.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import brief, one_line
from ..hardware.detect import override_flops_per_s
from ..hardware.nsight.audited import read_audit
from ..run_summary.sums import PAUSES
from ..torch_private.dispatch import hidden_from_modes
from ..torch_private.table import missing
from ..trackers.base import Tracker
from . import created, forks
from .config import MonitorConfig, load_config
from .guard import Guard
from .live_run import LiveRun
from .notices import Notices
from .rows.output import Output
from .summary import ended_by, info_of, show, summary_of, uncaught
from .timing.between_steps import BetweenSteps
from .timing.watched_data import WatchedData
from .totals import StepTotals
from .values.datasets import DatasetMetrics
from .watching.batch_notes import Batch, by_name_or_position
from .watching.measuring import Measuring
from .watching.model_hooks import ModelHooks
from .watching.watched import CalledModels, Models, Watched, WatchedModels

_CLOSE_TIMEOUT_S = 20.0
_SAVE_TIMEOUT_S = 60.0
_now_s = time.perf_counter


class _Default(int):
    """The default of an argument that was not passed: a configuration file overrides it."""


class TrainingMonitor:
    """Measures a training run and logs it, off the step's path.

        monitor = TrainingMonitor("out", model=model)
        for step, batch in enumerate(monitor.data(loader)):
            ...  # forward, backward, optimizer
            monitor.log_step(step, epoch, loss, grad_norm, learning_rate)

    `config` is a mapping or a YAML file with the sections `monitoring`, `wandb`, `training`; `trackers` are
    names ("wandb", "tensorboard", "mlflow", "trackio", "prometheus") or objects with the four methods of
    `truemfu.trackers.base.Tracker`. A W&B run that is already active is used without being named. With
    TRUEMFU_DISABLED=1 in the environment every method does nothing.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        log_file: str = "training_log.json",
        flops_profile_freq: int = _Default(500),
        *,
        model: Models | None = None,
        trackers: Sequence[str | Tracker] | None = None,
    ) -> None:
        explicit = None if isinstance(flops_profile_freq, _Default) else flops_profile_freq
        self.config: MonitorConfig = load_config(config, flops_profile_freq=explicit)
        override_flops_per_s()  # raises if the environment's peak is not a number
        self._audited = None if self.config.audit is None else read_audit(Path(self.config.audit))
        self.output_dir = Path(output_dir)
        self._folder = self.output_dir.absolute()
        self._notices = Notices()
        self._guard = Guard(self._notices, when_broken=self._stop_observing)
        self._output = Output(
            self._folder,
            log_file,
            self.config,
            trackers,
            finish_rows=self.save_logs,
            close_monitor=self.close,
            notice=self._notices,
        )
        self._hooks = ModelHooks(
            self._on_forward,
            self._on_evaluation,
            self._on_forward_end,
            self._on_forward_return,
            self._notices,
        )
        self._measuring = Measuring(self.config, self._notices)
        self._between = BetweenSteps(now_s=_now_s)
        self._datasets = DatasetMetrics(notice=self._notices)
        self._added: dict[str, float] = {}
        """Metrics of the caller's for the next row."""
        self._wants_census = False
        self._live: LiveRun | None = None
        """The run, from its first batch or step on."""
        self._earlier_error = uncaught()
        self._ended_by: str | None = None
        self._guard.close_at_exit(self.close)
        for listener in created.listeners:
            listener(self)
        if model is not None:
            self.attach(model)

    def attach(self, model: Models | CalledModels) -> TrainingMonitor:
        """Watch this model, or several: each training forward pass notes its batch. Attach what you call.

        Several models (a list, or a mapping of names to models) get one MFU for the step and one each. Of a
        model without its own forward, the submodules are watched.
        """
        models = model if isinstance(model, CalledModels) else WatchedModels(model)
        before = self._hooks.models
        if self._guard.is_disabled:
            return self
        if not isinstance(model, CalledModels) and before.are(model):
            models = before
        else:
            if self._live is not None:
                self._live.steps.forget_models()
            self._datasets.set_model(models.first)
        self._hooks.attach(models)
        return self

    def detach(self) -> None:
        """Leave the model as it was before `attach`."""
        self._hooks.detach()

    def without_hooks(self) -> AbstractContextManager[None]:
        """The model as it was before `attach`, for what runs inside: to save or to script it."""
        return self._hooks.removed()

    def observe(self, batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> None:
        """Note a micro-batch explicitly, where the model's forward does not receive all of it.

        The model's hooks are then disabled. Where several modules are watched, the batch gives the step's
        samples and tokens, and the FLOPs still come from the forward pass of each module.
        """
        began_s = _now_s()
        if self._hooks.models.is_one and not self._hooks.are_disabled:
            self._hooks.are_disabled = True
            if self._live is not None:
                self._guard.run(self._live.steps.batches.take)  # the hook noted this very batch
        if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
            self._notices(
                f"observe expects the batch that the model takes, got {type(batch).__name__}: it is ignored"
            )
        elif not self._between.is_paused:
            self._guard.run(self._note_observed, by_name_or_position(batch), began_s)

    def data(self, loader: Iterable[Any]) -> WatchedData:
        """The same batches, with the wait for each of them measured.

        Not needed for torch's DataLoaders, whose waits are always measured.
        """
        return WatchedData(loader, self._between)

    @contextlib.contextmanager
    def pause(self, kind: str = "other") -> Iterator[None]:
        """Exclude what runs inside from the step: "evaluation", "checkpoint", "generation" or "other".

        Rows and summary have the time of each kind.
        """
        if kind not in PAUSES:
            self._notices(
                f"pause expects {', '.join(PAUSES[:-1])} or {PAUSES[-1]}; got {brief(kind)}, logged as other"
            )
            kind = "other"
        live, mark, between, began_s = self._live, None, self._between, _now_s()
        if live is not None and not between.pauses:
            mark = self._guard.run(live.steps.pause)
        between.pauses += 1  # directly before `try`: an interrupt would come in a call between them
        try:
            yield
        finally:
            between.pauses -= 1
            if live is not None and mark is not None and not between.pauses:
                self._guard.run(live.steps.resume, mark, kind, began_s)

    def set_phase(self, name: str | None) -> None:
        """Measure at the frequency of this training phase; None: at the configured frequency."""
        self._measuring.set_phase(name)

    def log_step(
        self,
        step: int,
        epoch: float | None,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        attention_mask: torch.Tensor | None = None,
        skip_wandb: bool = False,
        *,
        flops: float | None = None,
    ) -> None:
        """End an optimizer step: call it once per step, after the optimizer, with any gradient accumulation.

        Loss, gradient norm and mask may be device tensors: they are read later, when they are ready. `flops`,
        if given, are the model FLOPs of this rank's whole step: they are used unchanged, and nothing is
        counted.
        """
        began_s, live, guard = _now_s(), self._live, self._guard
        before = 0 if live is None else live.steps.logged
        with guard.lock:
            try:
                if live is None or guard.is_broken or guard.is_closed or forks.number != guard.forks:
                    live = self._run_to_log({"loss": loss})
                if live is not None:
                    given = step, epoch, loss, grad_norm, learning_rate, attention_mask, skip_wandb, flops
                    datasets = self._datasets.pending
                    ended = live.steps.end_step()
                    with hidden_from_modes():
                        live.steps.log_step(*given, ended, datasets, began_s, self._added)
                    self._added = {}
                    if datasets:
                        self._datasets.begin_step()
            except Exception as error:
                guard.steps_lost += live is None or live.steps.logged == before
                guard.switch_off(error)
        self._between.end_s = end_s = _now_s()
        if live is not None:
            live.steps.own_time.add(end_s - began_s)
            live.steps.own_time.end_step()
            guard.run(live.steps.begin_next_step)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log these with the next step; trackers get those whose names begin with `privacy/` at once."""
        self._added |= {str(name): float(value) for name, value in metrics.items()}

    def update_dataset_metrics(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        """Loss and accuracy of each dataset of a mixed batch, with the next `log_step`."""
        config = self.config
        if not config.log_dataset_metrics or not config.dataset_metrics_freq or self._between.is_paused:
            return
        position = None if self._live is None else self._live.steps.intake.next_position()
        if position is None or position.reaches(config.dataset_metrics_freq):
            with hidden_from_modes():
                self._guard.run(self._datasets.add, batch, outputs, aggregated_loss)

    def record_census(self) -> None:
        """Record one of the next steps kernel by kernel, for `truemfu explain`; before the first step too."""
        self._wants_census = True
        if self._live is not None:
            self._live.record_census()

    def save_logs(self) -> None:
        """Write everything logged so far to the local log. This waits, so do not call it inside a step."""
        live = self._live
        if live is not None and not self._guard.is_forked:
            try:
                live.save(_SAVE_TIMEOUT_S)
            except Exception as error:
                self._notices(f"the rows so far could not be saved: {one_line(error)}")

    @property
    def has_batches(self) -> bool:
        """Whether a batch of the current step was noted."""
        return self._live is not None and self._live.steps.batches.has_notes

    @property
    def called_modules(self) -> list[nn.Module]:
        """The modules whose forward passes are noted; of `CalledModels` those that were called so far."""
        found = [watched.module for watched in self._hooks.models.modules]
        return [module for module in found if module is not None]

    def notice(self, text: str) -> None:
        """Warn once, and repeat it in the summary: what an integration has to report."""
        self._notices(text)

    @property
    def last(self) -> dict[str, Any]:
        """The newest finished row with all its metrics; empty before the first."""
        return dict(self._output.last_row)

    def summary(self) -> dict[str, Any]:
        """The run so far as plain data; None where a value is unknown."""
        live, steps_lost = self._live, self._guard.steps_lost
        found = summary_of(info_of(self.config), StepTotals().as_dict()) if live is None else live.summary()
        if steps_lost:
            found["lost"].append(f"{steps_lost:,} steps: the monitor failed and was switched off")
        found["lost"] += self._output.lost()
        found["warnings"] = list(dict.fromkeys((*self._notices.texts, *missing.values())))
        found["ended_by"] = self._ended_by
        return found

    def close(self) -> None:
        """Write the remaining rows, close the trackers and print the summary; runs at exit automatically."""
        self._close_after(None)

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close_after(error)

    def _close_after(self, error: BaseException | None) -> None:
        if self._guard.begin_closing():
            self._ended_by = ended_by(error, self._earlier_error)
            self._notices.in_closing(self._close)

    def _close(self) -> None:
        live, in_closing = self._live, self._notices.in_closing
        in_closing(self.detach)
        in_closing(self._measuring.end_step)
        if live is None:
            return
        live.finish()
        try:
            if live.is_first_rank:
                in_closing(self._output.close, self.summary, _CLOSE_TIMEOUT_S)
                with contextlib.suppress(Exception):  # stderr is closed or fails; the files have the summary
                    show(self.summary())
        finally:
            in_closing(live.leave_signals)

    def _stop_observing(self) -> None:
        if self._live is not None:
            self._live.stop_observing()

    def _run_to_log(self, tensors: Batch) -> LiveRun | None:
        """The run that a step belongs to; None if the step is not logged."""
        if self._guard.refuses_step(has_run=self._live is not None):
            return None
        return self._started(tensors)

    def _started(self, tensors: Batch) -> LiveRun:
        """The run, created with the first batch or step: device and job are known by then."""
        if self._live is None:
            self._guard.adopt_process()
            self._live = LiveRun(
                self.config,
                self._folder,
                device=self._hooks.device_with(tensors),
                hooks=self._hooks,
                measuring=self._measuring,
                between=self._between,
                audited=self._audited,
                output=self._output,
                notices=self._notices,
                training_lock=self._guard.lock,
            )
            if self._wants_census:
                self._live.record_census()
        return self._live

    def _on_forward(self, watched: Watched, batch: Batch | None) -> bool:
        """Note the batch; whether the end of the forward pass is to be told."""
        began_s, hooks, guard = _now_s(), self._hooks, self._guard
        if self._between.pauses or guard.is_closed or guard.is_broken:
            return False
        try:
            with guard.lock:
                if not hooks.are_disabled:
                    with hidden_from_modes():
                        live = self._live or self._started(batch or {})
                        slot = 0 if hooks.models.is_one else hooks.models.slot(watched)
                        begun = live.steps.note_batch(batch, began_s, slot, watched)
                    if begun is not None:
                        live.steps.batch_begins(begun)
                return self._live is not None and self._live.steps.pass_begins(watched.name, is_training=True)
        except Exception as error:
            guard.switch_off(error)
            return False

    def _on_forward_end(self) -> None:
        if self._live is not None:
            self._guard.run(self._live.steps.pass_ends)

    def _on_forward_return(self) -> None:
        if self._live is not None:
            self._live.steps.pass_returned()

    def _note_observed(self, batch: Batch | None, began_s: float) -> None:
        slot = 0 if self._hooks.models.is_one else None
        live = self._started(batch or {})
        with hidden_from_modes():
            begun = live.steps.note_batch(batch, began_s, slot, None)
        if begun is not None:
            live.steps.batch_begins(begun)

    def _on_evaluation(self, watched: Watched, batch: Batch | None) -> bool:
        """A forward pass without gradients begins; whether its end is to be told."""
        if self._guard.is_closed:
            return False
        return bool(self._guard.run(self._evaluation_begins, watched, batch))

    def _evaluation_begins(self, watched: Watched, batch: Batch | None) -> bool:
        self._between.evaluated()
        if self._live is None:
            return False
        self._live.steps.watch.signals.evaluation_begins(batch)
        return self._live.steps.pass_begins(watched.name, is_training=False)
