"""A fingerprint of what a count depends on: a cheap check whether the model has changed.

The work of a step changes when a parameter is frozen or freed, a module is swapped, added or wrapped, a dtype
changes, dropout or checkpointing is switched. All of these show in the structure of the modules, their
parameters' shapes, dtypes and flags, and the modules' own switches and numbers.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ...flops import unwrap

_MAX_TEXT = 40


def fingerprint(model: nn.Module) -> tuple[int, int]:
    """Two hashes, valid within this process, that change when a new count is due.

    The first covers structure, parameters and switches, the second the modules' own numbers (a depth, experts
    per token, a dropout rate). Some models increment such a number at every step.
    """
    model = unwrap(model)
    parts: list[object] = []
    numbers: list[object] = []
    for module in model.modules():
        own = vars(module)
        parts.append(type(module))
        hooks = (*own.get("_forward_hooks", {}).values(), *own.get("_forward_pre_hooks", {}).values())
        parts.append(sum(not getattr(hook, "_truemfu_skip", False) for hook in hooks))
        for name, value in own.items():
            cls = type(value)
            if cls is bool or (cls is str and len(value) <= _MAX_TEXT):
                parts.append((name, value))
            elif cls is int or cls is float:
                numbers.append((name, value))
        for name, parameter in module._parameters.items():  # not in `vars` of TorchScript
            if parameter is not None:
                parts.append((name, parameter.requires_grad, parameter.dtype, tuple(parameter.shape)))
                if type(parameter) is not nn.Parameter:  # how it is split over ranks
                    parts.append(getattr(parameter, "placements", None))
    config = getattr(model, "config", None)
    parts.append(getattr(config, "_attn_implementation", None))
    own_config = getattr(config, "__dict__", {})
    numbers += [(name, value) for name, value in own_config.items() if type(value) in (int, float)]
    return hash(tuple(parts)), hash(tuple(numbers))


def has_uninitialized(model: nn.Module) -> bool:
    """Whether there are lazy parameters, whose shape is unknown before the first forward pass."""
    return any(is_lazy(parameter) for parameter in model.parameters())
