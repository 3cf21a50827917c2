"""The plain trainer, and the loss and the optimizer that all trainers share.

Each trainer computes the same loss from the model's outputs, sample by sample, so that the model's work is
the same under all of them and only the trainer differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import ModelError, UsageError, closest
from .base import OPTIMIZERS, TrainerSettings

IGNORED = -100
"""The label of a token without a target."""


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
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=settings.learning_rate)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=settings.learning_rate)
    raise UsageError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {settings.optimizer!r}"
        f"{closest(settings.optimizer, OPTIMIZERS)}"
    )


def losses_by_sample(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The loss of each sample of the batch, shape (samples,): mean over its own targets.

    Logits (samples, tokens, classes) with labels (samples, tokens) predict the next token; logits (samples,
    classes) with labels (samples,) a class. Without labels it is the mean square of the output.
    """
    output = model(**{name: value for name, value in batch.items() if name != "labels"})
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(model).__name__} returned {type(output).__name__} without logits: the sweep computes "
            "each sample's loss from logits"
        )
    labels = batch.get("labels")
    if labels is None:
        return logits.float().square().flatten(1).mean(dim=1)
    if logits.dim() == 2 and labels.dim() == 1:
        return F.cross_entropy(logits.float(), labels, reduction="none")
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ModelError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}: "
            "expected (samples, tokens, classes) and (samples, tokens)"
        )
    # Moving the labels instead of cutting the logits saves a copy of the largest tensor of the step.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    counted = targets.ne(IGNORED).sum(dim=1).clamp(min=1)
    return losses.view_as(targets).sum(dim=1) / counted
