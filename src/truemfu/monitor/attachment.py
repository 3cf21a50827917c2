"""Hooks on a model: what tells the monitor of each forward pass, and leaves no trace behind.

model(batch) ──► batch hook ──► a usual micro-batch: counted ──► forward pass ──► end hook, on demand
                            └─► any other: noted
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..flops.shadow import unwrap
from .observe import Batch, is_grad_enabled

_is_traced = torch.compiler.is_dynamo_compiling
"""Which dynamo takes for true; outside of it this asks nothing of torch."""
_is_compiling = torch.compiler.is_compiling


class _Hook:
    """Calls the monitor around a forward pass.

    Copies of the model (an averaged one, a saved one) carry a hook that does nothing. So does compiled code,
    where a hook would become part of the graph.
    """

    _truemfu_skip = True

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))  # loads where truemfu is not installed


class _BatchHook(_Hook):
    """Before a forward pass: `seen` gets its batch if it is one of training and none of the usual ones.

    A batch that cannot be given back to the model by name or by place alone is seen as None.
    """

    def __init__(
        self,
        is_usual: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        seen: Callable[[Batch | None], None],
        names: tuple[str, ...] | None,
    ) -> None:
        self._is_usual, self.seen, self._names = is_usual, seen, names
        self._places = 0
        """How many arguments the last batch that was seen had by place."""

    def __call__(self, _: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_traced() or (len(args) == self._places and self._is_usual(args, kwargs)):
            return
        if _is_compiling() or not is_grad_enabled():
            return  # an evaluation is no training step
        self._places = len(args)
        if not args:
            self.seen(kwargs)
        elif self._names is not None and len(args) <= len(self._names):
            self.seen({**dict(zip(self._names, args, strict=False)), **kwargs})
        else:
            self.seen(dict(enumerate(args)) if not kwargs else None)


class _EndHook(_Hook):
    """After a forward pass."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not _is_compiling():
            self._ended()


class Attachment:
    """Hooks on a model: `seen` gets each training batch unless it `is_usual`, `ended` is told when a forward
    pass is over.

    Only a count that runs in the background asks when a forward pass ends, so that hook is there on demand.
    """

    def __init__(
        self,
        model: nn.Module,
        is_usual: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        seen: Callable[[Batch | None], None],
        ended: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._ended = ended
        self._end_hook: Any = None
        hook = self.batch_hook = _BatchHook(is_usual, seen, _positional_names(unwrap(model)))
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is None:
            self._undo = model.register_forward_pre_hook(hook, with_kwargs=True).remove
        else:  # model.compile(): its hooks are compiled with it, so watch the call from outside

            @functools.wraps(compiled)
            def watched(*args: Any, **kwargs: Any) -> Any:
                hook(None, args, kwargs)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self._ended()

            model.__dict__["_compiled_call_impl"] = watched
            self._undo = functools.partial(model.__dict__.__setitem__, "_compiled_call_impl", compiled)

    def tell_ends(self, wanted: bool) -> None:
        """Say, from now on or no more, when a forward pass ends."""
        if wanted and self._end_hook is None:
            model = self._model()
            if model is not None and "_compiled_call_impl" not in model.__dict__:
                self._end_hook = model.register_forward_hook(_EndHook(self._ended), always_call=True)
        elif not wanted and self._end_hook is not None:
            self._end_hook.remove()
            self._end_hook = None

    def remove(self) -> None:
        """Leave the model as it was."""
        self.tell_ends(False)
        self._undo()


def _positional_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a forward's positional arguments; None where they have none, or any number."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except ValueError:  # a traced model's forward tells nothing
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
