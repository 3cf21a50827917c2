"""The backward passes that Python code starts: which outputs, gradients of what, and when they have returned.

`Tensor.backward`, `autograd.backward` and `autograd.grad` share one function, for which torch has no hook: it
is replaced while there are listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch

from . import table
from .dispatch import disable_torch_function
from .replacing import Listeners

_MOST_OUTPUTS = 8


class BackwardListener(Protocol):
    """Called on the thread that starts a backward pass; must not raise."""

    def backward_begins(self, numbers: Sequence[int], asked: Hashable, makes_graph: bool) -> None:
        """It begins at the autograd nodes of these numbers; `asked` is equal for passes that ask for the same
        gradients, and `makes_graph` if these can be differentiated again."""

    def backward_ended(self) -> None:
        """It has returned, or raised."""


def listen(listener: BackwardListener) -> Callable[[], None]:
    """Call the listener before and after each backward pass; the returned function ends that."""
    if not table.has(table.RUN_BACKWARD):
        return lambda: None
    return _listeners.add(listener, torch.autograd, "_engine_run_backward")


def _tell(
    listeners: Iterable[BackwardListener],
    original: Callable[..., Any],
    outputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if torch.compiler.is_compiling():
        return original(outputs, *args, **kwargs)
    seen = _seen(outputs, *args)
    for listener in listeners:
        listener.backward_begins(*seen)
    try:
        return original(outputs, *args, **kwargs)
    finally:
        for listener in listeners:
            listener.backward_ended()


_listeners: Listeners[BackwardListener] = Listeners(_tell)


def _seen(outputs: Any, *args: Any) -> tuple[Sequence[int], Hashable, bool]:
    try:
        return _asked(outputs, *args)
    except Exception as error:  # arguments that torch will refuse, or of a newer torch
        return (), type(error).__name__, False


def _asked(
    outputs: Any, gradients: Any, keeps_graph: bool, makes_graph: bool, inputs: Any = (), *_: Any
) -> tuple[Sequence[int], Hashable, bool]:
    with disable_torch_function():
        nodes = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in outputs[:_MOST_OUTPUTS]]
    parameters = [id(t) if type(t) is torch.nn.Parameter else 0 for t in inputs or ()]
    numbers = [node._sequence_nr() for node in nodes if node is not None]
    return numbers, (len(outputs), makes_graph, *parameters), makes_graph
