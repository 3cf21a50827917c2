"""The plain trainer, and the loss and the optimizer that all trainers share.

Each trainer computes the same loss from the model's outputs, sample by sample, so that the model's work is
the same under all of them and only the trainer differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...private.batches import losses_by_sample as losses_by_sample
from .base import TrainerSettings


class StandardTrainer:
    """Forward, backward and optimizer step in plain PyTorch; compiled if requested."""

    private = False

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        model.train()
        self._forward: Any = torch.compile(model) if settings.compile else model
        self._optimizer = make_optimizer(model, settings)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step; the mean loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = losses_by_sample(self._forward, batch).mean()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def make_optimizer(model: nn.Module, settings: TrainerSettings) -> torch.optim.Optimizer:
    """The optimizer the settings name, over the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
    optimizer: torch.optim.Optimizer = kind(trained, lr=settings.learning_rate)
    return optimizer
