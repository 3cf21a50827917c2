"""The loss of a step where nothing passes it to the monitor: the sum of what `backward` starts from.

    optimizer.step ──► (loss / 2).backward() ──► (loss / 2).backward() ──► optimizer.step: the step's loss

Its gradient is what the optimizer applies, and a Trainer logs the same sum for a step of several
micro-batches. Of an optimizer that calls a closure several times in one step, the last call counts. A scaled
loss is taken as it was before `GradScaler.scale`. Losses are added on their device: the monitor reads the sum
later, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_private.dispatch import hidden_from_modes
from ..torch_private.replacing import replace


class SeenLosses:
    """The loss of the step in progress; None if no backward pass started from one number."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._is_stepping = self._is_applied = False
        """Whether an optimizer is in its step, and whether one has applied the gradient of this sum."""
        self._scaled: tuple[Any, Any] = (None, None)

    def install(self) -> None:
        """Follow `torch.autograd.backward`, which every `loss.backward()` calls, and loss scaling."""
        replace(torch.autograd, "backward", self._backward)
        replace(torch.amp.GradScaler, "scale", self._scale)

    def take(self) -> torch.Tensor | None:
        """The loss of the step that ends now."""
        loss, self._sum, self._scaled = self._sum, None, (None, None)
        return loss

    def step_begins(self) -> None:
        """An optimizer steps: what its closure differentiates is not added to earlier losses."""
        self._is_stepping = True

    def step_ended(self) -> None:
        """An optimizer has stepped: the next backward pass belongs to another gradient."""
        self._is_stepping, self._is_applied = False, True

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._add(self._loss_in(tensors))
        return original(tensors, *args, **kwargs)

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self._scaled = scaled, outputs
        return scaled

    def _add(self, loss: torch.Tensor | None) -> None:
        if loss is None:
            return
        earlier, is_new = self._sum, self._is_applied or self._is_stepping
        self._is_applied = False
        if earlier is None or is_new or earlier.device != loss.device:
            self._sum = loss
            return
        with hidden_from_modes():
            self._sum = earlier.float() + loss.float()

    def _loss_in(self, tensors: Any) -> torch.Tensor | None:
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
        if tensors is self._scaled[0]:
            tensors = self._scaled[1]
        if type(tensors) is not torch.Tensor or tensors.numel() != 1:
            return None
        with hidden_from_modes():
            return tensors.detach()
