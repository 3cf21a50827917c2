"""Hooks on a model: what tells the monitor of each forward pass, and leaves no trace behind.

model(batch) ──► batch hook ──► a usual micro-batch: kept ──► forward pass
                            └─► any other: noted
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..flops.shadow import is_compiled_wrapper, unwrap
from ..torch_private.watching import (
    CALL,
    backward_number,
    can_replace_call,
    compiled_call,
    functorch_level,
    is_any_autocast,
)
from .observe import Batch, is_grad_enabled

_is_traced = torch.compiler.is_dynamo_compiling
"""Which dynamo takes for true; outside of it this asks nothing of torch."""
_is_compiling = torch.compiler.is_compiling
Keep = Callable[[tuple[float, tuple[Any, ...], dict[str, Any]]], None]
"""Takes a micro-batch as it came, and when."""
_now_s = time.perf_counter


class _BatchHook:
    """Before a forward pass: `seen` gets its batch if it is one of training and none of the usual ones.

    A batch that cannot be given back to the model by name or by place alone is seen as None. Copies of the
    model (an averaged one, a saved one) carry a hook that does nothing. So does compiled code, where a hook
    would become part of the graph.
    """

    _truemfu_skip = True

    def __init__(
        self,
        model: nn.Module,
        is_usual: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        seen: Callable[[Batch | None], None],
        evaluated: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._is_usual, self.seen, self._names = is_usual, seen, _positional_names(unwrap(model))
        self.evaluated = evaluated
        """Called for each forward pass without gradients."""
        self.places = 0
        """How many arguments the last batch that was seen had by place."""
        self.is_shared = False
        """Whether it came along with a copy of the model's attributes, as those of DataParallel do."""

    def __call__(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_traced() or self._is_usual(args, kwargs):
            return
        if module is not None and module is not self._model():
            self.is_shared = True
        if _is_compiling():
            return
        if not is_grad_enabled():
            self.evaluated()
            return
        self.places = len(args)
        self.seen(self.batch_of(args, kwargs))

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))  # loads where truemfu is not installed

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
        """The arguments of a forward pass as one batch."""
        if not args:
            return kwargs
        if self._names is not None and len(args) <= len(self._names):
            return {**dict(zip(self._names, args, strict=False)), **kwargs}
        return dict(enumerate(args)) if not kwargs else None


class Attachment:
    """Hooks on a model: `seen` gets each training batch unless it `is_usual`.

    A model that has any hook takes a longer way through torch with every call. So while batches are usual
    and need only be kept, that is done from outside, in the place where torch has what `Module.compile` made
    of a model, and which copies and saved models leave out. A model that is compiled is always watched there:
    hooks would be compiled with it.
    """

    def __init__(
        self,
        model: nn.Module,
        is_usual: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        seen: Callable[[Batch | None], None],
        keep: Keep,
        autocast: list[bool],
        evaluated: Callable[[], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._keep, self._autocast = keep, autocast
        self._handle: Any = None
        self._compiled: Any = None
        self._watching: Any = None
        self._is_keeping = False
        self.batch_hook = _BatchHook(model, is_usual, seen, evaluated)
        self._keeping = _keeping(model, self.batch_hook, keep, autocast)
        self._watch(model)

    @property
    def is_compiled(self) -> bool:
        """Whether what is watched was compiled, as far as it is known."""
        return self._compiled is not None or is_compiled_wrapper(self._model())

    def follow(self) -> bool:
        """Watch the model where it is called now; whether it was compiled since it was last watched."""
        model = self._model()
        if model is None:
            return False
        call = compiled_call(model)
        if call is None or call is self._watching or call is self._keeping:
            return False
        self._leave(model)
        self._watch(model)
        return True

    def keep_only(self, wanted: bool) -> None:
        """Only keep training batches and tell nobody, from now on or no more; if the model allows for it."""
        model = self._model()
        if wanted == self._is_keeping or model is None:
            return
        if not wanted:
            self._leave(model)
            self._watch(model, first=True)
        elif compiled_call(model) is not self._watching:
            return  # it was compiled meanwhile
        elif self._compiled is not None or (
            _can_be_watched_from_outside(model) and not self.batch_hook.is_shared
        ):
            self._leave(model)
            model.__dict__[CALL] = self._keeping
            self._is_keeping = True

    def _watch(self, model: nn.Module, *, first: bool = False) -> None:
        """Tell of each batch, by a hook behind those there are, or before them."""
        compiled = compiled_call(model)
        if compiled is not self._compiled:
            self._compiled, self._watching = compiled, None
            self._keeping = _keeping(model, self.batch_hook, self._keep, self._autocast)
            if compiled is not None:
                self._keeping = _keeping_compiled(compiled, self.batch_hook, self._keep, self._autocast)
                self._watching = _watching(compiled, self.batch_hook)
        if compiled is not None:
            model.__dict__[CALL] = self._watching
        else:
            self._handle = model.register_forward_pre_hook(self.batch_hook, with_kwargs=True, prepend=first)

    def _leave(self, model: nn.Module) -> None:
        """Let the model be called as if nobody watched; what somebody else has put there stays."""
        self._is_keeping = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        call = compiled_call(model)
        if call is not None and call in (self._keeping, self._watching):
            del model.__dict__[CALL]
            if self._compiled is not None:
                model.__dict__[CALL] = self._compiled

    def remove(self) -> None:
        """Leave the model as it was."""
        model = self._model()
        if model is not None:
            self._leave(model)


def _keeping(model: nn.Module, hook: _BatchHook, keep: Keep, autocast: list[bool]) -> Callable[..., Any]:
    """What torch does when the model is called, with each batch of training kept; keeps no model alive.

    In a launch-bound run each call of a function costs a microsecond or more, so this calls as few as it can.
    What is not simply a forward pass like the last goes to the hook at once.
    """
    call: Any = getattr(type(model), "_call_impl", None)  # where there is none, this is not used
    known = weakref.ref(model)

    def keeping(*args: Any, **kwargs: Any) -> Any:
        if _is_traced():
            pass
        elif not is_grad_enabled():
            hook.evaluated()
        elif backward_number() == -1 and functorch_level() is None and is_any_autocast() is autocast[0]:
            keep((_now_s(), args, kwargs))
        else:
            hook(None, args, kwargs)
        return call(known(), *args, **kwargs)

    return keeping


def _keeping_compiled(
    compiled: Callable[..., Any], hook: _BatchHook, keep: Keep, autocast: list[bool]
) -> Callable[..., Any]:
    """The same for a model that is compiled."""

    @functools.wraps(compiled)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            hook.evaluated()
        elif backward_number() == -1 and functorch_level() is None and is_any_autocast() is autocast[0]:
            keep((_now_s(), args, kwargs))
        else:
            hook(None, args, kwargs)
        return compiled(*args, **kwargs)

    return keeping


def _watching(compiled: Callable[..., Any], hook: _BatchHook) -> Callable[..., Any]:
    """The call of a model that is compiled, whose hooks would be compiled with it."""

    @functools.wraps(compiled)
    def watching(*args: Any, **kwargs: Any) -> Any:
        hook(None, args, kwargs)
        return compiled(*args, **kwargs)

    return watching


def _can_be_watched_from_outside(model: nn.Module) -> bool:
    """Whether a call of the model is torch's own, with no other hook before it, and so is making a copy.

    A copy that took what stands for the model's call along would call the model; DataParallel makes such.
    """
    if torch.cuda.device_count() > 1 and not (dist.is_available() and dist.is_initialized()):
        return False
    if not is_compiled_wrapper(model):
        kind = type(model)
        own = (kind.__call__, kind.__getstate__, kind.__reduce__, kind.__reduce_ex__)
        of_torch = (nn.Module.__call__, nn.Module.__getstate__, object.__reduce__, object.__reduce_ex__)
        if own != of_torch or hasattr(kind, "__deepcopy__") or hasattr(kind, "__copy__"):
            return False
    return len(model._forward_pre_hooks) == 1 and can_replace_call()


def _positional_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of a forward's positional arguments; None where they have none, or any number."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except ValueError:  # a traced model's forward tells nothing
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
