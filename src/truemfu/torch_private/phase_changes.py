"""When a thread switches gradients off or on, and when it clips gradients.

torch has no hooks for these: its functions are replaced while there is a listener. `no_grad` and torch's own
decorators switch gradients through `set_grad_enabled`; `enable_grad` does not, and is not seen. A script may
have imported `clip_grad_norm_` by name before it was replaced, so the two functions in it are replaced too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from . import table
from .find import ABSENT
from .replacing import replace

_SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.set_grad_enabled, "__init__"),
    (torch.set_grad_enabled, "__exit__"),
    (torch.inference_mode, "__enter__"),
    (torch.inference_mode, "__exit__"),
)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


class PhaseListener(Protocol):
    """Called on the thread that does it; must not raise."""

    def gradients_switched(self, *, are_enabled: bool) -> None:
        """Gradients were disabled, or enabled again."""

    def clipping_begins(self) -> bool:
        """Gradients are measured or clipped; whether the end of that is to be told."""

    def clipping_ended(self) -> None:
        """That has returned, or raised."""


def listen(listener: PhaseListener) -> Callable[[], None]:
    """Call the listener from now on; the returned function ends that."""

    def switch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        result = original(*args, **kwargs)
        after = torch.is_grad_enabled()
        if after != before and not torch.compiler.is_compiling():
            listener.gradients_switched(are_enabled=after)
        return result

    def clip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not listener.clipping_begins():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            listener.clipping_ended()

    leave = contextlib.ExitStack()
    for owner, name in _SWITCHES:
        leave.callback(replace(owner, name, switch))
    for path in (table.TOTAL_NORM, table.CLIP_WITH_NORM):
        if table.get(path) is ABSENT:
            table.miss(path)
        else:
            leave.callback(replace(clip_grad, path.partition(":")[2], clip))
    for name in _CLIPPING:
        if hasattr(utils, name):
            leave.callback(replace(utils, name, clip))
    return leave.close
