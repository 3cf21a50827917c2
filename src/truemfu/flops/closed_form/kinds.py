"""The kinds of batches seen so far, each with its closed form. Keeps no reference to the model.

    batch ──► a kind with its layout ──► its form, or the count of the same shape
                └─ none ──► calibrated: a new kind

The model is an argument of each call, so that a cache of forms does not keep it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import warn_once
from ..arguments import check_call
from ..attention.windows import Windows
from ..count.count import run_counted, warn_uncounted
from ..count.counting_mode import CountingMode
from ..flop_count import FlopCount
from ..shadow.tensor_makers import device_of
from ..wrappers import unwrap
from .batch_kind import Kind
from .calibration import Calibration, NoClosedForm
from .calibration_batch import BatchMaker
from .layout import Layout

_MAX_KINDS = 64


class Kinds:
    """FLOPs of one model as a function of the batch; every call must pass the same, unchanged model."""

    def __init__(
        self,
        *,
        convention: Convention,
        backward: bool,
        loss_fn: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self.convention = convention
        self._backward, self._loss_fn = backward, loss_fn
        self._windows: Windows | None = None
        self.all: list[Kind] = []
        """The kinds, oldest first."""

    def calibrate(self, model: nn.Module, batch: Any) -> Kind:
        """Find the closed form for batches like this one, or a warning and a kind without one."""
        check_call(model, batch)
        batch, inner = _arguments(batch), unwrap(model)

        def run(given: Any) -> tuple[CountingMode, str, tuple[str, ...]]:
            return self._run(model, given)

        calibration = Calibration(inner, Layout.of(getattr(inner, "config", None), batch), batch, run)
        try:
            form = calibration.form()
            kind = Kind(calibration.layout, form)  # sizes may have been fixed during calibration
        except NoClosedForm as reason:
            layout = calibration.layout
            kind = Kind(layout.with_values() if calibration.values_matter() else layout, None)
            warn_once(f"{type(inner).__name__} has no closed form ({reason}): {kind.description}")
        for other in self.all:
            if irrelevant := other.irrelevant_numbers(kind):
                other.layout = other.layout.with_free(irrelevant, kind.layout)
                return other
        self.all.append(kind)
        if len(self.all) > _MAX_KINDS:
            del self.all[0]
        return kind

    def count(self, model: nn.Module, batch: Any) -> FlopCount:
        """The count of a batch; a batch of a new kind is calibrated."""
        batch = _arguments(batch)
        found = self._find(batch) or self._find_beyond_seen_numbers(model, batch)
        if found is None:
            kind = self.calibrate(model, batch)
            found = kind, kind.layout.sizes(batch)
        kind, sizes = found
        count = kind.known(sizes, self.convention)
        if count is None:
            tally, method, notes = self._run_with_values(model, kind, batch, sizes)
            count = tally.result(method=f"{method}, {kind.method}", notes=(*notes, *kind.notes))
            warn_uncounted(count)
            kind.store(sizes, count)
        self._windows = self._windows or Windows(unwrap(model), self.convention)
        outside = self._windows.notes_for_sizes(sizes)
        return replace(count, notes=(*count.notes, *outside)) if outside else count

    def _find(self, batch: Any) -> tuple[Kind, dict[str, Any]] | None:
        """The kind of this batch and its sizes, if it is already known."""
        if isinstance(batch, (Mapping, tuple, list)):
            for kind in self.all:
                sizes = kind.layout.quick_sizes(batch)
                if sizes is not None:
                    return kind, sizes
        return None

    def _find_beyond_seen_numbers(self, model: nn.Module, batch: Any) -> tuple[Kind, dict[str, Any]] | None:
        """The kind of a batch whose free numbers are far from those seen, if they still change nothing."""
        if not isinstance(batch, (Mapping, tuple, list)):
            return None
        count = None
        for kind in self.all:
            sizes = kind.layout.quick_sizes(batch, any_number=True) if kind.layout.free else None
            known = None if sizes is None else kind.known(sizes, self.convention)
            if sizes is None or known is None:
                continue
            count = count or self._run_with_values(model, kind, batch, sizes)[0].result(method="")
            if (known.forward, known.backward) == (count.forward, count.backward):
                kind.layout = kind.layout.with_wider_ranges(batch)
                return kind, sizes
        return None

    def _run_with_values(
        self, model: nn.Module, kind: Kind, batch: Any, sizes: dict[str, Any]
    ) -> tuple[CountingMode, str, tuple[str, ...]]:
        """One counted step on a batch; integer tensors without values are generated."""
        return self._run(model, BatchMaker(unwrap(model), batch).own(kind.layout, sizes))

    def _run(self, model: nn.Module, batch: Any) -> tuple[CountingMode, str, tuple[str, ...]]:
        """One counted step; the batch is taken to be on the model's device."""
        first = next(iter(model.parameters()), None)
        return run_counted(
            model,
            batch,
            convention=self.convention,
            backward=self._backward,
            loss_fn=self._loss_fn,
            device=None if first is None else device_of(first),
        )


def _arguments(batch: Any) -> Any:
    """The batch, with a single tensor as the only positional argument."""
    return (batch,) if isinstance(batch, torch.Tensor) else batch
