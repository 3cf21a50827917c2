"""Operators that call others, run in the state of the dispatcher that they would have without a mode.

    program ─► autocast ─► autograd ─► views ─► the mode ─► kernel ─► other operators

Around a mode's handler torch excludes all that comes before it, so that a kernel run in there calls others
without autocast and without tracking views, unlike a kernel that no mode has seen. What was not yet done to
the operator when it came to the mode is allowed again. Inside `inference_mode` there is no autograd, which
would have divided operators that are made of others: the handler does so itself, with the same kernel. Not
seen: that the Python kernel of an operator has switched autocast off or on since.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from . import table
from .dispatch import OpOverload

_NAMES = (table.HAS_KERNEL, table.DISPATCH_ON_ENTRY, table.IS_EXCLUDED, table.EXCLUDE, table.DISPATCH_KEY)
_has_kernel, _on_entry, _is_excluded, _exclude, _Key = map(table.get, _NAMES)
_call_stack, _symbols = table.get(table.CALL_STACK), table.get(table.SYMBOLS)
_state = threading.local()
_COMPOSITE, _VIEWS = "CompositeImplicitAutograd", "ADInplaceOrView"
_LEAVES = (torch.Tag.core, torch.Tag.pointwise)
_HARMLESS = frozenset(
    f"aten::{name}"
    for name in (
        "_safe_softmax",
        "_unsafe_view",
        "as_strided_",
        "copy_",
        "empty_like",
        "index_put",
        "index_put_",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randn_like",
        "sum",
        "zeros_like",
    )
)
"""Frequent operators that call none which autocast handles, or are called by such alone (`_safe_softmax`):
the call stack takes time to read, and the first time half a second."""
_AS_IT_IS = contextlib.nullcontext()


def is_undivided(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is made of others and reaches a mode as one, on plain tensors."""
    if not torch.is_inference_mode_enabled() or not _is_known(func):
        return False
    try:
        tensors = list(_tensors(args))
        devices = {tensor.device.type for tensor in tensors}
        return len(devices) == 1 and all(map(_is_plain, tensors)) and _is_composite(func, *devices)
    except Exception:  # the program's operator goes on
        return False


def divided(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run such an operator; a mode on the stack sees those that it is made of."""
    with _AsCalled(func, args, is_divided=True):
        return func._op_dk(getattr(_Key, _COMPOSITE), *args, **kwargs)


def as_called(func: Any, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """The state in which any other operator runs; no mode sees what it calls."""
    return _AsCalled(func, args, is_divided=False) if _may_call_others(func) else _AS_IT_IS


class _AsCalled:
    """A failure in here is none of the program's operator, which runs in the state as it is then."""

    def __init__(self, func: Any, args: Sequence[Any], *, is_divided: bool) -> None:
        self._func, self._args, self._is_divided = func, args, is_divided
        self._was_cast: bool = getattr(_state, "is_cast", False)
        self._guards: list[Any] = []

    def __enter__(self) -> None:
        is_cast = True
        try:
            allowed, is_cast = _allowed(self._func, self._args, was_cast=self._was_cast)
            for key in allowed:
                guard = _exclude(getattr(_Key, key), False)
                guard.__enter__()
                self._guards.append(guard)
        except Exception:
            self._leave()
        _state.is_cast = is_cast and self._is_divided

    def __exit__(self, *_: object) -> None:
        self._leave()
        _state.is_cast = self._was_cast

    def _leave(self) -> None:
        while self._guards:
            self._guards.pop().__exit__(None, None, None)


def _allowed(func: Any, args: Sequence[Any], *, was_cast: bool) -> tuple[set[str], bool]:
    """The keys that apply to what an operator calls, and whether autocast is done or off."""
    casts = {f"Autocast{tensor.device.type.upper()}" for tensor in _tensors(args)}
    with_autograd = not torch.is_inference_mode_enabled()  # it excludes views
    keys = {key for key in (casts if with_autograd else casts | {_VIEWS}) if hasattr(_Key, key)}
    with _on_entry():
        allowed = {key for key in keys if not _is_excluded(getattr(_Key, key)) and not _has(func, key)}
    if allowed and not with_autograd and _is_inside_a_handler():
        allowed.clear()
    is_cast = was_cast or not casts & allowed
    if not is_cast and with_autograd:
        has_own_kernel = any(_has(func, key[len("Autocast") :]) for key in casts)
        is_cast = _is_inside_a_handler() if has_own_kernel else _is_inside_autocast()
    return allowed - casts if is_cast else allowed, is_cast


def _is_inside_a_handler() -> bool:
    """Whether the handler of another mode has called this operator: it excludes the same."""
    handlers, frame = set(), sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "__torch_dispatch__":
            handlers.add(frame.f_code)
    return len(handlers) > 1


def _is_inside_autocast() -> bool:
    """Whether a kernel of autocast or the handler of another mode has called this operator.

    Only the call stack tells, with autograd: what autocast has handled may have been divided since. Not every
    build of torch names these kernels there, but each calls the same operator again, with none in between.
    """
    if _is_inside_a_handler():
        return True
    try:
        names = [frame["name"] for frame in _symbols([_call_stack(False, False, True)])[0]]
    except Exception:  # torch cannot read the call stack everywhere
        for path in (table.CALL_STACK, table.SYMBOLS):
            table.has(path)
        return True
    if sum("pythonFallback" in name for name in names) > 1:  # a handler by another name in Python
        return True
    calls = [name for name in names if name.startswith("at::_ops::")]
    calls_again = any(inner == outer and "::call(" in inner for inner, outer in pairwise(calls))
    is_named = any(name.startswith("torch::") for name in names)
    return not is_named or calls_again or any("at::autocast::" in name for name in names)


@functools.cache
def _may_call_others(func: Any) -> bool:
    try:
        may_call = _is_known(func) and not func.is_view and func.name() not in _HARMLESS
        return may_call and not any(tag in func.tags for tag in _LEAVES)
    except Exception:  # the program's operator goes on
        return False


def _is_known(func: Any) -> bool:
    return _is_complete() and isinstance(func, OpOverload)


@functools.cache
def _is_complete() -> bool:
    """Whether torch has all names that this needs."""
    return all(map(table.has, _NAMES))


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether no kernel for another layout takes precedence."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


@functools.cache
def _is_composite(func: Any, device: str) -> bool:
    is_composite = _has(func, _COMPOSITE) and hasattr(func, "_op_dk")
    return is_composite and not _has(func, device.upper())


@functools.cache
def _has(func: Any, key: str) -> bool:
    try:
        return bool(_has_kernel(func.name(), key))
    except RuntimeError:  # an operator of TorchScript only, or no such key
        return False
