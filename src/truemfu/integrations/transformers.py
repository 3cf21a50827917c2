"""TrueMFUCallback: the training monitor in the Trainer of transformers, and in TRL's trainers.

    on_train_begin ──► a TrainingMonitor on `trainer.model_wrapped`, some methods of the trainer wrapped
    training_step, _get_grad_norm, _get_learning_rate ──► their results are noted: loss, norm, learning rate
    on_step_end ──► log_step
    evaluate, predict, _save_checkpoint, save_model ──► inside a pause
    on_log ──► MFU, HFU and tokens/s join the Trainer's own log
    on_train_end, or an exception ──► the monitor is closed, the methods are restored

Callbacks receive neither the called model nor the loss of a step nor its gradient norm, and no event marks
the beginning of an evaluation or a save. Hence the wrapped methods: those of the one trainer object, for one
call of `train()`. Importing this module also makes `report_to="truemfu"` known to transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers.integrations import INTEGRATION_TO_CALLBACK

from ..environment import is_disabled
from ..errors import one_line, warn_once
from ..monitor.config import load_config
from ..monitor.monitor import TrainingMonitor
from ..torch_private.replacing import replace
from ..trackers.base import Tracker
from .guarded import guarded, newest_figures, noting, paused_methods, pausing

TESTED_VERSIONS = "5.22"
LOGGED_AT_END = ("median_mfu", "median_hfu", "median_tokens_per_second")
"""What the summary adds, as `perf/…`, to the log at the end of the training."""

_PAUSES = paused_methods("transformers.trainer")
_NOTED = ("training_step", "_get_grad_norm", "_get_learning_rate")
_LOOP = ("_run_epoch", "_finalize_training")
"""Together they run all steps; an exception that leaves them ends the training."""
_NEEDED = (*_PAUSES, *_NOTED, *_LOOP, "callback_handler", "model_wrapped")


class TrueMFUCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Monitors each call of `trainer.train()`.

        trainer = Trainer(..., callbacks=[TrueMFUCallback()])

    The run's files are in `output_dir`, by default the folder `truemfu` in that of the Trainer. `config` and
    `trackers` are those of `TrainingMonitor`. A wrong configuration raises here; later nothing does.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        trackers: Sequence[str | Tracker] | None = None,
    ) -> None:
        load_config(config)
        self._output_dir = output_dir
        self._config = config
        self._trackers = trackers
        self._training: _Training | None = None
        self._is_second = False
        """Whether this trainer has another callback of this class, which monitors instead."""

    @property
    def monitor(self) -> TrainingMonitor | None:
        """The monitor of the training in progress, or of the last one; None before the first."""
        return None if self._training is None else self._training.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.end()  # an exception in another callback ended it unnoticed
        try:
            self._training = self._begin(args)
        except Exception as error:
            warn_once(f"TrueMFUCallback cannot monitor this training, which continues: {one_line(error)}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.end_step(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._training is not None and logs is not None:
            self._training.add_to_log(logs, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.end()

    def _begin(self, args: Any) -> _Training | None:
        if is_disabled():
            return None
        trainer = trainer_that_calls(self)
        missing = [name for name in _NEEDED if not hasattr(trainer, name)]
        if trainer is None or missing:
            lacks = f"its Trainer has no {missing[0]}" if trainer else "no Trainer was found"
            warn_once(
                f"TrueMFUCallback does not support transformers {transformers.__version__} ({lacks}; "
                f"tested with {TESTED_VERSIONS}): this training is not monitored"
            )
            return None
        callbacks = trainer.callback_handler.callbacks
        # The one that the user made comes after the one by report_to="truemfu", and is used.
        ours = [one for one in callbacks if isinstance(one, TrueMFUCallback) and not one._is_second]
        if not ours or ours[-1] is not self:
            self._is_second = True
            return None
        callbacks.remove(self)  # first, so that the loggers behind it see what it adds to a log
        callbacks.insert(0, self)
        output_dir = Path(args.output_dir) / "truemfu" if self._output_dir is None else self._output_dir
        return _Training(trainer, TrainingMonitor(output_dir, self._config, trackers=self._trackers))


class _Training:
    """One call of `trainer.train()`, from `on_train_begin` to its end."""

    def __init__(self, trainer: Any, monitor: TrainingMonitor) -> None:
        self.monitor = monitor
        self._is_over = False
        self._loss: torch.Tensor | None = None
        self._grad_norm: Any = None
        self._learning_rate: Any = None
        monitor.attach(trainer.model_wrapped)  # what training_step calls: compiled or parallel, where it is
        notes = (self._add_loss, self._keep_norm, self._keep_rate)
        instead = {
            **{name: noting(note) for name, note in zip(_NOTED, notes, strict=True)},
            **{name: pausing(monitor.pause, kind) for name, kind in _PAUSES.items()},
            **dict.fromkeys(_LOOP, self._ending),
        }
        self._undo = [replace(trainer, name, method) for name, method in instead.items()]
        self._undo.append(replace(trainer.callback_handler, "on_epoch_begin", self._ending))

    @guarded
    def end_step(self, state: Any) -> None:
        if self._is_over:
            return
        loss, self._loss = self._loss, None
        self.monitor.log_step(state.global_step, state.epoch, loss, self._grad_norm, self._learning_rate)

    @guarded
    def add_to_log(self, logs: dict[str, Any], state: Any) -> None:
        """Put the figures into this log and into `log_history`, which has received it already."""
        if self._is_over:
            return
        if "loss" in logs:
            found = newest_figures(self.monitor)
        elif "train_runtime" in logs and state.is_world_process_zero:
            self.monitor.save_logs()  # waits for the last rows: the training is over
            summary = self.monitor.summary()
            found = {f"perf/{name}": summary[name] for name in LOGGED_AT_END}
        else:
            return
        known = {name: value for name, value in found.items() if value is not None}
        logs.update(known)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(known)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            for put_back in reversed(self._undo):
                put_back()
            self.monitor.close()

    give_up = end

    @guarded
    def _add_loss(self, loss: torch.Tensor) -> None:
        # As the Trainer sums the micro-batches of a step: in float32 and on the device.
        if self._loss is None:
            self._loss = torch.zeros((), device=loss.device)
        self._loss += loss

    @guarded
    def _keep_norm(self, norm: Any) -> None:
        # The norm of sharded gradients is a partial sum on each rank until a collective adds them up.
        is_partial = any(not placement.is_replicate() for placement in getattr(norm, "placements", ()))
        self._grad_norm = None if is_partial else norm

    def _keep_rate(self, rate: Any) -> None:
        self._learning_rate = rate

    def _ending(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An exception that leaves the method ends the training."""
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.end()
            raise


def trainer_that_calls(callback: transformers.TrainerCallback) -> Any:
    """The Trainer whose loop is calling this callback, from the stack: events do not name it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


INTEGRATION_TO_CALLBACK["truemfu"] = TrueMFUCallback
