"""Names of torch.compile that an observed step needs: compiled regions, their graphs, guards on modes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from . import table
from .find import ABSENT
from .mode_stack import put_at_the_bottom, take_out
from .replacing import replace
from .watching import graph_counters


def has_compiled() -> bool:
    """Whether this process has compiled code with torch.compile."""
    counters = graph_counters()
    return bool(counters and counters.get("stats", {}).get("unique_graphs"))


def dynamo_disable() -> Any:
    """The decorator that keeps the compiler from compiling a function; None while it is not loaded."""
    return getattr(sys.modules.get("torch._dynamo"), "disable", None)


def is_of_disable(frame: FrameType) -> bool:
    """Whether this is a frame that `dynamo_disable` puts around a call, such as that of a dispatch mode."""
    return frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def is_compiling() -> bool:
    """Whether this thread compiles: what runs then, such as a comparison of kernels, is not the step's."""
    context = table.loaded(table.TRACING)
    return context is not ABSENT and context.try_get() is not None


@functools.cache
def guards_ignore_modes() -> bool:
    """Whether compiled code remains valid for a tensor while a dispatch mode is on the stack."""
    if not table.has(table.TENSOR_GUARDS):
        return False

    class Probe(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    tensor, probe = torch.empty(2, 2, device="cpu"), Probe()  # type: ignore[no-untyped-call]
    try:
        guards = table.get(table.TENSOR_GUARDS)
        guard = guards(tensor, dynamic_dims_sizes=[[None, None]], dynamic_dims_strides=[[None, None]])
        before = bool(guard.check(tensor))
        put_at_the_bottom(probe)
        try:
            return before and bool(guard.check(tensor))
        finally:
            take_out(lambda mode: mode is probe)
    except Exception:
        table.miss(table.TENSOR_GUARDS)
        return False


def compiles_backward_passes() -> bool:
    """Whether compiled autograd is enabled."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def is_compiled_node(node: Any) -> bool:
    """Whether an autograd node is the backward pass of code that torch.compile differentiated."""
    return hasattr(getattr(type(node), "_forward_cls", None), "_lazy_backward_info")


def graph_text(region: Any) -> str:
    """The text of a region's graph; empty if this torch does not keep it."""
    return str(getattr(region, "inductor_post_grad_graph_str", None) or "")


def is_backward(region: Any) -> bool:
    """Whether a region is the backward pass of another."""
    return bool(region.fx_kwargs.get("is_backward"))


def replace_region_call(
    call: Callable[[Callable[[Any, Any], Any], Any, Any], Any],
) -> Callable[[], None]:
    """Run each compiled region as `call(run, region, inputs)`; returns what ends it.

    While inductor is not loaded, nothing can have been compiled by it.
    """
    kind: Any = table.loaded(table.COMPILED_REGION)
    return (lambda: None) if kind is ABSENT else replace(kind, "__call__", call)
