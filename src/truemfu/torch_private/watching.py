"""Names of torch that a monitor needs on the training thread: state of autograd and vmap; calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import table
from .find import ABSENT

backward_number: Callable[[], int] = table.get_or(table.GRAPH_TASK, lambda: -1)
"""The number of the backward pass this thread is in; -1 outside. Only valid if `detects_surroundings`."""
functorch_level: Callable[[], Any] = table.get_or(table.FUNCTORCH_LEVEL, lambda: None)
"""The innermost vmap or other functorch transform; None outside. Only valid if `detects_surroundings`."""
current_stream_data: Callable[[int], Any] | None = table.get_or(table.CURRENT_STREAM, None)
"""Identifies the current stream without creating an object; None if torch lacks it."""


def detects_surroundings() -> bool:
    """Whether a forward pass inside a backward pass, or inside a functorch transform, can be recognised."""
    return table.has(table.GRAPH_TASK) and table.has(table.FUNCTORCH_LEVEL)


CALL = "_compiled_call_impl"
"""The attribute in which a module stores the callable that replaces its `_call_impl`."""


def compiled_call(model: nn.Module) -> Any:
    """The compiled callable that `Module.compile` has set on a model; None if there is none."""
    return model.__dict__.get(CALL)


def miss_compiled_calls() -> None:
    """Warn about an unobserved forward pass, if it may be one of a model compiled with `Module.compile`."""
    table.has(table.COMPILED_CALL)


_version_slot = table.get(table.VERSION)
detects_overwrites = _version_slot is not ABSENT
"""Whether an overwritten tensor can be recognised."""


def _no_version(tensor: torch.Tensor) -> int:
    table.miss(table.VERSION)
    return 0


version_of: Callable[[torch.Tensor], int] = _version_slot.__get__ if detects_overwrites else _no_version
"""A number that changes when a tensor is overwritten; raises RuntimeError for an inference tensor."""


def graph_counters() -> Any:
    """The counters of torch.compile, a mapping of mappings, once it is loaded; else None."""
    found = table.loaded(table.COUNTERS)
    return found if hasattr(found, "get") else None


def default_store() -> Any:
    """The store of the default process group; None if its backend has none."""
    found = table.get(table.DEFAULT_STORE)
    if found is ABSENT:
        raise RuntimeError(table.reason(table.DEFAULT_STORE))
    return found()
