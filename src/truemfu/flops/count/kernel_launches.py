"""Triton kernels, which are launched past torch's dispatcher: seen by name, and not run on fake tensors.

A kernel is launched as `kernel[grid](*arguments)`. While a count lasts, that tells the tally first. Fake
tensors have no memory to launch anything on: the kernel is passed over, and what it may have written is
unknown.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ...torch_private.dispatch import FakeTensor
from .tally import Tally


@contextlib.contextmanager
def watched_launches(tally: Tally) -> Iterator[None]:
    """Tell the tally of each Triton kernel that this thread launches inside."""
    jit = sys.modules.get("triton.runtime.jit")
    interface: Any = getattr(jit, "KernelInterface", None)
    original = getattr(interface, "__getitem__", None)
    if original is None:
        yield
        return
    here = threading.get_ident()

    def choose_grid(kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)
        if threading.get_ident() != here:
            return launch

        def watched(*args: Any, **kwargs: Any) -> Any:
            tally.launch(f"triton::{_name(kernel)}", args, kwargs)
            if any(isinstance(argument, FakeTensor) for argument in (*args, *kwargs.values())):
                return None
            with tally.inside_launch():
                return launch(*args, **kwargs)

        return watched

    interface.__getitem__ = choose_grid
    try:
        yield
    finally:
        interface.__getitem__ = original


def _name(kernel: Any) -> str:
    """The name of the function that a kernel was made from, beneath autotuning and heuristics."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))
