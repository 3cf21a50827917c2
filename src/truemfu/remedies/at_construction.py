"""Remedies that are arguments of optimizers and DataLoaders, set where the script makes them.

The classes stay what they are: their `__init__` gets other arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


def _with_arguments(cls: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the arguments of every object of this class that is made."""
    init = cls.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # the class itself is to say what is wrong
            init(self, *args, **kwargs)
            return
        change(bound.arguments)
        init(*bound.args, **bound.kwargs)

    cls.__init__ = __init__


def optimizers_with(argument: str) -> list[type]:
    """The optimizers of torch that take this argument."""
    found = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return [cls for cls in found if argument in inspect.signature(cls.__init__).parameters]


def _optimizer(chosen: str, other: str) -> Callable[[str], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[chosen] = True
        arguments.pop(other, None)

    def apply(option: str) -> None:
        for cls in optimizers_with(chosen):
            _with_arguments(cls, change)

    return apply


def _loader_workers(option: str) -> None:
    def change(arguments: dict[str, Any]) -> None:
        is_stream = isinstance(arguments.get("dataset"), IterableDataset)
        if not arguments.get("num_workers") and not is_stream:
            arguments["num_workers"], arguments["persistent_workers"] = int(option), True

    _with_arguments(DataLoader, change)


def _pin_memory(option: str) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["pin_memory"] = True

    _with_arguments(DataLoader, change)


APPLY: dict[str, Callable[[str], None]] = {
    "fused_optimizer": _optimizer("fused", "foreach"),
    "foreach_optimizer": _optimizer("foreach", "fused"),
    "loader_workers": _loader_workers,
    "pin_memory": _pin_memory,
}
