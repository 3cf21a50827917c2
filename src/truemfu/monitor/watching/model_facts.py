"""What a run's description says of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...flops import unwrap


def facts_of(models: Sequence[nn.Module]) -> dict[str, Any] | None:
    """Class and parameters of the models of a run, for its description; None without a model."""
    if not models:
        return None
    every = {id(p): p for model in models for p in model.parameters() if not nn.parameter.is_lazy(p)}
    parameters = [(p.numel(), p.requires_grad) for p in every.values()]
    return {
        "name": ", ".join(type(unwrap(model)).__name__ for model in models),
        "parameters": sum(count for count, _ in parameters),
        "trainable_parameters": sum(count for count, is_trained in parameters if is_trained),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in every.values()}),
    }
