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
from torch.fx import Proxy

from ...flops import unwrap
from ...torch_private.scripting import script_without
from ...torch_private.watching import CALL, compiled_call
from .batch_notes import Batch

_is_compiling = torch.compiler.is_compiling
"""Also true while a model is exported; dynamo traces it as true."""
_is_grad_enabled = torch.is_grad_enabled
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class _Hook:
    """Copies of the model (an averaged one, a saved one) carry a hook that does nothing."""

    _truemfu_skip = True

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))  # loads where truemfu is not installed


def _is_our_hook(hook: Any) -> bool:
    """Whether this is a hook of a monitor, or what a copy or a loaded model has in its place."""
    return isinstance(hook, _Hook) or type(getattr(hook, "__self__", None)) is contextlib.nullcontext


class _BatchHook(_Hook):
    """Before a forward pass: `seen` gets its batch if gradients are enabled, else `evaluated` does.

    Each returns whether `ended` is to be called after this forward pass.

    A batch that cannot be passed to the model by name alone or by position alone is seen as None. While the
    model is compiled, exported or traced, a hook would become part of the graph: it does nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Callable[[Batch | None], bool],
        evaluated: Callable[[Batch | None], bool],
        ended: Callable[[], None] | None,
    ) -> None:
        self._seen, self._evaluated, self._ended = seen, evaluated, ended
        self._names = _positional_names(unwrap(model))

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _is_compiling():
            try:
                self._tell(module, args, kwargs)
            except Exception:  # not for the training: this forward pass has no batch that can be read
                self._seen(None)

    def _tell(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_tracing() or _has_proxies(args, kwargs):
            return
        begins = self._seen if _is_grad_enabled() else self._evaluated
        wants_end = begins(self._batch(args, kwargs))
        if wants_end and module is not None and self._ended is not None:
            try:
                _EndHook(self._ended).add(module)
            except Exception:  # no error of ours reaches the training: the end is told now
                self._ended()

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """The arguments of a forward pass as one batch."""
        if not args:
            return kwargs
        if self._names is not None and len(args) <= len(self._names):
            return {**dict(zip(self._names, args, strict=False)), **kwargs}
        return dict(enumerate(args)) if not kwargs else None


class _EndHook(_Hook):
    """After a forward pass, also one that raises: `ended` is called; what `add` added is gone then."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._handle: Any = None

    def add(self, module: nn.Module) -> None:
        """Hook the forward pass of this module that is about to begin."""
        self._handle = module.register_forward_hook(self, always_call=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _is_compiling():
            return
        try:
            if self._handle is not None:
                self._handle.remove()
            is_tracing = _is_tracing()
        except Exception:  # not for the training: the forward pass has ended all the same
            is_tracing = False
        if not is_tracing:
            self._ended()


class Attachment:
    """A hook on a model: `seen` gets each training batch, `evaluated` those of passes without gradients.

    `ended` is called after forward passes for which these returned True, and `returned` after all that raised
    nothing; without `returned`, `ended` is called after all. A model compiled by `Module.compile` calls no
    hook, or compiles it too. There the attribute in which torch stores the compiled call is wrapped; copies
    and saved models do not include that attribute.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Callable[[Batch | None], bool],
        evaluated: Callable[[Batch | None], bool],
        ended: Callable[[], None],
        returned: Callable[[], None] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._handles: list[Any] = []
        self._compiled: Any = None
        self._watching: Any = None
        self._hook = _BatchHook(model, seen, evaluated, None if returned is None else ended)
        self._ended, self._returned = ended, returned
        script_without(_is_our_hook)
        self._watch(model)

    def add(self) -> None:
        """Watch the model again after `remove`."""
        model = self._model()
        if model is not None:
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
            self._handles.append(model.register_forward_pre_hook(self._hook, with_kwargs=True))
            if self._returned is None:
                end_hook = _EndHook(self._ended)
                self._handles.append(model.register_forward_hook(end_hook, always_call=True))
            else:
                # Not one that is always called: torch.compile would compile again when it is added again.
                # Always one: since torch 2.15 a model is compiled again when it gets its first one.
                self._handles.append(model.register_forward_hook(_EndHook(self._returned)))
        else:
            self._compiled, self._watching = compiled, _watching(compiled, self._hook, self._ended)
            model.__dict__[CALL] = self._watching

    def _leave(self, model: nn.Module) -> None:
        """Remove the hook or wrapper, unless other code has replaced it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._watching is not None and compiled_call(model) is self._watching:
            model.__dict__[CALL] = self._compiled
        self._compiled = self._watching = None

    def remove(self) -> None:
        """Leave the model as it was."""
        model = self._model()
        if model is not None:
            self._leave(model)


def _watching(
    compiled: Callable[..., Any], hook: _BatchHook, ended: Callable[[], None]
) -> Callable[..., Any]:
    """A compiled model's call with the hooks around it, outside of the compiled code."""

    @functools.wraps(compiled)
    def watching(*args: Any, **kwargs: Any) -> Any:
        hook(None, args, kwargs)
        try:
            return compiled(*args, **kwargs)
        finally:
            if not _is_compiling():
                ended()

    return watching


def _has_proxies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.fx` traces this forward pass."""
    return any(issubclass(type(value), Proxy) for value in (*args, *kwargs.values()))


def _positional_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a forward's positional arguments; None if some have no name, or with *args."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except ValueError:  # a traced model's forward has no signature
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
