"""The scalar that a counted step differentiates: the user's loss, the model's own, or the sum of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ModelError, one_line
from ...torch_private.trees import tree_leaves


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The loss as a differentiable scalar; raises ModelError if there is none."""
    if loss_fn is not None:
        try:
            loss = loss_fn(output)
        except Exception as error:
            raise ModelError(
                f"loss_fn raised {one_line(error)} (it is called with the model's output)"
            ) from error
        if not isinstance(loss, torch.Tensor):
            raise ModelError(f"loss_fn must return a tensor; it returned {type(loss).__name__}")
    else:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        loss = own if isinstance(own, torch.Tensor) else _sum_of_outputs(output)
    if not loss.requires_grad:
        raise ModelError(
            "the loss needs no gradient: it does not depend on any parameter that requires one "
            "(count with backward=False, or unfreeze a parameter)"
        )
    if loss.is_complex():
        raise ModelError(f"the loss must be a real number; it is {loss.dtype}")
    return loss if loss.dim() == 0 else loss.sum()


def _sum_of_outputs(output: Any) -> torch.Tensor:
    type_name = type(output).__name__
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    elif not isinstance(output, (torch.Tensor, tuple, list, dict)) and hasattr(output, "__dict__"):
        output = list(vars(output).values())
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError(
            f"the model returned {type_name} without a tensor in it: a training step needs an "
            "output to differentiate (or pass loss_fn)"
        )
    needed = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not needed:
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        raise ModelError(
            f"no output of the model ({dtypes}) needs a gradient: its parameters are frozen, it returns no "
            "floating-point tensor, or it runs without gradients (count with backward=False)"
        )
    total = needed[0].sum()
    for tensor in needed[1:]:
        total = total + tensor.sum()
    return total.real if total.is_complex() else total
