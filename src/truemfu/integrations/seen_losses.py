"""The loss of a step where nothing passes it to the monitor: the number that `backward` starts from.

A scaled loss is taken as it was before `GradScaler.scale`. The tensor is only referred to here: the monitor
reads it later, without waiting for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..torch_private.dispatch import hidden_from_modes


class SeenLosses:
    """The loss of the last backward pass; None if it did not start from one number."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None
        self._scaled: tuple[Any, Any] = (None, None)

    def install(self) -> None:
        """Follow `torch.autograd.backward`, which every `loss.backward()` calls, and loss scaling."""
        torch.autograd.backward = self._following_backward(torch.autograd.backward)
        torch.amp.GradScaler.scale = self._following_scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]

    def take(self) -> torch.Tensor | None:
        """The loss of the step that ends now."""
        last, self._last, self._scaled = self._last, None, (None, None)
        return last

    def _following_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def following(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._last = self._loss_in(tensors)
            return backward(tensors, *args, **kwargs)

        return following

    def _following_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def following(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            self._scaled = scaled, outputs
            return scaled

        return following

    def _loss_in(self, tensors: Any) -> torch.Tensor | None:
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
        if tensors is self._scaled[0]:
            tensors = self._scaled[1]
        if type(tensors) is not torch.Tensor or tensors.numel() != 1:
            return None
        with hidden_from_modes():
            return tensors.detach()
