"""One kind of batch: its layout, and its closed form if it has one, else the counts of the shapes seen."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import msgspec

from ...convention import Convention
from ..flop_count import FlopCount
from .form import Form, FormData
from .layout import Layout, LayoutData
from .terms import Sizes

PER_SHAPE = "counted once per shape"
PER_VALUES = f"{PER_SHAPE} and values"
_VALUES_MATTER = (
    "the work may depend on the values of a batch (a mask, labels, a number), not on its shapes alone"
)
_MAX_SHAPES_STORED = 1024
_MAX_SHAPES_EXPORTED = 64


class ShapeData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The count of one shape, as exported to another process."""

    sizes: str
    forward: int
    backward: int
    recompute: int
    by_module: dict[str, int]
    by_operator: dict[str, int]
    by_dtype: dict[str, int]
    uncounted: dict[str, int]
    method: str
    notes: tuple[str, ...]


class KindData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch kind, as exported to another process; `form` is None if there is no closed form."""

    layout: LayoutData
    form: FormData | None
    shapes: list[ShapeData]


class Kind:
    """One kind of batch; `form` is None for a model whose work is not a function of the sizes."""

    def __init__(self, layout: Layout, form: Form | None) -> None:
        self.layout, self.form = layout, form
        self._counts: OrderedDict[str, FlopCount] = OrderedDict()

    @property
    def method(self) -> str:
        """How batches of this kind are counted if there is no closed form."""
        return PER_VALUES if self.layout.by_values else PER_SHAPE

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
        if self.form is None or other.form is None:
            return frozenset()
        differing = self.layout.differing_numbers(other.layout)
        return differing if differing and self.form.export() == other.form.export() else frozenset()

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

    def export(self) -> dict[str, Any]:
        """Plain data from which `from_export` makes an equal kind, with only the latest shapes."""
        latest = list(self._counts.items())[-_MAX_SHAPES_EXPORTED:]
        return {
            "layout": self.layout.export(),
            "form": None if self.form is None else self.form.export(),
            "shapes": [{"sizes": sizes, **_plain(count)} for sizes, count in latest],
        }

    @classmethod
    def from_export(cls, data: KindData, convention: Convention) -> Kind:
        """The kind that was exported, with counts under this convention."""
        layout = Layout.from_export(data.layout)
        example: dict[str, Any] = dict.fromkeys(layout.names, 1)
        if layout.is_packed:
            example["documents"] = [[1]]
        if layout.grids:
            example["grids"] = [(1, 1, 1)]
        kind = cls(layout, None if data.form is None else Form.from_export(data.form, example))
        for shape in data.shapes:
            fields = msgspec.structs.asdict(shape)
            sizes = fields.pop("sizes")
            kind._counts[sizes] = FlopCount(convention=convention, **fields)
        return kind


def _as_key(sizes: Sizes) -> str:
    return json.dumps(sizes, sort_keys=True)


def _plain(count: FlopCount) -> dict[str, Any]:
    derived = ("model_flops", "hardware_flops", "convention")
    return {name: value for name, value in count.as_dict().items() if name not in derived}
