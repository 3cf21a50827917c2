"""When a thread switches gradients off or on, and whether torch's clipping does so.

torch has no hook for that: the two classes that switch are changed while there is a listener. `no_grad` and
torch's own decorators switch gradients through `set_grad_enabled`; `enable_grad` does not, and is not seen.
torch's functions that measure and clip gradients begin by switching them off, whatever name they are called
by. They are not replaced themselves: compiled code is guarded by the functions it calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils.clip_grad import clip_grad_norm_

from . import table
from .replacing import Listeners

_SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.set_grad_enabled, "__init__"),
    (torch.set_grad_enabled, "__call__"),
    (torch.set_grad_enabled, "__enter__"),
    (torch.set_grad_enabled, "__exit__"),
    (torch.inference_mode, "__enter__"),
    (torch.inference_mode, "__exit__"),
)
_CLIPPING = clip_grad_norm_.__code__
"""The code around all functions of that module, which calls them without gradients."""
_NO_GRAD = torch.no_grad.__enter__.__code__
_MOST_FRAMES = 6
_are_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling


_set_compiler: Callable[[Any], Any] = table.get_or(table.SET_EVAL_FRAME, lambda callback: None)
"""Lets dynamo compile Python code with this callback, None: not at all; returns the one before."""


class PhaseListener(Protocol):
    """Called on the thread that does it; must not raise."""

    def gradients_switched(self, *, are_enabled: bool, is_clipping: bool) -> None:
        """Gradients were disabled, by clipping or not, or enabled again."""


def listen(listener: PhaseListener) -> Callable[[], None]:
    """Call the listener from now on; the returned function ends that."""
    table.has(table.SET_EVAL_FRAME)
    leave = contextlib.ExitStack()
    for (owner, name), listeners in _listeners.items():
        leave.callback(listeners.add(listener, owner, name))
    return leave.close


def _switch(
    listeners: Iterable[PhaseListener], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    before = _are_enabled()
    result = original(*args, **kwargs)
    after = _are_enabled()
    if after != before and not _is_compiling():
        compiler = _set_compiler(None)  # after a graph break dynamo would compile the listeners
        try:
            is_clipping = not after and _is_called_by_clipping()
            for listener in listeners:
                listener.gradients_switched(are_enabled=after, is_clipping=is_clipping)
        finally:
            _set_compiler(compiler)
    return result


_listeners: dict[tuple[Any, str], Listeners[PhaseListener]] = {
    place: Listeners(_switch) for place in _SWITCHES
}


def _is_called_by_clipping() -> bool:
    """Whether the `no_grad` that switches, a few frames below, is the one of torch's clipping."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code is _NO_GRAD:
            return frame.f_back is not None and frame.f_back.f_code is _CLIPPING
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
