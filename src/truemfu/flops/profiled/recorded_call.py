"""One operator recorded by torch.profiler, converted back to a call that a formula can be applied to.

The profiler records sizes and dtypes of tensors and the values of numbers; here they become the operator's
arguments by name, with tensors on the meta device instead of the real ones. It does not record results: if a
formula reads one, the operator runs on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ...torch_private.profiling import is_decomposed, schemas_of


def is_tensor(recorded: Any) -> bool:
    """Whether a recorded argument represents a tensor."""
    return hasattr(recorded, "storage_data_ptr")


def tensors_of(inputs: Sequence[Any]) -> list[Any]:
    """The recorded tensors among recorded arguments, those in lists included."""
    flat = (t for i in inputs for t in (i if isinstance(i, list) else [i]))
    return [t for t in flat if is_tensor(t)]


def has_data(inputs: Sequence[Any]) -> bool:
    """Whether an operator ran on tensors with memory.

    It did not if a compiler traced it, if a model is on the meta device, or if a tensor is only a wrapper
    (DTensor, vmap, quantised weights), whose real operators are recorded below it.
    """
    return all(t.storage_data_ptr is not None or prod(t.sizes) == 0 for t in tensors_of(inputs))


def meta_argument(recorded: Any) -> Any:
    """A tensor of the recorded size and dtype on the meta device; anything else unchanged."""
    if is_tensor(recorded):
        return torch.empty(recorded.sizes, dtype=recorded.dtype, device="meta")
    return [meta_argument(r) for r in recorded] if isinstance(recorded, list) else recorded


@lru_cache(maxsize=4096)
def is_composite(name: str, arguments: int) -> bool:
    """Whether this call is decomposed into other operators before autograd, which are then recorded."""
    overloads = [s.overload_name for s in schemas_of(name) if len(s.arguments) == arguments]
    return any(is_decomposed(f"{name}.{overload}".rstrip(".")) for overload in overloads)


class RecordedCall:
    """A recorded operator and its arguments.

    `inputs` are those of the profiler's event tree, which omits lists of numbers; `lists` returns the
    arguments with only these lists.
    """

    def __init__(self, name: str, inputs: Sequence[Any], lists: Callable[[], Sequence[Any]]) -> None:
        self.name = name
        self._schema = next((s for s in schemas_of(name) if _fits(s, inputs)), None)
        values = [meta_argument(i) for i in inputs]
        if self._schema is not None and any(
            value is None and "List" in str(argument.type)
            for value, argument in zip(values, self._schema.arguments, strict=True)
        ):
            values = [
                concrete if value is None and isinstance(concrete, list) else value
                for value, concrete in zip(values, lists(), strict=False)
            ]
        self._values = values

    @property
    def schema(self) -> Any:
        """That of the overload that was called; None if none fits."""
        return self._schema

    @property
    def operands(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments as a caller writes them, without defaults."""
        if self._schema is None:
            return self._values, {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument, value in zip(self._schema.arguments, self._values, strict=True):
            if argument.is_out:
                continue
            if not argument.kwarg_only:
                args.append(value)
            elif not _is_default(argument, value):
                kwargs[argument.name] = value
        positional = [a for a in self._schema.arguments if not a.kwarg_only and not a.is_out]
        while args and _is_default(positional[len(args) - 1], args[-1]):
            args.pop()
        return args, kwargs

    def result(self) -> Any:
        """The operator's result, on the meta device."""
        assert self._schema is not None
        library, _, operator = self.name.partition("::")
        packet = getattr(getattr(torch.ops, library), operator)
        overload = getattr(packet, self._schema.overload_name.removesuffix("out").rstrip("_") or "default")
        args, kwargs = self.operands
        with torch.no_grad():
            return overload(*args, **kwargs)


class LazyResult:
    """An operator's result, computed only when a formula reads it, which few do."""

    def __init__(self, call: RecordedCall) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name == "_value":
            self._value = self._call.result()
            return self._value
        return getattr(self._value, name)

    def __getitem__(self, index: Any) -> Any:
        return self._value[index]


def _fits(schema: Any, inputs: Sequence[Any]) -> bool:
    """Whether recorded arguments match this overload: the same number, and tensors where it takes tensors."""
    return len(schema.arguments) == len(inputs) and all(
        "Tensor" in str(argument.type)
        if is_tensor(value)
        else value is None or str(argument.type) != "Tensor"
        for argument, value in zip(schema.arguments, inputs, strict=True)
    )


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    return value is None or (not isinstance(value, torch.Tensor) and bool(argument.default_value == value))
