"""Triton kernels, which bypass torch's dispatcher: recorded by name, and skipped on fake tensors.

A kernel is launched as `kernel[grid](*arguments)`. During a count, that call first reports the launch to the
tally. Fake tensors have no memory for a kernel to run on: it is skipped, and what it may have written is
unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...torch_private.dispatch import FakeTensor
from ...torch_private.replacing import replace
from .tally import Tally


def watch_launches(tally: Tally, is_watched: Callable[[], bool]) -> Callable[[], None]:
    """Report to the tally each Triton kernel launched while `is_watched`; returns what ends that."""
    interface: Any = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    if not hasattr(interface, "__getitem__"):
        return lambda: None

    def choose_grid(original: Any, kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)
        if not is_watched():
            return launch

        def watched(*args: Any, **kwargs: Any) -> Any:
            tally.record_launch(f"triton::{_name(kernel)}", args, kwargs)
            if any(isinstance(argument, FakeTensor) for argument in (*args, *kwargs.values())):
                return None
            with tally.inside_launch():
                return launch(*args, **kwargs)

        return watched

    return replace(interface, "__getitem__", choose_grid)


def _name(kernel: Any) -> str:
    """The name of a kernel's Python function, inside any autotuning and heuristics wrappers."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))
