"""What is around a model: wrappers of torch, FSDP2's class, hooks that do none of its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .batch import is_readable


def is_compiled_wrapper(model: nn.Module | None) -> bool:
    """Whether this is what `torch.compile` makes of a module; its class is not imported for that."""
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
    """Whether a model could be copied with its values: nothing of it is on the meta device, fake or sharded.

    A snapshot answers for the model it was taken of.
    """
    known: bool | None = getattr(model, "_truemfu_had_values", None)
    if known is not None:
        return known
    tensors = (*model.parameters(), *model.buffers())
    return all(is_readable(t) and not hasattr(t, "device_mesh") for t in tensors)


def beneath_fsdp(module: nn.Module) -> tuple[type[nn.Module], torch.dtype | None]:
    """The class beneath FSDP2's, and the dtype FSDP2 computes in (None: the parameters' own)."""
    cls = type(module)
    bases = cls.__bases__
    if len(bases) != 2 or bases[0].__name__ != "FSDPModule":
        return cls, None
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    return bases[1], policy.param_dtype


def is_left_out(hook: Any) -> bool:
    """Whether a hook watches the run (marked `_truemfu_skip`, itself or its object), or gathers shards."""
    target = getattr(hook, "func", hook)
    home = getattr(target, "__module__", "") or ""
    bound_to = getattr(target, "__self__", None)
    is_sharding = "_fsdp" in home or "_fsdp" in type(bound_to).__module__
    is_watching = hasattr(target, "_truemfu_skip") or hasattr(bound_to, "_truemfu_skip")
    return is_sharding or is_watching or home.startswith(("torch.distributed.tensor", "truemfu."))
