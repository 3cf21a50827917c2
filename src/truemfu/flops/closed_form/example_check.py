"""Checks a closed form against the user's example batch: work may depend on values, or on sizes not varied.

A calibration counts generated batches: their masks are all ones, all their tokens the same. Here the example
itself is counted, and the same with other values in the arguments that models tend to read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ...convention import Convention
from ...errors import TruemfuError
from ..count.counting_mode import CountingMode
from ..flop_count import FlopCount
from .calibration_batch import BatchMaker
from .form import Form
from .layout import Layout
from .terms import Sizes

Flops = tuple[int, int]
"""Forward and backward; recompute is left out, since it depends on the kernel, which a mask may change."""


class ExampleCheck:
    """The FLOPs of an example, and of batches of its sizes with other values; counted on first use."""

    def __init__(
        self, maker: BatchMaker, layout: Layout, sizes: Sizes, count: Callable[[Any], CountingMode]
    ) -> None:
        self._maker, self._layout, self._sizes, self._count = maker, layout, sizes, count

    def contradiction(self, form: Form) -> str | None:
        """Why a closed form does not describe this model; None if it does."""
        expected = _flops(form.count(self._sizes, Convention()))
        changed = self._changed
        if expected == (self._own if changed is None else changed):
            return None
        if self._own != expected:
            return (
                f"the form fitted to other batches gives {sum(expected):,} FLOPs for this one, "
                f"not {sum(self._own):,}"
            )
        return None if changed is None else "its work depends on the values in a batch, not only on its sizes"

    def values_matter(self) -> bool:
        """Whether the work depends on the values in a batch, not only on its sizes; True if in doubt.

        Raises if the example itself cannot be counted.
        """
        own = self._own
        try:
            made = self._flops_of(self._maker.make(self._layout, self._sizes))
        except (TruemfuError, IndexError):
            return True
        return made != own or self._changed not in (None, own)

    @cached_property
    def _own(self) -> Flops:
        return self._flops_of(self._maker.own(self._layout, self._sizes))

    @cached_property
    def _changed(self) -> Flops | None:
        """The FLOPs with other values; None if nothing can be changed or the model rejects the change."""
        batch = self._maker.other(self._layout, self._sizes)
        try:
            return None if batch is None else self._flops_of(batch)
        except TruemfuError:
            return None

    def _flops_of(self, batch: Any) -> Flops:
        return _flops(self._count(batch).result(method=""))


def _flops(count: FlopCount) -> Flops:
    return count.forward, count.backward
