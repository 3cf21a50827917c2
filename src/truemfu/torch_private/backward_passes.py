"""The backward passes that Python code starts: which outputs, and gradients of what.

`Tensor.backward`, `autograd.backward` and `autograd.grad` share one function, for which torch has no hook: it
is replaced while there are listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from . import table
from .dispatch import disable_torch_function
from .find import ABSENT
from .replacing import Listeners

Listener = Callable[[Sequence[int], Hashable], None]
_MOST_OUTPUTS = 8


def listen(listener: Listener) -> Callable[[], None]:
    """Call the listener before each backward pass, on its thread; the returned function ends that.

    It gets the numbers of the outputs' autograd nodes, and what is equal for passes that ask for the same
    gradients. It must not raise.
    """
    if table.get(table.RUN_BACKWARD) is ABSENT:
        table.miss(table.RUN_BACKWARD)
        return lambda: None
    return _listeners.add(listener, torch.autograd, "_engine_run_backward")


def _tell(
    listeners: Sequence[Listener], original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    if not torch.compiler.is_compiling():
        numbers, asked = _seen(outputs, *args)
        for listener in listeners:
            listener(numbers, asked)
    return original(outputs, *args, **kwargs)


_listeners: Listeners[Listener] = Listeners(_tell)


def _seen(outputs: Any, *args: Any) -> tuple[Sequence[int], Hashable]:
    try:
        return _asked(outputs, *args)
    except Exception as error:  # arguments that torch will refuse, or of a newer torch
        return (), type(error).__name__


def _asked(
    outputs: Any, gradients: Any, keeps_graph: bool, makes_graph: bool, inputs: Any = (), *_: Any
) -> tuple[Sequence[int], Hashable]:
    with disable_torch_function():
        nodes = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in outputs[:_MOST_OUTPUTS]]
    parameters = [id(t) if type(t) is torch.nn.Parameter else 0 for t in inputs or ()]
    numbers = [node._sequence_nr() for node in nodes if node is not None]
    return numbers, (len(outputs), makes_graph, *parameters)
