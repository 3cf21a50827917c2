"""Which models an optimizer trains: the outermost modules that hold its parameters.

    parameters ──► the modules that own them ──► the modules around those, up to the outermost

All modules of the process are looked through, by the garbage collector's list: a model may have been built,
copied or loaded in any way. That happens when an optimizer is made, not in a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]


def models_with(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The outermost modules that hold any of these parameters; empty if they belong to no module."""
    wanted = set(map(id, parameters))
    around: dict[int, list[nn.Module]] = {}
    owners: list[nn.Module] = []
    for module in _all_modules():
        state = module.__dict__
        for child in _values(state.get("_modules")):
            around.setdefault(id(child), []).append(module)
        if any(id(p) in wanted for p in _values(state.get("_parameters"))):
            owners.append(module)
    outermost: dict[int, nn.Module] = {}
    seen: set[int] = set()
    while owners:
        module = owners.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        outer = around.get(id(module), [])
        owners += outer
        if not outer:
            outermost[id(module)] = module
    return list(outermost.values())


def _all_modules() -> list[nn.Module]:
    # By the type's bases: an object may compute its __class__, which runs code of its own.
    return [found for found in gc.get_objects() if nn.Module in type(found).__mro__]


def _values(container: Any) -> list[Any]:
    return [value for value in container.values() if value is not None] if isinstance(container, dict) else []
