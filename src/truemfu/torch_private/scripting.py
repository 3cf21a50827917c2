"""`torch.jit.script` and `torch.jit.trace` of an observed model: they get the model without our hooks.

Both would compile every hook of a module into the result. They pass each model to one function of torch,
which is wrapped here, once, when the first model is observed: our hooks are not there while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from . import table
from .replacing import replace_named


@functools.cache
def script_without(is_ours: Callable[[Any], bool]) -> None:
    """From now on models are scripted and traced without the forward hooks for which `is_ours` holds."""

    def create(original: Any, nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        with _hidden(nn_module, is_ours):
            return original(nn_module, *args, **kwargs)

    if table.has(table.SCRIPT_MODULE):
        replace_named(table.SCRIPT_MODULE, create)


@contextlib.contextmanager
def _hidden(model: nn.Module, is_ours: Callable[[Any], bool]) -> Iterator[None]:
    """Remove our hooks from a model and everything in it, and put them back in their old places."""
    before = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        if any(map(is_ours, hooks.values()))
    ]
    for hooks, all_hooks in before:
        for key, hook in all_hooks.items():
            if is_ours(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in before:
            added = {key: hook for key, hook in hooks.items() if key not in all_hooks}
            hooks.clear()
            hooks.update(all_hooks | added)
