"""A count as named integers, which a form is fitted to, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...convention import Convention
from ..flop_count import FlopCount

TOTALS = ("forward", "backward", "recompute")
SPLITS = ("by_module", "by_operator", "by_dtype", "uncounted")


def integers_of(count: FlopCount, splits: Iterable[str] = SPLITS) -> dict[str, int]:
    """The totals of a count, and these splits: `forward`, `by_dtype:bfloat16` …"""
    found = {total: getattr(count, total) for total in TOTALS}
    for split in splits:
        found |= {f"{split}:{name}": amount for name, amount in getattr(count, split).items()}
    return found


def count_of(
    integers: Mapping[str, int], *, method: str, convention: Convention, notes: tuple[str, ...] = ()
) -> FlopCount:
    """The count that has these integers."""
    fields: dict[str, Any] = {total: integers[total] for total in TOTALS}
    fields |= {split: {} for split in SPLITS}
    for key, amount in integers.items():
        split, is_split, name = key.partition(":")
        if is_split and (amount or split != "uncounted"):
            fields[split][name] = amount
    return FlopCount(**fields, method=method, convention=convention, notes=notes)
