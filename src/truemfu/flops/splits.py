"""Splits of a count by module, operator and dtype, computed on first access.

A monitor requests a count every step and reads its splits only now and then, so until then they must cost
nothing. A `FlopCount` holds each of them as a `LazySplit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Protocol


class Splits(Protocol):
    """All splits of one count; implementations cache what they have computed."""

    @property
    def by_module(self) -> dict[str, int]: ...

    @property
    def by_operator(self) -> dict[str, int]: ...

    @property
    def by_dtype(self) -> dict[str, int]: ...


class LazySplit(Mapping[str, int]):
    """The split of this name, as a mapping."""

    __slots__ = ("_name", "_splits")

    def __init__(self, splits: Splits, name: str) -> None:
        self._splits, self._name = splits, name

    def _get(self) -> dict[str, int]:
        return getattr(self._splits, self._name)  # type: ignore[no-any-return]

    def __getitem__(self, key: str) -> int:
        return self._get()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())

    def __repr__(self) -> str:
        return repr(self._get())


def with_ancestors(own: dict[str, int]) -> dict[str, int]:
    """FLOPs per module including its children, from each module's own FLOPs; "" is the whole model."""
    total: defaultdict[str, int] = defaultdict(int)
    total[""] = 0
    for path, flops in own.items():
        total[""] += flops
        parts = path.split(".") if path else []
        for depth in range(1, len(parts) + 1):
            total[".".join(parts[:depth])] += flops
    return dict(total)
