"""A count as a function of the batch: exact, and in microseconds for sizes that a closed form speaks for.

    example ──► counted, and some copies of it in other sizes ──► form ──► FlopModel
                                                                   ▲
    a batch that the form does not speak for ──► counted ──────────┘

The form is fitted in integers, without rounding (`form.py`). `batch_counts.py` decides when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ..flop_count import FlopCount
from .batch_counts import BatchCounts
from .integers import TOTALS

_DEFAULT = Convention()


class FlopModel:
    """FLOPs as a function of the batch. `FlopModel.fit(model, batch)`, then `f(other_batch)`.

    Exact for every batch. The form answers for other numbers of samples and other lengths between those that
    were counted. Any other batch (a longer one, other keys, images of other sizes) is counted when it
    arrives, once for each shape, and the form learns from it. If the work depends on other values (the model
    skips padding, or chooses a head by a number), each batch is counted with its own values. `method` of a
    count states which it was.

    Only shapes are read, and the values of packed positions, cumulative lengths and image grids: put these
    on the CPU if the caller must not wait for the device. All other tensors may be on the meta device, and
    are then taken to be complete (no padding, a label for each token). If values matter, all integers are
    read. Not thread-safe.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self.convention = convention
        self._model = model
        self._counts = BatchCounts(convention=convention, backward=backward, loss_fn=loss_fn)

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any] | tuple[Any, ...],
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> FlopModel:
        """Count this batch and some copies in other sizes; uses no device and does not change the model."""
        fitted = cls(model, convention=convention, backward=backward, loss_fn=loss_fn)
        fitted._counts.fit(model, batch)
        return fitted

    @property
    def closed(self) -> bool:
        """Whether every kind of batch seen so far has a closed form."""
        return all(form.is_fitted for form in self._counts.forms)

    def __call__(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount:
        """The count for another batch."""
        return self._counts.count(self._model, batch)

    def formulas(self) -> dict[str, str]:
        """The closed form of the first batch kind as text, for forward, backward and recompute."""
        first = next(iter(self._counts.forms), None)
        return {} if first is None else first.written(TOTALS)
