"""Samples of a batch: how many it has, some of them alone, and the loss of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..errors import BatchError, ModelError, UsageError

IGNORED = -100
"""The label of a token without a target."""


def samples_of(batch: Any) -> int:
    """The first dimension of the batch's first tensor."""
    found = next((tensor for tensor in tensors_of(batch) if tensor.dim() > 0), None)
    if found is None:
        raise BatchError(
            f"{type(batch).__name__} is no batch of samples: expected tensors, in dicts or lists"
        )
    return found.shape[0]


def cut(batch: Any, samples: int, which: slice) -> Any:
    """These samples of the batch; tensors without one entry per sample are shared by all."""
    if isinstance(batch, Tensor):
        return batch[which].contiguous() if batch.dim() > 0 and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        return {name: cut(value, samples, which) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [cut(value, samples, which) for value in batch]
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors in dicts, lists and tuples, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(value)


def losses_by_sample(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The loss of each sample of the batch, shape (samples,): mean over its own targets.

    Logits (samples, tokens, classes) with labels (samples, tokens) predict the next token; logits (samples,
    classes) with labels (samples,) a class. Without labels it is the mean square of the output.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"losses_by_sample(model, batch) needs a dict of the model's arguments, and labels; got "
            f"{type(batch).__name__}"
        )
    output = model(**{name: value for name, value in batch.items() if name != "labels"})
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(model).__name__} returned {type(output).__name__} without logits: each sample's loss is "
            "computed from them"
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
