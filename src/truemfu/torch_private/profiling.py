"""Names of torch that a profiled step needs: whether another profiler is active, and operators' schemas."""

from __future__ import annotations

import functools
from typing import Any

from torch.profiler.profiler import PROFILER_STEP_NAME

from ..errors import UsageError
from . import table
from .find import ABSENT

_REQUIRED = (table.PROFILER_ENABLED, table.PROFILER_STEPS, table.PROFILER_FLAG, table.PROFILER_STOP)


def is_profiler_in_use() -> bool:
    """Whether another profiler is recording or may be warming up; raises UsageError if that is unknown.

    A torch.profiler with a schedule prepares its recording one step earlier. Starting ours in between would
    undo that, and the process would crash in torch when the other one ends. The only sign of one is the step
    count that it registers when created and removes when its `with` block ends.
    """
    enabled, steps, flag, _ = map(_needed, _REQUIRED)
    return bool(PROFILER_STEP_NAME in steps or flag or enabled())


def is_profiled() -> bool:
    """The same, false if that is unknown."""
    try:
        return is_profiler_in_use()
    except UsageError:
        return False


def after_failed_start() -> None:
    """Clear the state of a profiler that failed to start."""
    table.get(table.PROFILER_STOP)()


def _needed(path: str) -> Any:
    found = table.get(path)
    if found is ABSENT:
        table.miss(path)
        raise UsageError(table.reason(path))
    return found


@functools.lru_cache(maxsize=1024)
def schemas_of(name: str) -> tuple[Any, ...]:
    """The schemas of all overloads of an operator."""
    return tuple(_needed(table.SCHEMAS)(name))


def is_decomposed(overload: str) -> bool:
    """Whether an operator is decomposed into others before autograd."""
    try:
        return bool(_needed(table.HAS_KERNEL)(overload, "CompositeImplicitAutograd"))
    except RuntimeError:  # an operator of TorchScript only
        return False
