"""Names of torch that a count needs: modes that intercept operators, fake tensors, autograd's position.

Without fake tensors a count runs on real copies. Without the other names it is refused: `check_counts`
reports what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelError
from . import table
from .find import ABSENT

REQUIRED = (
    table.DISPATCH_MODE,
    table.DISABLE_MODES,
    table.SEQUENCE_NUMBER,
    table.AUTOGRAD_NODE,
    table.GRAPH_TASK,
    *table.TREES,
)
"""Names without which FLOPs would be wrong, or cannot be found."""


def check_counts() -> None:
    """Raise ModelError if torch lacks a name without which a count would be wrong or impossible."""
    for path in REQUIRED:
        if table.get(path) is ABSENT:
            raise ModelError(table.reason(path))


def check_fake_tensors() -> None:
    """Raise NotImplementedError if torch has no fake tensors: real copies are used instead."""
    for path in (table.FAKE_TENSOR, table.FAKE_MODE):
        if not table.has(path):
            raise NotImplementedError(table.reason(path))


class _NoFakeTensor(torch.Tensor):
    """Replaces FakeTensor if torch does not have it; no tensor is an instance."""


class _NoMode:
    """Replaces a mode that torch does not have: nothing is counted or observed then."""

    supports_higher_order_operators = True


current_autograd_node: Callable[[], Any] = table.get_or(table.AUTOGRAD_NODE, lambda: None)
current_graph_task_id: Callable[[], int] = table.get_or(table.GRAPH_TASK, lambda: -1)
next_sequence_nr: Callable[[], int] = table.get_or(table.SEQUENCE_NUMBER, lambda: 0)
"""The number that the next autograd node of this thread will get."""
top_saved_tensors_hooks: Callable[[bool], Any] | None = table.get_or(table.TOP_HOOKS, None)
"""Returns the innermost saved-tensor hooks, or None; is itself None if torch does not have it."""
engine_code: Any = getattr(table.get(table.RUN_BACKWARD), "__code__", None)
"""The code of the Python function that runs a backward pass; None if torch does not have it."""
_disabled_torch_function: Any = table.get(table.DISABLE_FUNCTION)
if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_modes
else:
    OpOverload = type(torch.ops.aten.mm.default)
    FakeTensor = table.get_or(table.FAKE_TENSOR, _NoFakeTensor)
    FakeTensorMode = table.get_or(table.FAKE_MODE, _NoMode)
    TorchDispatchMode = table.get_or(table.DISPATCH_MODE, _NoMode)
    disable_modes = table.get_or(table.DISABLE_MODES, contextlib.nullcontext)

__all__ = [
    "FakeTensor", "FakeTensorMode", "OpOverload", "TorchDispatchMode", "check_counts",
    "check_fake_tensors", "current_autograd_node", "current_graph_task_id", "disable_modes",
    "disable_torch_function", "hidden_from_modes",
    "next_sequence_nr", "top_saved_tensors_hooks",
]  # fmt: skip


def disable_torch_function() -> contextlib.AbstractContextManager[Any]:
    """No function mode intercepts the torch calls made inside; operators are intercepted as usual."""
    if _disabled_torch_function is ABSENT:
        table.miss(table.DISABLE_FUNCTION)
        return contextlib.nullcontext()
    return _disabled_torch_function()  # type: ignore[no-any-return]


def _some_modes() -> int:
    """As if there were modes, where their number is not known."""
    table.miss(table.FUNCTION_DEPTH)
    return 1


_dispatch_modes: Callable[[], int] = table.get_or(table.STACK_LENGTH, _some_modes)
_function_modes: Callable[[], int] = table.get_or(table.FUNCTION_DEPTH, _some_modes)


def hidden_from_modes() -> contextlib.AbstractContextManager[Any]:
    """No mode, the program's or ours, and no tensor subclass sees the torch calls inside."""
    return _hidden() if _dispatch_modes() or _function_modes() else disable_torch_function()


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    with disable_modes(), disable_torch_function():
        yield


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator's call by the names that its schema gives them, without defaults."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def flex_attention_operators() -> list[Any]:
    """The operators of flex attention, forward and backward; empty if torch has them elsewhere."""
    found = [table.get(path) for path in (table.FLEX_FORWARD, table.FLEX_BACKWARD)]
    return [] if ABSENT in found else found
