"""A count as a function of the batch: fitted once, exact for later shapes, in microseconds.

    example ──► a few counts at other sizes ──► each part matched to a term, exactly ──► FlopModel
                                                   └─ no term fits ──► counted once per shape (and values,
                                                                       if they matter), with a warning

A part is the work of one operator in one module and phase. Its FLOPs in every calibration must equal a
constant times a term of the batch's sizes (samples × length, samples × length², patches …), or a short sum of
such products; in integers, without rounding, with more calibrations than unknowns. `calibration.py` runs the
counts, `terms.py` is the vocabulary, `form.py` the result, `kinds.py` finds the form for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ..flop_count import FlopCount
from .kinds import Kinds

_DEFAULT = Convention()


class FlopModel:
    """FLOPs as a function of the batch. `FlopModel.fit(model, batch)`, then `f(other_batch)`.

    Exact for other numbers of samples, lengths, packed documents, numbers and sizes of images. The first
    batch of another kind (other keys, packed instead of not, an input that needs a gradient) is calibrated
    when it arrives. A model whose work is not a function of these sizes is counted once per shape; `closed`
    is then False. Padding counts as work unless the model skips it: if the work depends on other values
    (a mask, labels, a task's number), each batch is counted with its own values.

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
        self._kinds = Kinds(convention=convention, backward=backward, loss_fn=loss_fn)

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
        """Calibrate on batches like this one; uses no device and does not change the model."""
        fitted = cls(model, convention=convention, backward=backward, loss_fn=loss_fn)
        fitted._kinds.calibrate(model, batch)
        return fitted

    @property
    def closed(self) -> bool:
        """Whether every kind of batch seen so far has a closed form."""
        return all(kind.form is not None for kind in self._kinds.all)

    def __call__(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount:
        """The count for another batch."""
        return self._kinds.count(self._model, batch)

    def formulas(self) -> dict[str, str]:
        """The closed form of the first batch kind as text, for forward, backward and recompute."""
        form = self._kinds.all[0].form
        return {} if form is None else form.written()
