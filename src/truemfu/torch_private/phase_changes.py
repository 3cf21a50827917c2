"""When a thread switches gradients off or on, and whether torch's clipping does so.

torch has no hook for that: the two classes that switch are changed while there is a listener. `no_grad` and
torch's own decorators switch gradients through `set_grad_enabled`; `enable_grad` does not, and is not seen.
torch's functions that measure and clip gradients begin by switching them off, whatever name they are called
by. They are not replaced themselves: compiled code is guarded by the functions it calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.utils.clip_grad import clip_grad_norm_

from .replacing import replace

_SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.set_grad_enabled, "__init__"),
    (torch.set_grad_enabled, "__exit__"),
    (torch.inference_mode, "__enter__"),
    (torch.inference_mode, "__exit__"),
)
_CLIPPING = clip_grad_norm_.__code__
"""The code around all functions of that module, which calls them without gradients."""


class PhaseListener(Protocol):
    """Called on the thread that does it; must not raise."""

    def gradients_switched(self, *, are_enabled: bool, is_clipping: bool) -> None:
        """Gradients were disabled, by clipping or not, or enabled again."""


def listen(listener: PhaseListener) -> Callable[[], None]:
    """Call the listener from now on; the returned function ends that."""

    def switch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        result = original(*args, **kwargs)
        after = torch.is_grad_enabled()
        if after != before and not torch.compiler.is_compiling():
            # below are this function, its replacement, `no_grad.__enter__` and its caller
            caller = sys._getframe(2).f_back
            listener.gradients_switched(
                are_enabled=after, is_clipping=caller is not None and caller.f_code is _CLIPPING
            )
        return result

    leave = contextlib.ExitStack()
    for owner, name in _SWITCHES:
        leave.callback(replace(owner, name, switch))
    return leave.close
