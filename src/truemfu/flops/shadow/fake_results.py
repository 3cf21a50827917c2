"""Caches the results of operators on fake tensors, one per combination of shapes.

A model has few kinds of layers and many of each, so the same operator gets the same shapes again and again.
Torch's fake tensors have a cache too, but its lookup takes most of a count's time. Here only the plain case
is cached: dense tensors in, dense tensors out, each either new or a view of the first argument. Everything
else goes to torch every time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...torch_private.dispatch import FakeTensor, FakeTensorMode, dispatch_guard

_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_VALUE_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_Tensor = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]
_Plan = tuple[type | None, tuple[Any, ...]]


class FakeResults:
    """Runs operators under one fake mode, from the cache where possible."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode, self._guard = mode, dispatch_guard()
        self._plans: dict[Any, _Plan | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns."""
        views = _views(func)
        if views is None or self._guard is None:
            return func(*args, **kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]
        if not _describe(args, key, views) or not _describe(kwargs.values(), key, views):
            return func(*args, **kwargs)
        key.extend(kwargs)
        known = tuple(key)
        if known not in self._plans:
            out = func(*args, **kwargs)
            self._plans[known] = _plan(out, args, views)
            return out
        plan = self._plans[known]
        if plan is None:
            return func(*args, **kwargs)
        container, parts = plan
        made = [self._make(part, args[0], views) if type(part) is tuple else part for part in parts]
        return made[0] if container is None else container(made)

    def _make(self, part: _Tensor, base: torch.Tensor, views: bool) -> torch.Tensor:
        shape, stride, dtype, device, offset = part
        assert self._guard is not None
        guard = self._guard()
        try:
            if views:
                bare = torch.empty(0, dtype=dtype, device="meta")
                bare.set_(base.untyped_storage(), offset, shape, stride)
            else:
                bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        finally:
            del guard
        return FakeTensor(self._mode, bare, device)


@functools.cache
def _views(func: Any) -> bool | None:
    """Whether an operator's result is a view of its first argument; None if its results are not cached."""
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or _VALUE_TAGS & set(func.tags):
        return None
    aliases = [r.alias_info is not None for r in schema.returns]
    if not any(aliases):
        return False
    plain = len(aliases) == 1 and str(schema.returns[0].type) == "Tensor"
    return True if plain and schema.arguments[0].alias_info is not None else None


def _describe(arguments: Any, key: list[Any], views: bool) -> bool:
    """Add to the key everything a result can depend on; False if an argument is not of a cacheable type."""
    for argument in arguments:
        cls = type(argument)
        if cls is FakeTensor:
            dtype = argument.dtype
            plain = argument.layout is torch.strided and not dtype.is_complex and argument.constant is None
            if not plain or argument.is_neg():
                return False
            key.append(
                (argument.shape, argument.stride(), dtype, argument.fake_device, argument.requires_grad)
            )
            if views:
                key.append(argument.storage_offset())
        elif cls in _CONSTANTS:
            key.append((cls, argument))
        elif cls is list or cls is tuple:
            key.append(len(argument))
            if not _describe(argument, key, views):
                return False
        else:
            return False
    return True


def _plan(out: Any, args: tuple[Any, ...], views: bool) -> _Plan | None:
    """How to recreate this result; None if that takes more than shapes."""
    parts = list(out) if isinstance(out, (tuple, list)) else [out]
    planned: list[Any] = []
    for part in parts:
        if type(part) is FakeTensor:
            is_argument = any(part is argument for argument in args)
            if is_argument or not _is_dense(part) or _shares(part, args, parts) != (views, False):
                return None
            planned.append((part.shape, part.stride(), part.dtype, part.fake_device, part.storage_offset()))
        elif type(part) in (int, float, bool, type(None)):
            planned.append(part)
        else:
            return None
    return type(out) if isinstance(out, (tuple, list)) else None, tuple(planned)


def _is_dense(tensor: FakeTensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
        and not tensor.requires_grad
        and tensor.constant is None
    )


def _shares(part: FakeTensor, args: tuple[Any, ...], parts: list[Any]) -> tuple[bool, bool]:
    """Whether a result shares memory with the first argument, and with anything else."""
    memory = _memory(part)
    others = [*_tensors(args[1:]), *(other for other in _tensors(parts) if other is not part)]
    first = any(_memory(tensor) == memory for tensor in _tensors(args[:1]))
    return first, any(_memory(tensor) == memory for tensor in others)


def _memory(tensor: torch.Tensor) -> int | None:
    """The identity of a storage; None, the same for all, if torch has none, and then nothing is cached."""
    return getattr(tensor.untyped_storage(), "_cdata", None)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(_tensors(argument))
    return found
