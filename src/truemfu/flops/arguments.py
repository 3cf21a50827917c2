"""Checks a count's arguments (model, batch, options) before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..convention import Convention
from ..errors import BatchError, ModelError, UsageError
from .wrappers import unwrap


def check_options(convention: Any, backward: Any, loss_fn: Any) -> None:
    """Raise UsageError for an invalid option of a count."""
    if not isinstance(convention, Convention):
        raise UsageError(
            f"convention must be a Convention, such as Convention(attention='causal'); got {convention!r}"
        )
    if not isinstance(backward, bool):
        raise UsageError(f"backward must be True or False; got {backward!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of the model's output; got {loss_fn!r}")


def check_forward(model: nn.Module) -> None:
    """Raise ModelError for a model without a forward method, such as a container of modules."""
    called = unwrap(model)
    if getattr(called.forward, "__func__", None) is nn.Module.forward:
        raise ModelError(
            f"{type(called).__name__} has no forward method, so it cannot be run for a count: pass the "
            "module that the training calls, or define forward"
        )


def check_call(model: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as positional and keyword arguments of a model, or a clear error."""
    check_model(model)
    return check_batch(batch)


def check_model(model: Any) -> None:
    """Raise an error for something whose FLOPs cannot be found."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module to count; got the class itself: pass an instance, {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module to count; got {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} is TorchScript, which cannot be counted: pass the nn.Module it was compiled from"
        )
    if "_parameters" not in vars(model):
        raise ModelError(f"{name} is not initialised: its __init__ must call super().__init__()")
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise ModelError(
            f"{name} is sharded by FullyShardedDataParallel, which flattens its parameters: count the model "
            "before wrapping it, or shard it with fully_shard"
        )
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError(f"{name} has uninitialised parameters: run one batch through its lazy layers first")


def check_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as positional and keyword arguments, or a clear error."""
    if isinstance(batch, Mapping):
        unknown = [key for key in batch if not isinstance(key, str)]
        if unknown:
            raise BatchError(f"a batch maps argument names to tensors; got the key {unknown[0]!r}")
        args: tuple[Any, ...] = ()
        kwargs = dict(batch)
    elif isinstance(batch, (tuple, list)):
        args, kwargs = tuple(batch), {}
    elif isinstance(batch, torch.Tensor):
        args, kwargs = (batch,), {}
    else:
        raise BatchError(
            "a batch is a mapping of keyword arguments or a tuple of positional ones; "
            f"got {type(batch).__name__}"
        )
    return args, kwargs
