"""What only a user's own batch shows of a model: work that depends on values, or on sizes nobody thought of.

A calibration counts batches that are made up: ones in their masks, one token everywhere. Here the example is
counted as it is, and with other values in the places that models look at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ...convention import Convention
from ...errors import TruemfuError
from ..count.tally import Tally
from ..flop_count import FlopCount
from .calibration_batch import BatchMaker
from .form import Form
from .layout import Layout
from .terms import Sizes

Flops = tuple[int, int]
"""Forward and backward: what is executed beyond them hangs on kernels, which a mask may decide."""


class OwnValues:
    """The FLOPs of an example, and of batches of its sizes with other values; counted when asked for."""

    def __init__(
        self, maker: BatchMaker, layout: Layout, sizes: Sizes, count: Callable[[Any], Tally]
    ) -> None:
        self._maker, self._layout, self._sizes, self._count = maker, layout, sizes, count

    def contradict(self, form: Form) -> str | None:
        """Why a closed form is not this model's; None where it is."""
        expected = _flops(form.count(self._sizes, Convention()))
        changed = self._changed
        if expected == (self._own if changed is None else changed):
            return None
        if self._own != expected:
            return f"what fits other batches gives this one {sum(expected):,} FLOPs, not {sum(self._own):,}"
        return None if changed is None else "other values in a batch of the same sizes are other work"

    def matter(self) -> bool:
        """Whether other values in a batch of the same sizes are other work; in doubt they are.

        An example that cannot be counted at all is an error.
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
        """With other values; None where there is nothing to change, or the model does not take them."""
        batch = self._maker.other(self._layout, self._sizes)
        try:
            return None if batch is None else self._flops_of(batch)
        except TruemfuError:
            return None

    def _flops_of(self, batch: Any) -> Flops:
        return _flops(self._count(batch).result(method=""))


def _flops(count: FlopCount) -> Flops:
    return count.forward, count.backward
