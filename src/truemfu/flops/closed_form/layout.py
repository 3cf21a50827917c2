"""The layout of a batch: which arguments it has, and which of their dimensions vary together.

    example ──► Layout: input_ids is (samples, length), pixel_values is (images, 3, 24, 24) …
    Layout.quick_sizes(batch)  the sizes of another batch of the same layout, or None if its layout differs

Sizes come from shapes alone where possible. Packed documents and image grids are read from values, which
must be on the CPU for that to be free: reading a CUDA tensor waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import BatchError
from ..batch import CUMULATIVE, GRIDS, digest_of, documents_in, grids_of, is_readable
from .dimension_names import DimensionNames, Key

_READ_BY_VALUE = frozenset({*CUMULATIVE, *GRIDS, "position_ids"})
"""Arguments whose values determine the work of a batch."""

Range = tuple[int | float, int | float]
_NONE: Mapping[Key, Range] = {}


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a batch: each dimension is a name, if it varies, or a number.

    Names that begin with "_" are not independent sizes: they follow from documents or grids.
    """

    key: Key
    is_floating: bool
    dims: tuple[str | int, ...]
    needs_gradient: bool

    def named(self) -> list[tuple[int, str]]:
        """The dimensions that are sizes of the batch."""
        return [(i, d) for i, d in enumerate(self.dims) if isinstance(d, str) and d[:1] != "_"]


class Layout:
    """The layout of a batch: tensors with their dimensions, other arguments with their values.

    `free` are numbers among the other arguments that were found to make no difference to the work, each with
    the smallest and the largest value it may have before it is checked again. If the work depends on the
    integers in the tensors, `by_values`, their digest is one of the sizes. For a batch that is passed as one
    dict, `model(batch)`, `inside` is the key or index of that argument.
    """

    def __init__(
        self,
        *,
        is_mapping: bool,
        is_packed: bool,
        tensors: Mapping[Key, TensorLayout],
        constants: Mapping[Key, Any],
        free: Mapping[Key, Range] = _NONE,
        by_values: bool = False,
        inside: Key | None = None,
        clash: str | None = None,
    ) -> None:
        self.clash = clash
        """Why the dimensions of the example have no common names; each is then a separate size."""
        self.is_mapping, self.is_packed = is_mapping, is_packed
        self.by_values, self.inside = by_values, inside
        self.tensors, self.constants, self.free = tensors, constants, free
        self.grids = [key for key in GRIDS if key in tensors]
        self.names = sorted({name for tensor in tensors.values() for _, name in tensor.named()})
        """The sizes that vary, in a fixed order."""
        self._keys = frozenset((*tensors, *constants))
        self._values_read = _READ_BY_VALUE & self._keys if is_mapping else frozenset()
        self._compared = [
            (key, value) for key, value in constants.items() if key not in free and not self.is_longest(key)
        ]
        self._reading = [
            (
                tensor.key,
                len(tensor.dims),
                tensor.is_floating,
                tensor.needs_gradient,
                tensor.named(),
                [(i, d) for i, d in enumerate(tensor.dims) if isinstance(d, int)],
            )
            for tensor in tensors.values()
        ]

    @classmethod
    def of(cls, config: Any, batch: Any) -> Layout:
        """The layout of batches like this one, for a model with this configuration."""
        arguments = arguments_of(batch)
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items():
            if value.is_nested:
                raise BatchError(
                    f"{key!r} is a nested tensor, whose rows differ in length: it has no closed form, "
                    "count each batch with count_flops"
                )
        inside = key_of_inner_batch(batch)
        is_mapping = inside is not None or isinstance(batch, Mapping)
        names = DimensionNames(config, tensors, is_mapping)
        layout = cls(
            is_mapping=is_mapping,
            is_packed=is_mapping and documents_in(arguments) is not None,
            inside=inside,
            tensors={
                key: TensorLayout(key, value.is_floating_point(), names.dims(key), value.requires_grad)
                for key, value in tensors.items()
            },
            constants={key: value for key, value in arguments.items() if key not in tensors},
        )
        try:
            layout._named_sizes(arguments)
        except BatchError as error:
            return layout._with(tensors=layout._with_own_names(), clash=str(error))
        return layout

    def _with_own_names(self) -> dict[Key, TensorLayout]:
        return {
            key: replace(
                t, dims=tuple(d if str(d)[:1] == "_" else f"{key}.{i}" for i, d in enumerate(t.dims))
            )
            for key, t in self.tensors.items()
        }

    def with_fixed(self, name: str, size: int) -> Layout:
        """The same layout with this size fixed: the model accepts no other."""
        return self._with(
            tensors={
                key: replace(t, dims=tuple(size if d == name else d for d in t.dims))
                for key, t in self.tensors.items()
            }
        )

    def with_free(self, keys: frozenset[Key], other: Layout) -> Layout:
        """The same layout with these numbers free: another layout with other values has the same work."""
        values = {key: (self.constants[key], other.constants[key]) for key in keys}
        return self._with(free={**self.free, **{key: (min(two), max(two)) for key, two in values.items()}})

    def with_wider_ranges(self, batch: Any) -> Layout:
        """The same layout with its free ranges extended to this batch's numbers.

        They extend as far again beyond the number, so that a growing one is checked ever more rarely.
        """
        arguments = arguments_of(batch)
        return self._with(
            free={key: _widened(low_high, arguments[key]) for key, low_high in self.free.items()}
        )

    def with_values(self) -> Layout:
        """The same layout where the work depends on the integers in the tensors."""
        return self._with(by_values=True)

    def _with(self, **changed: Any) -> Layout:
        same = ("is_mapping", "is_packed", "tensors", "constants", "free", "by_values", "inside")
        return Layout(**{**{name: getattr(self, name) for name in same}, **changed})

    def differing_numbers(self, other: Layout) -> frozenset[Key]:
        """The numbers in which two layouts differ; empty if they differ in anything else, or not at all."""
        alike = all(
            getattr(self, name) == getattr(other, name)
            for name in ("is_mapping", "is_packed", "inside", "by_values", "tensors")
        )
        if not alike or self.constants.keys() != other.constants.keys():
            return frozenset()
        apart = {key for key, value in self._compared if not _same(other.constants[key], value)}
        both = [layout.constants[key] for key in apart for layout in (self, other)]
        return frozenset(apart) if all(type(value) in (int, float) for value in both) else frozenset()

    def is_longest(self, key: Key) -> bool:
        """Whether an argument is the length of the longest document, which follows from the documents."""
        return self.is_packed and type(self.constants.get(key)) is int and "max" in str(key)

    def sizes(self, batch: Any) -> dict[str, Any]:
        """The sizes of a batch of this layout; raises BatchError if they are unknown or contradictory."""
        batch = batch if self.inside is None else batch[self.inside]
        found = self._named_sizes(batch)
        for key in self._without_values(batch):
            raise BatchError(
                f"{key!r} has no values (it is a meta or fake tensor), and the work of the batch depends on "
                "them: pass it as a CPU tensor"
            )
        self._read_values(batch, found)
        return found

    def _named_sizes(self, batch: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for tensor in self.tensors.values():
            for i, name in tensor.named():
                n = int(batch[tensor.key].shape[i])
                if found.setdefault(name, n) != n:
                    raise BatchError(
                        f"{tensor.key!r} has {n} {name} where another tensor of the batch has {found[name]}"
                    )
        return found

    def quick_sizes(self, batch: Any, *, any_number: bool = False) -> dict[str, Any] | None:
        """The sizes of a batch, in microseconds; None for a batch of another layout.

        With `any_number`, free numbers may have any value.
        """
        if key_of_inner_batch(batch) != self.inside:
            return None
        batch = batch if self.inside is None else batch[self.inside]
        if self.is_mapping:
            if not isinstance(batch, Mapping) or batch.keys() != self._keys:
                return None
        elif isinstance(batch, Mapping) or len(batch) != len(self._keys):
            return None
        found: dict[str, Any] = {}
        for key, count, is_floating, needs_gradient, named, fixed in self._reading:
            value = batch[key]
            if not isinstance(value, torch.Tensor) or value.is_nested:
                return None
            if value.is_floating_point() is not is_floating or value.requires_grad is not needs_gradient:
                return None
            shape = value.shape
            if len(shape) != count:
                return None
            for i, n in fixed:
                if shape[i] != n:
                    return None
            for i, name in named:
                if found.setdefault(name, shape[i]) != shape[i]:
                    return None
        for key, constant in self._compared:
            if not _same(batch[key], constant):
                return None
        for key, (low, high) in self.free.items():
            value = batch[key]
            if type(value) not in (int, float) or not (any_number or _is_within(value, low, high)):
                return None
        if self.by_values or self._values_read:
            is_packed = self.is_mapping and documents_in(batch) is not None
            if is_packed != self.is_packed or any(self._without_values(batch)):
                return None
            self._read_values(batch, found)
        return found

    def _without_values(self, batch: Any) -> Iterator[str]:
        """Arguments that must be read and cannot be; unreadable position ids count as consecutive."""
        for key in self._values_read:
            if key != "position_ids" and not is_readable(batch[key]):
                yield str(key)

    def _read_values(self, batch: Any, found: dict[str, Any]) -> None:
        if self.by_values:
            found["values"] = digest_of(batch)
        if self.is_packed:
            whole = [[found.get("length", 0)]] * found.get("samples", 1)
            found["documents"] = documents_in(batch) or whole
        if self.grids:
            found["grids"] = [grid for key in self.grids for grid in grids_of(batch, key)]


def arguments_of(batch: Any) -> dict[Key, Any]:
    """A batch as a mapping, positional arguments by index; for a dict passed as one argument, its items."""
    key = key_of_inner_batch(batch)
    if key is not None:
        batch = batch[key]
    return dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))


def key_of_inner_batch(batch: Any) -> Key | None:
    """The key or index of a batch passed as one dict, the only argument (`model(batch)`); else None."""
    if len(batch) != 1:
        return None
    key: Key = next(iter(batch)) if isinstance(batch, Mapping) else 0
    inner = batch[key]
    is_batch = type(inner) is dict and bool(inner) and all(type(name) is str for name in inner)
    return key if is_batch else None


def _is_within(value: float, low: float, high: float) -> bool:
    return low <= value <= high or not math.isfinite(value)


def _widened(low_high: Range, value: float) -> Range:
    low, high = low_high
    if _is_within(value, low, high):
        return low_high
    return (low, value + (value - low)) if value > high else (value - (high - value), high)


def _same(value: Any, constant: Any) -> bool:
    """Whether two arguments are equal. Tensors inside are not compared: that could wait for a device."""
    if value is constant:
        return True
    if type(value) is not type(constant) or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(constant) and all(map(_same, value, constant))
    if isinstance(value, dict):
        return value.keys() == constant.keys() and all(_same(value[k], constant[k]) for k in value)
    return (value == constant) is True
