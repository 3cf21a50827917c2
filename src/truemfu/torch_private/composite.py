"""Operators that are made of others, inside `inference_mode`: there torch hands them to a mode undivided.

With autograd they are divided before a mode sees them. Without it the mode has to do so itself, with the same
kernel and in the same state of the dispatcher as without a mode: then the result is the same to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from . import table
from .dispatch import OpOverload
from .find import ABSENT

_NAMES = (table.HAS_KERNEL, table.DISPATCH_ON_ENTRY, table.IS_EXCLUDED, table.EXCLUDE, table.DISPATCH_KEY)
_has_kernel, _on_entry, _is_excluded, _exclude, _Key = map(table.get, _NAMES)
_is_complete = ABSENT not in (_has_kernel, _on_entry, _is_excluded, _exclude, _Key)
_state = threading.local()
_COMPOSITE = "CompositeImplicitAutograd"


def is_undivided(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is made of others and reaches a mode as one, on plain tensors."""
    if not torch.is_inference_mode_enabled() or not isinstance(func, OpOverload):
        return False
    if not _is_complete:
        table.miss(next(path for path in _NAMES if table.get(path) is ABSENT))
        return False
    devices = {tensor.device.type if _is_plain(tensor) else None for tensor in _tensors(args)}
    return len(devices) == 1 and None not in devices and _is_composite(func, next(iter(devices)) or "")


def divided(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Run such an operator; a mode on the stack sees those that it is made of."""
    device, key = next(_tensors(args)).device.type, getattr(_Key, _COMPOSITE)
    cast, was_cast = f"Autocast{device.upper()}", getattr(_state, "is_cast", False)
    is_cast = was_cast or _has(func, cast) or not hasattr(_Key, cast)  # autocast does not apply inside
    if not is_cast:
        with _on_entry():  # in the mode it is excluded
            is_cast = _is_excluded(getattr(_Key, cast))
    _state.is_cast = is_cast
    try:
        with contextlib.nullcontext() if is_cast else _exclude(getattr(_Key, cast), False):
            return func._op_dk(key, *args, **kwargs)
    finally:
        _state.is_cast = was_cast


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
