"""Which models an optimizer trains: the outermost modules that hold its parameters.

    parameters ──► the modules that own them ──► the modules around those, up to the outermost

All modules of the process are looked through, by the garbage collector's list: a model may have been built,
copied or loaded in any way. That happens when an optimizer is made, not in a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..flops import unwrap


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


def names_in_script(models: Sequence[nn.Module]) -> list[str]:
    """A name for each model: its class, or, of several of one class, the variable or attribute that holds it.

    Empty where a name is not found. Variables of functions are not looked at: before Python 3.13 that changes
    what `locals()` returned to the program, and keeps their values alive.
    """
    classes = [type(unwrap(model)).__name__ for model in models]
    names = [
        name if classes.count(name) == 1 else _holder_name(model)
        for name, model in zip(classes, models, strict=True)
    ]
    return names if all(names) and len(set(names)) == len(names) else []


def _holder_name(model: nn.Module) -> str:
    """Of the global variable or attribute that holds a model or its wrapper; "" if there is none."""
    for held in dict.fromkeys((model, unwrap(model))):
        for holder in gc.get_referrers(held):
            if isinstance(holder, nn.Module) or type(holder) is FrameType:
                continue
            has_attributes = type(holder).__dictoffset__ != 0
            own = object.__getattribute__(holder, "__dict__") if has_attributes else {}  # runs no user code
            attributes = holder if type(holder) is dict else own
            for name, value in list(attributes.items()):
                if value is held and isinstance(name, str) and name not in ("module", "_orig_mod"):
                    return name
    return ""


def _all_modules() -> list[nn.Module]:
    # By the type's bases: an object may compute its __class__, which runs code of its own.
    return [found for found in gc.get_objects() if nn.Module in type(found).__mro__]


def _values(container: Any) -> list[Any]:
    return [value for value in container.values() if value is not None] if isinstance(container, dict) else []
