"""The callback for Lightning's Trainer: a monitor for the time of each fit.

    on_train_start ──► TrainingMonitor on what training_step calls; save_checkpoint and validation pause it
    on_train_batch_end, gradients not accumulated ──► log_step
    every log_every_n_steps ──► the newest finished row to the Trainer's loggers and progress bar
    on_train_end, on_exception ──► the last row, close

Nothing here reads a value from the device. `lightning.pytorch` and `pytorch_lightning` both work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..environment import is_disabled
from ..errors import UsageError
from ..monitor.config import load_config
from ..monitor.monitor import TrainingMonitor
from ..monitor.watching.watched import CalledModels
from ..torch_private.replacing import replace
from ..trackers.base import Tracker
from .guarded import guarded, newest_figures, pausing

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_NORM_CLIPPING = "Precision.clip_grad_by_norm"
"""The implementation whose norm can be kept: it computes one for the whole model and drops it."""


def _callback_class() -> Any:
    """The base class of callbacks, of the package that is loaded, else of the one that is installed."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).Callback
    raise UsageError("the Lightning callback needs Lightning: pip install 'truemfu[lightning]'")


class TrueMFUCallback(_callback_class()):  # type: ignore[misc]
    """Logs MFU, HFU and tokens per second of a fit: `Trainer(callbacks=[TrueMFUCallback()])`.

    The run's files are in `output_dir`, by default in `truemfu` below the logger's folder, or below
    `default_root_dir` if no logger has a folder. `config` and `trackers` are those of `TrainingMonitor`.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        trackers: Sequence[str | Tracker] | None = None,
    ) -> None:
        super().__init__()
        load_config(config)  # raises here rather than in the fit
        self._output_dir, self._config, self._trackers = output_dir, config, trackers
        self._fit: _MonitoredFit | None = None
        self.monitor: TrainingMonitor | None = None
        """The monitor of the current or last fit."""

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a monitor; the sanity check is over, and the strategy has wrapped the model."""
        first = next(callback for callback in trainer.callbacks if isinstance(callback, TrueMFUCallback))
        if is_disabled() or first is not self:  # TRUEMFU=1 beside a callback in the code
            return
        self.give_up()
        self.monitor = TrainingMonitor(
            self._output_dir or _folder(trainer), self._config, trackers=self._trackers
        )
        has_wandb = self._trackers is None or "wandb" in self._trackers
        self._fit = _MonitoredFit(trainer, self.monitor, has_wandb=has_wandb)
        self._fit.start(pl_module)

    @guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rate of the step: afterwards the scheduler has changed it."""
        if self._fit is not None and self._fit.learning_rate is None:
            self._fit.learning_rate = optimizer.param_groups[0]["lr"]

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, unless gradients are accumulated further."""
        if self._fit is not None:
            self._fit.end_batch(pl_module, outputs)

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the pause; checkpoints of a validation are saved after this."""
        if self._fit is not None:
            self._fit.evaluation.close()

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining rows and print the summary."""
        self._end()

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit failed or was interrupted: the rows so far are written."""
        self._end()

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()

    def give_up(self) -> None:
        """Leave the trainer as it was."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.leave()
            fit.monitor.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fit": None, "monitor": None}  # a launcher copies callbacks to its processes


class _MonitoredFit:
    """One fit of a trainer."""

    def __init__(self, trainer: Any, monitor: TrainingMonitor, *, has_wandb: bool) -> None:
        self.trainer, self.monitor, self._has_wandb = trainer, monitor, has_wandb
        self.learning_rate: Any = None
        self.evaluation = contextlib.ExitStack()
        """The pause of a validation that runs."""
        self._loss: Any = None
        self._norms: list[Any] = []
        self._shown_step: Any = None
        self._undo: list[Callable[[], None]] = []

    def start(self, pl_module: nn.Module) -> None:
        """Watch the model, and replace the methods that save, validate and clip."""
        trainer = self.trainer
        several = len(trainer.optimizers) > 1
        self.monitor.attach(CalledModels(pl_module, are_separate=several, is_other_call=_is_redirected))

        def run_validation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.evaluation as evaluation:
                evaluation.enter_context(self.monitor.pause("evaluation"))
                return original(*args, **kwargs)

        self._undo += [
            replace(trainer, "save_checkpoint", pausing(self.monitor.pause, "checkpoint")),
            replace(trainer.fit_loop.epoch_loop.val_loop, "run", run_validation),
        ]
        plugin = trainer.precision_plugin
        if getattr(type(plugin).clip_grad_by_norm, "__qualname__", None) == _NORM_CLIPPING:

            def clip_grad_by_norm(original: Callable[..., Any], optimizer: Any, clip_val: float) -> None:
                norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
                self._norms.append(norm)

            self._undo.append(replace(plugin, "clip_grad_by_norm", clip_grad_by_norm))

    def end_batch(self, pl_module: Any, outputs: Any) -> None:
        """A micro-batch is done, and with it a step if the optimizer was called."""
        trainer, is_automatic = self.trainer, pl_module.automatic_optimization
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:  # of each micro-batch, already divided by their number
            self._loss = loss if self._loss is None else self._loss + loss
        if is_automatic and trainer.fit_loop._should_accumulate():
            return
        step = trainer.global_step if is_automatic else trainer.fit_loop.total_batch_idx + 1
        norm = self._norms[0] if len(self._norms) == 1 else None
        self.monitor.log_step(step, trainer.current_epoch, self._loss, norm, self.learning_rate)
        self._loss = self.learning_rate = None
        self._norms.clear()
        every = trainer.log_every_n_steps
        if (every and step % every == 0) or trainer.should_stop or trainer.fast_dev_run:
            self._show()

    def _show(self) -> None:
        """The newest finished row for the Trainer's loggers, callbacks and progress bar."""
        step = self.monitor.last.get("global_step")
        if step is None or step == self._shown_step:
            return
        self._shown_step = step
        metrics = newest_figures(self.monitor)
        for logger in self.trainer.loggers:
            if not (self._has_wandb and type(logger).__name__ == "WandbLogger"):  # the monitor logs there
                logger.log_metrics(metrics, step=step - 1)  # Lightning's own metrics of that batch are there
        connector = getattr(self.trainer, "_logger_connector", None)
        for_callbacks = getattr(connector, "_callback_metrics", None)
        for_bar = getattr(connector, "_progress_bar_metrics", None)
        if isinstance(for_callbacks, dict):  # the public property would fetch all metrics from the device
            for_callbacks.update({name: torch.tensor(value) for name, value in metrics.items()})
        if isinstance(for_bar, dict) and "perf/mfu" in metrics:
            for_bar["mfu"] = metrics["perf/mfu"]

    def end(self) -> None:
        """Write and show the last rows."""
        self.leave()
        self.monitor.close()
        self._show()

    def leave(self) -> None:
        """Put the trainer's methods back."""
        for put_back in reversed(self._undo):
            put_back()
        self._undo.clear()
        self.evaluation.close()


def _folder(trainer: Any) -> Path:
    """Where the run's files go by default; `trainer.log_dir` would be a collective call."""
    folders = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    known = [folder for folder in folders if isinstance(folder, (str, os.PathLike))]
    return Path(known[0] if known else trainer.default_root_dir) / "truemfu"


def _is_redirected(root: nn.Module) -> bool:
    """Whether a call of the module runs another method: a strategy's wrapper calls training_step that way."""
    own = vars(root).get("forward")
    return own is not None and getattr(own, "__self__", None) is not root
