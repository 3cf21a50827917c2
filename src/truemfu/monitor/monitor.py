"""TrainingMonitor: MFU and HFU on every step, off the step's path.

    forward pass ──► hook: a note of the batch ┐
    log_step ──► a mark on the device's clock  ┴─► StepNote ──► resolver ──► row ──► trackers

The training thread notes and queues: it reads no device value, waits for nothing and writes no file. Once per
kind of batch it also counts, between two steps; step times exclude that (`counts.py`). No exception of the
monitor leaves these methods: it becomes one warning, which the summary repeats. Only an invalid configuration
raises, at construction. The work behind these methods is in `live_run.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from ..environment import is_disabled
from ..errors import UsageError, brief, one_line
from ..flops import HostCopy, deliver, start_host_copy
from ..hardware.detect import override_flops_per_s
from ..hardware.nsight.audited import read_audit
from ..records import RUN_FILE
from ..trackers.base import Tracker
from . import created
from .config import MonitorConfig, load_config
from .live_run import LiveRun
from .metrics import PAUSES
from .notices import Notices
from .row_side.output import Output
from .summary import RunFigures, info_of, show, summary_of
from .training_side import forks
from .training_side.batch_notes import Batch, by_name_or_position
from .training_side.between_steps import BetweenSteps
from .training_side.called_models import CalledModels
from .training_side.datasets import DatasetMetrics, PendingDatasetMetrics, shifts_labels
from .training_side.kept_forms import FORMS_FILE
from .training_side.measuring import Measuring
from .training_side.model_hooks import ModelHooks
from .training_side.watched import Models, Watched, WatchedModels
from .training_side.watched_data import WatchedData

_CLOSE_TIMEOUT_S = 20.0
_SAVE_TIMEOUT_S = 60.0


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
        if "\0" in str(self.output_dir) or "\0" in log_file:
            raise UsageError("output_dir and log_file must be valid file names: they contain a NUL character")
        others = {RUN_FILE: "the description of the run", FORMS_FILE: "the saved counts"}
        if (name := Path(log_file).name) in others:
            raise UsageError(f"log_file must not be {name}, which holds {others[name]}")
        self._folder = self.output_dir.absolute()
        self._notices = Notices()
        self._output = Output(self._folder, log_file, self.config, trackers, notice=self._notices)
        self._output.finish_rows = self.save_logs
        self._output.batch_shapes = self._batch_shapes
        self._output.close_at_exit = self.close
        self._hooks = ModelHooks(self._on_forward, self._on_evaluation, self._notices)
        self._measuring = Measuring(self.config, self._notices)
        self._between = BetweenSteps()
        self._datasets = DatasetMetrics(notice=self._notices)
        self._pending_datasets: list[tuple[PendingDatasetMetrics, HostCopy]] = []
        self._live: LiveRun | None = None
        """The run, from its first batch or step on."""
        self._is_closed = self._is_disabled = is_disabled()
        self._is_broken = False
        self._unlogged = 0
        """Steps that never reached the run: the monitor failed, or was already switched off."""
        self._forks = forks.number
        self._pauses = 0
        self._training_lock = threading.RLock()
        """Guards the training thread's state, which threads of the monitor read at times."""
        self._end_of_child: Finalize | None = None
        if not self._is_disabled:
            atexit.register(self.close)
            if parent_process() is not None:  # a child of multiprocessing may end without `atexit`
                self._end_of_child = Finalize(None, self.close, exitpriority=0)
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
        if self._is_disabled:
            return self
        if before is not None and not isinstance(model, CalledModels) and before.are(model):
            models = before
        else:
            self._measuring.forget()
            if self._live is not None:
                self._live.forget_role()
            shift = models.first is None or shifts_labels(models.first)
            self._datasets = DatasetMetrics(shift=shift, notice=self._notices)
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
        began_s = time.perf_counter()
        if self._hooks.see_whole_batches and not self._hooks.are_disabled:
            self._hooks.disable()
            if self._live is not None:
                self._guarded(self._live.forget_batches)  # the hook noted this very batch
        if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
            self._notices(
                f"observe expects the batch that the model takes, got {type(batch).__name__}: it is ignored"
            )
        elif not self._pauses:
            self._guarded(self._note_observed, by_name_or_position(batch), began_s)

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
            self._notices(f"pause expects {', '.join(PAUSES[:-1])} or {PAUSES[-1]}; got {brief(kind)}: other")
            kind = "other"
        live, mark, began_s = self._live, None, time.perf_counter()
        if live is not None and not self._pauses:
            mark = self._guarded(live.pause)
        self._pauses += 1
        self._between.is_paused = True
        try:
            yield
        finally:
            self._pauses -= 1
            self._between.is_paused = self._pauses > 0
            if live is not None and mark is not None and not self._pauses:
                self._guarded(live.resume, mark, kind)
                if self._between.end_s is not None:
                    self._between.end_s += time.perf_counter() - began_s

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
        began_s, live = time.perf_counter(), self._live
        before = 0 if live is None else live.logged
        with self._training_lock:
            try:
                if live is None or self._is_broken or self._is_closed or forks.number != self._forks:
                    live = self._run_to_log({"loss": loss})
                if live is not None:
                    datasets = self._pending_datasets
                    live.log_step(
                        step,
                        epoch,
                        loss,
                        grad_norm,
                        learning_rate,
                        attention_mask,
                        skip_wandb,
                        flops,
                        datasets,
                        began_s,
                    )
                    if datasets:
                        self._pending_datasets = []
            except Exception as error:
                self._unlogged += live is None or live.logged == before
                self._switch_off(error)
        self._between.end_s = end_s = time.perf_counter()
        if live is not None:
            live.own_time_s += end_s - began_s
            if live.signals:
                deliver(live.signals)

    def update_dataset_metrics(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        """Loss and accuracy of each dataset of a mixed batch, with the next `log_step`."""
        config = self.config
        if not config.log_dataset_metrics or not config.dataset_metrics_freq or self._pauses:
            return
        position = None if self._live is None else self._live.next_position()
        if position is None or position.reaches(config.dataset_metrics_freq):
            self._guarded(self._measure_datasets, batch, outputs, aggregated_loss)

    def save_logs(self) -> None:
        """Write everything logged so far to the local log. This waits, so do not call it inside a step."""
        live = self._live
        if live is not None and forks.number == self._forks:
            try:
                live.save(_SAVE_TIMEOUT_S)
            except Exception as error:
                self._notices(f"the rows so far could not be saved: {one_line(error)}")
            deliver(live.signals)

    @property
    def has_batches(self) -> bool:
        """Whether a batch of the current step was noted."""
        return self._live is not None and self._live.has_batches

    def notice(self, text: str) -> None:
        """Warn once, and repeat it in the summary: what an integration has to report."""
        self._notices(text)

    @property
    def last(self) -> dict[str, Any]:
        """The newest finished row with all its metrics; empty before the first."""
        return dict(self._output.last_row)

    def summary(self) -> dict[str, Any]:
        """The run so far as plain data; None where a value is unknown."""
        live = self._live
        figures = RunFigures(info_of(self.config)) if live is None else live.figures()
        unlogged = f"{self._unlogged:,} steps: the monitor failed and was switched off"
        lost = [*([unlogged] if self._unlogged else []), *self._output.lost()]
        return summary_of(figures, lost=lost, warnings=self._notices.texts)

    def close(self) -> None:
        """Write the remaining rows, close the trackers and print the summary; runs at exit automatically."""
        if self._is_closed or forks.number != self._forks:
            return
        self._is_closed = True
        self._notices.in_closing(atexit.unregister, self.close)
        if self._end_of_child is not None:
            self._notices.in_closing(self._end_of_child.cancel)
        self._notices.in_closing(self._close)

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        deliver(live.signals)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a part of the monitor; an exception becomes one warning and does not propagate."""
        if self._is_broken or self._is_disabled:
            return None
        try:
            with self._training_lock:
                return work(*args)
        except Exception as error:
            self._switch_off(error)
            return None

    def _switch_off(self, error: Exception) -> None:
        self._is_broken = True
        self._notices(
            f"the monitor failed and is switched off, training continues: {type(error).__name__}: {error}"
        )

    def _run_to_log(self, tensors: Batch) -> LiveRun | None:
        """The run that a step belongs to; None if the step is not logged."""
        if self._is_disabled:
            return None
        if self._is_broken:
            self._unlogged += not self._is_closed
            return None
        if self._is_closed:
            self._notices("log_step was called after close(): the step is not logged")
            return None
        live = self._started(tensors)
        if forks.number != self._forks:
            self._is_broken = True
            self._notices("this process was forked from the monitored one: its steps are not logged")
            return None
        return live

    def _started(self, tensors: Batch) -> LiveRun:
        """The run, created with the first batch or step: device and job are known by then."""
        if self._live is None:
            self._forks = forks.number
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
                training_lock=self._training_lock,
            )
        return self._live

    def _on_forward(self, watched: Watched, batch: Batch | None) -> None:
        began_s, hooks = time.perf_counter(), self._hooks
        if not (hooks.are_disabled or self._pauses or self._is_closed or self._is_broken):
            try:
                with self._training_lock:
                    live = self._live or self._started(batch or {})
                    slot = 0 if hooks.see_whole_batches else hooks.slot(watched)
                    live.note_batch(batch, began_s, slot, watched)
            except Exception as error:
                self._switch_off(error)

    def _note_observed(self, batch: Batch | None, began_s: float) -> None:
        slot = 0 if self._hooks.see_whole_batches else None
        self._started(batch or {}).note_batch(batch, began_s, slot, None)

    def _on_evaluation(self) -> None:
        if not self._is_closed:
            self._guarded(self._between.evaluated)

    def _measure_datasets(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        pending = self._datasets.measure(batch, outputs, aggregated_loss)
        if pending is not None:
            self._pending_datasets.append((pending, start_host_copy(pending.sums)))

    def _batch_shapes(self) -> list[dict[str, list[int]]]:
        return [] if self._live is None else self._live.batch_shapes()
