"""The backward passes that Python code starts: which outputs, and gradients of what.

`Tensor.backward`, `autograd.backward` and `autograd.grad` share one function, for which torch has no hook. It
is replaced while there are listeners, and restored afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from . import table
from .dispatch import disable_torch_function
from .find import ABSENT

Listener = Callable[[Sequence[int], Hashable], None]
_MOST_OUTPUTS = 8
_listeners: tuple[Listener, ...] = ()
_ours: Any = None
_original: Any = None


def listen(listener: Listener) -> Callable[[], None]:
    """Call the listener before each backward pass, on its thread; the returned function ends that.

    It gets the numbers of the outputs' autograd nodes, and what is equal for passes that ask for the same
    gradients. It must not raise.
    """
    global _listeners, _ours, _original
    found = table.get(table.RUN_BACKWARD)
    if found is ABSENT:
        table.miss(table.RUN_BACKWARD)
        return lambda: None
    if not _listeners and found is not _ours:  # ours is still there if it could not be restored
        _original, _ours = found, _with_listeners(found)
        torch.autograd._engine_run_backward = _ours  # type: ignore[attr-defined]
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners, _ours
        _listeners = tuple(other for other in _listeners if other is not listener)
        if not _listeners and table.get(table.RUN_BACKWARD) is _ours:  # else other code has wrapped ours
            torch.autograd._engine_run_backward = _original  # type: ignore[attr-defined]
            _ours = None

    return stop


def _with_listeners(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _listeners and not torch.compiler.is_compiling():
            numbers, asked = _seen(outputs, *args)
            for listener in _listeners:
                listener(numbers, asked)
        return original(outputs, *args, **kwargs)

    return run_backward


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
