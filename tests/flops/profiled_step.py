"""A step that runs once under the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truemfu.convention import Convention
from truemfu.flops.flop_count import FlopCount
from truemfu.flops.profiled.profiler import StepProfiler


def profile_step(fn: Callable[..., Any], *args: Any, convention: Convention | None = None) -> FlopCount:
    """FLOPs that `fn(*args)` executes, from its recording."""
    profiler = StepProfiler(convention or Convention())
    profiler.start()
    try:
        fn(*args)
    finally:
        profile = profiler.stop()
    return profile.count()
