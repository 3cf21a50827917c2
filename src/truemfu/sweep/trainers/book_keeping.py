"""Clipping by book-keeping, with one backward pass and without Opacus (`truemfu.private`).

It adds Gaussian noise, because that costs time. The batch is used as given (no Poisson sampling), and
gradients are divided by its size, so no (ε, δ) is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ...errors import ModelError
from ...private.batches import losses_by_sample
from ...private.optimizer import PrivateOptimizer
from .base import TrainerSettings, Unsupported
from .standard import make_optimizer


class DPBookKeepingTrainer:
    """Norms and clipped sum from the inputs and output gradients of each layer."""

    private = True
    supports_ranks = True
    """Clipping, summing and noise over ranks are those of `truemfu.private`."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        if settings.compile:
            raise Unsupported("DPBookKeepingTrainer cannot be compiled: its hooks are inside the model")
        self._what = f"DPBookKeepingTrainer cannot train {type(model).__name__}"
        try:
            self._private = PrivateOptimizer(
                model.train(),
                make_optimizer(model, settings),
                max_grad_norm=settings.max_grad_norm,
                noise_multiplier=settings.noise_multiplier,
                check_every=None,  # the gradient check of the sweep has come before
            )
        except ModelError as error:
            raise Unsupported(f"{self._what}: {error}") from error

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step; the mean loss."""
        try:
            loss = self._private.backward(losses_by_sample, batch)
        except ModelError as error:
            raise Unsupported(f"{self._what}: {error}") from error
        self._private.step()
        return loss
