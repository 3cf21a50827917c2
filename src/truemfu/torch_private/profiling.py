"""What a profiled step needs of torch: whether another profiler is at work, and the schemas of operators."""

from __future__ import annotations

import functools
from typing import Any

from torch.profiler.profiler import PROFILER_STEP_NAME

from ..errors import UsageError
from . import table
from .find import ABSENT

_REQUIRED = (table.PROFILER_ENABLED, table.PROFILER_STEPS, table.PROFILER_FLAG, table.PROFILER_STOP)


def is_profiler_in_use() -> bool:
    """Whether a profiler of somebody else records, or may be warming up; UsageError where nobody can tell.

    A torch.profiler with a schedule prepares its recording a step before. Ours in between would undo that,
    and then the process crashes in torch when theirs ends. All that tells of one is the count of steps it
    registers when it is made and drops when its `with` block ends.
    """
    found = [table.get(path) for path in _REQUIRED]
    for path, value in zip(_REQUIRED, found, strict=True):
        if value is ABSENT:
            table.miss(path)
            raise UsageError(table.reason(path))
    enabled, steps, flag, _ = found
    return bool(PROFILER_STEP_NAME in steps or flag or enabled())


def after_failed_start() -> None:
    """Undo what a profiler has noted that could not start."""
    table.get(table.PROFILER_STOP)()


@functools.cache
def _working(path: str) -> Any:
    """The name, tried out on an operator that will not change; UsageError where it is not what it was."""
    found = table.get(path)
    try:
        if path == table.SCHEMAS:
            works = found is not ABSENT and [len(s.arguments) for s in found("aten::mm")][:1] == [2]
        else:
            kind = "CompositeImplicitAutograd"
            works = found is not ABSENT and found("aten::linear", kind) and not found("aten::mm", kind)
    except Exception:  # whatever it is now, it is not used
        works = False
    if not works:
        table.miss(path)
        raise UsageError(table.reason(path))
    return found


def schemas_of(name: str) -> tuple[Any, ...]:
    """The schemas of all overloads of an operator."""
    return tuple(_working(table.SCHEMAS)(name))


def is_made_of_others(overload: str) -> bool:
    """Whether an operator is made of others before autograd sees it."""
    return bool(_working(table.HAS_KERNEL)(overload, "CompositeImplicitAutograd"))
