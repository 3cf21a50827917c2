"""Wrappers around a model: those of torch, FSDP2's class, and hooks that are not part of its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .batch import is_readable


def module_of(cls: type) -> str:
    """The module of a class; "builtins" where it is not text, as a type written in C may have it."""
    name: object = cls.__module__
    return name if isinstance(name, str) else "builtins"


def is_compiled_wrapper(model: nn.Module | None) -> bool:
    """Whether this is a module returned by `torch.compile`; tested without importing its class."""
    return type(model).__name__ == "OptimizedModule"


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, DataParallel and `torch.compile` wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif is_compiled_wrapper(model) and isinstance(model._orig_mod, nn.Module):
            model = model._orig_mod
        else:
            return model


def has_values(model: nn.Module) -> bool:
    """Whether a model can be copied with its values: no tensor is on the meta device, fake or sharded."""
    tensors = (*model.parameters(), *model.buffers())
    return all(is_readable(t) and not hasattr(t, "device_mesh") for t in tensors)


def unwrap_fsdp(module: nn.Module) -> tuple[type[nn.Module], torch.dtype | None]:
    """The class that FSDP2 wraps, and the dtype FSDP2 computes in (None: the parameters' own)."""
    cls = type(module)
    bases = cls.__bases__
    if len(bases) != 2 or bases[0].__name__ != "FSDPModule":
        return cls, None
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return bases[1], policy.param_dtype


def is_not_model_work(hook: Any) -> bool:
    """Whether a hook only observes the run (it or its object is marked `_truemfu_skip`) or gathers shards."""
    target = getattr(hook, "func", hook)
    home = getattr(target, "__module__", "") or ""
    bound_to = getattr(target, "__self__", None)
    is_sharding = "_fsdp" in home or "_fsdp" in type(bound_to).__module__
    is_watching = hasattr(target, "_truemfu_skip") or hasattr(bound_to, "_truemfu_skip")
    return is_sharding or is_watching or home.startswith(("torch.distributed.tensor", "truemfu."))
