"""Accelerate: `watch(accelerator)`, one call before or after `accelerator.prepare(...)`.

    accelerator.prepare         ──► the prepared models are attached
    accelerator.backward(loss)  ──► the step's loss
    a prepared optimizer steps  ──► log_step; Accelerate calls it only where gradients synchronise
    accelerator.save_state      ──► left out of step times
    accelerator.end_training    ──► the summary

The methods are replaced on this accelerator alone, until the monitor is closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..environment import is_disabled
from ..monitor.monitor import TrainingMonitor
from ..torch_private.replacing import replace
from ..trackers.base import Tracker
from .guarded import guarded, noting, paused_methods, pausing


def watch(
    accelerator: Any,
    output_dir: str | os.PathLike[str] = "truemfu",
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    trackers: Sequence[str | Tracker] | None = None,
    *,
    first_step: int = 1,
) -> TrainingMonitor:
    """Monitor the training that uses this accelerator; the result is its `TrainingMonitor`.

    `first_step` is the number of the next optimizer step, for a run that resumes. An evaluation that is to
    have a share of its own in the summary goes into `with monitor.pause("evaluation"):`.
    """
    monitor = _AcceleratorMonitor(output_dir, config, trackers=trackers)
    if not is_disabled():
        monitor.watch(accelerator, first_step)
    return monitor


class _AcceleratorMonitor(TrainingMonitor):
    """A monitor that ends its steps where a prepared optimizer steps."""

    _undo: tuple[Callable[[], None], ...] = ()

    def watch(self, accelerator: Any, first_step: int) -> None:
        """Replace methods of the accelerator, and attach what it has prepared."""
        steps = _Steps(self, accelerator, first_step)
        self._undo = steps.started()

    def close(self) -> None:
        """Put the accelerator's methods back, write the remaining rows and print the summary."""
        for put_back in self._undo:
            put_back()
        self._undo = ()
        super().close()


class _Steps:
    """The optimizer steps of one accelerator."""

    def __init__(self, monitor: TrainingMonitor, accelerator: Any, first_step: int) -> None:
        self._monitor, self._accelerator, self._step = monitor, accelerator, first_step
        self._models: list[nn.Module] = []
        self._loss: Any = None
        self._losses = 0
        self._norms: list[Any] = []
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last row."""

    def started(self) -> tuple[Callable[[], None], ...]:
        """Begin; what is returned ends it."""
        accelerator, monitor = self._accelerator, self._monitor
        self._attach(accelerator._models)

        def backward(original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_loss(loss)
            return original(loss, *args, **kwargs)

        def end_training(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            monitor.close()
            return original(*args, **kwargs)

        pauses = paused_methods("accelerate.accelerator")
        replacements = {
            **{name: pausing(monitor.pause, kind) for name, kind in pauses.items()},
            "prepare": noting(self._attach),
            "prepare_model": noting(self._attach),
            "clip_grad_norm_": noting(self._norms.append),
            "backward": backward,
            "end_training": end_training,
        }
        undo = [replace(accelerator, name, instead) for name, instead in replacements.items()]
        hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        return (hook.remove, *reversed(undo))

    def give_up(self) -> None:
        """A failure: leave the accelerator as it was."""
        self._monitor.close()

    @guarded
    def _attach(self, prepared: Any) -> None:
        """Watch the models among what was prepared, and those from before."""
        found = prepared if isinstance(prepared, (tuple, list)) else [prepared]
        models = [model for model in found if isinstance(model, nn.Module)]
        new = [model for model in models if not any(model is known for known in self._models)]
        if not new:
            return
        inside = {id(module) for model in new for module in model.modules()}
        self._models = [known for known in self._models if id(known) not in inside] + new  # wrapped meanwhile
        self._monitor.attach(self._models[0] if len(self._models) == 1 else self._models)

    @guarded
    def _note_loss(self, loss: Any) -> None:
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._loss = loss if self._loss is None else self._loss + loss
        self._losses += 1

    @guarded
    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End the step, if the optimizer is a prepared one and the last of several to step."""
        prepared = [_innermost(wrapped) for wrapped in self._accelerator._optimizers]
        if not any(optimizer is one for one in prepared):
            return
        self._stepped.add(id(optimizer))
        if not self._stepped.issuperset(map(id, prepared)):
            return
        self._stepped.clear()
        loss = self._loss / self._losses if self._losses > 1 else self._loss
        norm = self._norms[0] if len(self._norms) == 1 else None
        rate = prepared[0].param_groups[0]["lr"]
        step, self._step = self._step, self._step + 1
        self._loss, self._losses = None, 0
        self._norms.clear()
        self._monitor.log_step(step, None, loss, norm, rate)


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    while (inner := vars(optimizer).get("optimizer")) is not None:
        optimizer = inner
    return optimizer
