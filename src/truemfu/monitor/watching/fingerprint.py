"""A fingerprint of what a count depends on: a cheap check whether the model has changed.

The work of a step changes when a parameter is frozen or freed, a module is swapped, added or wrapped, a dtype
changes, dropout or checkpointing is switched. All of these show in the structure of the modules, their
parameters' shapes, dtypes and flags, and the modules' own switches and numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ...flops import unwrap

_MAX_TEXT = 40


class Fingerprint(NamedTuple):
    """Hashes, valid within this process, that change when a new count is due."""

    structure: int
    """Modules, parameters and switches."""
    modes: int
    """Which modules are in training mode: an evaluation changes that for a while."""
    numbers: int
    """The modules' own numbers (a depth, experts per token, a dropout rate); some change at every step."""


def fingerprint(models: Iterable[nn.Module]) -> Fingerprint:
    """The fingerprint of some models together."""
    found = [_of_one(unwrap(model)) for model in models]
    return Fingerprint(*(hash(tuple(hashes)) for hashes in zip(*found, strict=True)) if found else (0, 0, 0))


def _of_one(model: nn.Module) -> Fingerprint:
    parts: list[object] = []
    modes: list[bool] = []
    numbers: list[object] = []
    for module in model.modules():
        own = vars(module)
        parts.append(type(module))
        parts.append(id(own.get("forward")))  # replaced on the instance
        modes.append(module.training)
        hooks = (*own.get("_forward_hooks", {}).values(), *own.get("_forward_pre_hooks", {}).values())
        parts.append(sum(not getattr(hook, "_truemfu_skip", False) for hook in hooks))
        for name, value in own.items():
            cls = type(value)
            if name == "training":
                continue
            if cls is bool or (cls is str and len(value) <= _MAX_TEXT):
                parts.append((name, value))
            elif cls is int or cls is float:
                numbers.append((name, value))
        for name, parameter in module._parameters.items():  # not in `vars` of TorchScript
            if parameter is not None:
                parts.append((name, parameter.requires_grad, parameter.dtype, tuple(parameter.shape)))
                if type(parameter) is not nn.Parameter:  # how it is split over ranks
                    parts.append(getattr(parameter, "placements", None))
    config = None
    with contextlib.suppress(Exception):  # a property of the model may raise anything
        config = getattr(model, "config", None)
    parts.append(getattr(config, "_attn_implementation", None))
    own_config = getattr(config, "__dict__", {})
    numbers += [(name, value) for name, value in own_config.items() if type(value) in (int, float)]
    return Fingerprint(hash(tuple(parts)), hash(tuple(modes)), hash(tuple(numbers)))


def has_uninitialized(model: nn.Module) -> bool:
    """Whether there are lazy parameters, whose shape is unknown before the first forward pass."""
    return any(is_lazy(parameter) for parameter in model.parameters())
