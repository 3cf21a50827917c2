"""FLOPs of a training step from the model's structure: nothing is run, and a batch takes microseconds.

model ──► Walk (once, milliseconds) ──► FLOPs for each row and query-key pair
batch ──► Sizes, from shapes ──────────► × ──► FlopCount
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...convention import Convention
from ...errors import ModelError
from ..arguments import check_batch, check_model, check_options
from ..flop_count import FlopCount
from ..wrappers import unwrap
from .batch_sizes import sizes_of
from .walk import Walk

ESTIMATE = "estimate"
_DEFAULT = Convention()


def estimate_flops(
    model: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...], *, convention: Convention = _DEFAULT
) -> FlopCount:
    """FLOPs of one training step of `model` on `batch`, estimated from the model's structure."""
    return Estimator(model, convention=convention)(batch)


class Estimator:
    """FLOPs of a training step as a function of the batch, derived from the model's modules.

    What is trained, checkpointed and cast by autocast is read at construction; the model is neither changed
    nor kept. Of a batch on a GPU, only the shapes are read. There are no splits by module or operator.
    """

    def __init__(self, model: nn.Module, *, convention: Convention = _DEFAULT) -> None:
        check_options(convention, True, None)
        check_model(model)
        inner = unwrap(model)
        self._walk = Walk(inner, convention)
        if not self._walk.works:
            raise ModelError(
                f"{type(inner).__name__} has no known layer, so it cannot be estimated from its structure: "
                "count it with count_flops"
            )
        self._arguments = list(inspect.signature(inner.forward).parameters)
        self.convention = convention

    def __call__(self, batch: Mapping[str, Any] | Sequence[Any]) -> FlopCount:
        """The estimate for one batch, from its shapes."""
        args, kwargs = check_batch(batch)
        named = dict(zip(self._arguments, args, strict=False)) | kwargs
        sizes, notes = sizes_of(named, self._walk)
        total: Counter[str] = Counter()
        by_dtype: Counter[str] = Counter()
        for (units, dtype), work in self._walk.works.items():
            flops = {part: each * units.of(sizes) for part, each in work.items()}
            total.update(flops)
            by_dtype[dtype] += flops["forward"] + flops["backward"]
        return FlopCount(
            forward=total["forward"],
            backward=total["backward"],
            recompute=total["recompute"],
            by_dtype=+by_dtype,
            uncounted=dict(self._walk.uncounted),
            method=ESTIMATE,
            convention=self.convention,
            notes=(*self._walk.notes, *notes),
        )
