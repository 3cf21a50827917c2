"""FLOPs of a training step from the model's structure: nothing is run, and a batch takes microseconds.

    model ──► Walk (once, milliseconds) ──► FLOPs per row, pair, image …
    batch ──► Sizes, from shapes ──────────► × ──► FlopCount

`count_flops` runs the model on fake tensors and is exact; this reads modules, shapes and configuration, and
is right if a forward does what its modules suggest. docs/estimate.md has its error on every public case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from ...convention import Convention
from ..arguments import check_call, check_options
from ..flop_count import FlopCount
from ..splits import LazySplit, with_ancestors
from ..wrappers import unwrap
from .batch_sizes import BatchReader
from .streams import Quantity
from .walk import Walk
from .work import Work

ESTIMATE = "estimate"
_DEFAULT = Convention()


def estimate_flops(
    model: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...], *, convention: Convention = _DEFAULT
) -> FlopCount:
    """FLOPs of one training step of `model` on `batch`, estimated from the model's structure."""
    return Estimator(model, convention=convention)(batch)


class Estimator:
    """FLOPs of a training step as a function of the batch, derived from the model's modules.

    What is trained, checkpointed and cast by autocast is read at construction; the model is not changed. Of a
    batch on a GPU, only the shapes are read.
    """

    def __init__(self, model: nn.Module, *, convention: Convention = _DEFAULT) -> None:
        check_options(convention, True, None)
        check_call(model, ())
        self.convention = convention
        inner = unwrap(model)
        walk = Walk(inner, convention)
        self._works = tuple(walk.works)
        self._uncounted = dict(walk.uncounted)
        self._read = BatchReader(inner, walk)
        self._notes = tuple(walk.notes)
        if not any(work.backward for work in self._works):
            self._notes += ("no weight of a product is trained: there is no backward",)
        indices: dict[Quantity, int] = {}
        forward: defaultdict[int, int] = defaultdict(int)
        backward: defaultdict[int, int] = defaultdict(int)
        recompute: defaultdict[int, int] = defaultdict(int)
        counted_indices = []
        for work in self._works:
            counted = indices.setdefault(work.counted, len(indices))
            executed = indices.setdefault(work.executed, len(indices))
            counted_indices.append(counted)
            forward[counted] += work.forward
            backward[counted] += work.backward
            recompute[counted] -= work.forward + work.backward
            recompute[executed] += work.forward + work.executed_backward + work.again
        self._counted_indices = tuple(counted_indices)
        self._quantities = tuple(quantity.of for quantity in indices)
        self._forward, self._backward, self._recompute = (
            [(i, flops) for i, flops in sums.items() if flops] for sums in (forward, backward, recompute)
        )

    def __call__(self, batch: Mapping[str, Any] | Sequence[Any]) -> FlopCount:
        """The estimate for one batch, from its shapes."""
        sizes = self._read(batch)
        values = [of(sizes) for of in self._quantities]
        splits = _Splits(self._works, [values[i] for i in self._counted_indices])
        return FlopCount(
            forward=sum([flops * values[i] for i, flops in self._forward]),
            backward=sum([flops * values[i] for i, flops in self._backward]),
            recompute=sum([flops * values[i] for i, flops in self._recompute]),
            by_module=LazySplit(splits, "by_module"),
            by_operator=LazySplit(splits, "by_operator"),
            by_dtype=LazySplit(splits, "by_dtype"),
            uncounted=self._uncounted,
            method=ESTIMATE,
            convention=self.convention,
            notes=(*self._notes, *sizes.notes),
        )


class _Splits:
    """The splits of an estimate, computed on first access."""

    def __init__(self, works: Sequence[Work], units: Sequence[int]) -> None:
        self._works, self._units = works, units

    def _summed(self, field: str) -> dict[str, int]:
        sums: defaultdict[str, int] = defaultdict(int)
        for work, units in zip(self._works, self._units, strict=True):
            sums[getattr(work, field)] += (work.forward + work.backward) * units
        return {name: flops for name, flops in sums.items() if flops}

    @cached_property
    def by_module(self) -> dict[str, int]:
        return with_ancestors(self._summed("module"))

    @cached_property
    def by_operator(self) -> dict[str, int]:
        return self._summed("kind")

    @cached_property
    def by_dtype(self) -> dict[str, int]:
        return self._summed("dtype")
