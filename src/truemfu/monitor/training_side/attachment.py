"""A hook on a model that reports each forward pass to the monitor and can be removed completely."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...flops import unwrap
from ...torch_private.watching import CALL, compiled_call
from .batch_notes import Batch

_is_compiling = torch.compiler.is_compiling
"""Also true while a model is exported; dynamo traces it as true."""
_is_grad_enabled = torch.is_grad_enabled


class _BatchHook:
    """Before a forward pass: `seen` gets its batch if gradients are enabled.

    A batch that cannot be passed to the model by name alone or by position alone is seen as None. Copies of
    the model (an averaged one, a saved one) carry a hook that does nothing. So does compiled code, where a
    hook would become part of the graph.
    """

    _truemfu_skip = True

    def __init__(
        self, model: nn.Module, seen: Callable[[Batch | None], None], evaluated: Callable[[], None]
    ) -> None:
        self._seen, self._evaluated = seen, evaluated
        self._names = _positional_names(unwrap(model))

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_compiling():
            return
        if _is_grad_enabled():
            self._seen(self._batch(args, kwargs))
        else:
            self._evaluated()

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))  # loads where truemfu is not installed

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """The arguments of a forward pass as one batch."""
        if not args:
            return kwargs
        if self._names is not None and len(args) <= len(self._names):
            return {**dict(zip(self._names, args, strict=False)), **kwargs}
        return dict(enumerate(args)) if not kwargs else None


class Attachment:
    """A hook on a model: `seen` gets each training batch, `evaluated` is called without gradients.

    A model compiled by `Module.compile` calls no hook, or compiles it too. There the attribute in which torch
    stores the compiled call is wrapped; copies and saved models do not include that attribute.
    """

    def __init__(
        self, model: nn.Module, seen: Callable[[Batch | None], None], evaluated: Callable[[], None]
    ) -> None:
        self._model = weakref.ref(model)
        self._handle: Any = None
        self._compiled: Any = None
        self._watching: Any = None
        self._hook = _BatchHook(model, seen, evaluated)
        self._watch(model)

    def follow(self) -> bool:
        """Watch the compiled call of a model that was compiled since; whether it was."""
        model = self._model()
        if model is None or compiled_call(model) in (None, self._watching):
            return False
        self._leave(model)
        self._watch(model)
        return True

    def _watch(self, model: nn.Module) -> None:
        compiled = compiled_call(model)
        if compiled is None:
            self._handle = model.register_forward_pre_hook(self._hook, with_kwargs=True)
        else:
            self._compiled, self._watching = compiled, _watching(compiled, self._hook)
            model.__dict__[CALL] = self._watching

    def _leave(self, model: nn.Module) -> None:
        """Remove the hook or wrapper, unless other code has replaced it."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._watching is not None and compiled_call(model) is self._watching:
            model.__dict__[CALL] = self._compiled
        self._compiled = self._watching = None

    def remove(self) -> None:
        """Leave the model as it was."""
        model = self._model()
        if model is not None:
            self._leave(model)


def _watching(compiled: Callable[..., Any], hook: _BatchHook) -> Callable[..., Any]:
    """A compiled model's call with the hook before it, outside of the compiled code."""

    @functools.wraps(compiled)
    def watching(*args: Any, **kwargs: Any) -> Any:
        hook(None, args, kwargs)
        return compiled(*args, **kwargs)

    return watching


def _positional_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a forward's positional arguments; None if some have no name, or with *args."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except ValueError:  # a traced model's forward has no signature
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
