"""Recording with torch.profiler, where no other profiler is active; and the schemas of operators."""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import profiler as torch_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME

from ..errors import UsageError
from . import table

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


def start_recording(use_device: str | None = None) -> Any:
    """A profiler that records from now on, with the shapes of what operators get; raises UsageError if
    another one is in use, which is left alone."""
    if is_profiler_in_use():
        raise UsageError(
            "another torch.profiler is set up or recording in this process, and only one can be active: "
            "measure a step outside its `with` block"
        )
    profile = torch_profiler.profile(use_cpu=True, use_device=use_device, record_shapes=True, use_kineto=True)
    try:
        profile.__enter__()
    except RuntimeError as error:
        table.get(table.PROFILER_STOP)()  # clear the state of a profiler that failed to start
        raise UsageError(f"torch.profiler cannot record here: {error}") from error
    return profile


def stop_recording(profile: Any) -> Any:
    """End it; what it has recorded, as Kineto holds it."""
    try:
        profile.__exit__(None, None, None)
    except RuntimeError as error:
        raise UsageError(f"other code has stopped the recording: {error}") from error
    return profile.kineto_results


def _needed(path: str) -> Any:
    if not table.has(path):
        raise UsageError(table.reason(path))
    return table.get(path)


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
