"""One kind of batch: its layout, and its closed form if it has one, else the counts of the shapes seen."""

from __future__ import annotations

import json
from collections import OrderedDict

from ...convention import Convention
from ..flop_count import FlopCount
from .form import Form
from .layout import Layout
from .terms import Sizes

_PER_SHAPE = "counted once per shape"
_VALUES_MATTER = (
    "the work may depend on the values of a batch (a mask, labels, a number), not on its shapes alone"
)
_MAX_SHAPES_STORED = 1024


class Kind:
    """One kind of batch; `form` is None for a model whose work is not a function of the sizes."""

    def __init__(self, layout: Layout, form: Form | None) -> None:
        self.layout, self.form = layout, form
        self._counts: OrderedDict[str, FlopCount] = OrderedDict()

    @property
    def method(self) -> str:
        """How batches of this kind are counted if there is no closed form."""
        return f"{_PER_SHAPE} and values" if self.layout.by_values else _PER_SHAPE

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on such a count."""
        return (_VALUES_MATTER,) if self.layout.by_values else ()

    @property
    def description(self) -> str:
        """The method and the notes in one sentence."""
        return "; ".join((self.method, *self.notes))

    def irrelevant_numbers(self, other: Kind) -> frozenset[str | int]:
        """Numbers that differ between two kinds whose work is the same: a step counter, a divisor."""
        if self.form is None or other.form is None or not self.form.is_same(other.form):
            return frozenset()
        return self.layout.differing_numbers(other.layout)

    def known(self, sizes: Sizes, convention: Convention) -> FlopCount | None:
        """The count for these sizes; None if they have to be counted first."""
        if self.form is not None:
            return self.form.count(sizes, convention)
        return self._counts.get(_as_key(sizes))

    def store(self, sizes: Sizes, count: FlopCount) -> None:
        """Store the count of a shape."""
        self._counts[_as_key(sizes)] = count
        if len(self._counts) > _MAX_SHAPES_STORED:
            self._counts.popitem(last=False)


def _as_key(sizes: Sizes) -> str:
    return json.dumps(sizes, sort_keys=True)
