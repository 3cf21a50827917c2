"""Models that loop over positions in Python: short sequences give the exact count of long ones.

    two short forward passes ──► operators per position ──► too many at the requested length?
                                                              └─► closed form from short sequences ──► count

Each operator of a count takes about 0.1 ms, so a scan that is written as a loop (a state-space model without
its kernels) would take minutes. Its work is the same at each position, which the fit confirms part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ...convention import Convention
from ...errors import TruemfuError
from ..attention.windows import Windows
from ..count.count import run_counted
from ..count.counting_mode import CountingMode
from ..flop_count import FlopCount
from ..wrappers import unwrap
from .calibration import Calibration, NoClosedForm
from .calibration_batch import BatchMaker
from .config_numbers import chunk_sizes
from .layout import Layout

_PROBED = (2, 3)
_LENGTHS = (5, 3, 4, 7, 11, 9, 13)
"""Short lengths without common factors."""
_MAX_OPERATORS = 60_000
"""Operators of a forward pass beyond which the closed form is quicker."""


def count_by_short_sequences(
    model: nn.Module, batch: Any, *, convention: Convention, backward: bool
) -> FlopCount | None:
    """The count of a batch with too many positions to loop over; None if it can be counted directly.

    Also None if short sequences do not predict the work of long ones: chunks of positions, no closed form.
    """
    inner = unwrap(model)
    layout = Layout.of(getattr(inner, "config", None), batch)
    if layout.clash is not None or layout.is_packed or "length" not in layout.names or chunk_sizes(inner):
        return None
    sizes = layout.sizes(batch)

    def run(given: Any, backward: bool = backward) -> tuple[CountingMode, str, tuple[str, ...]]:
        return run_counted(model, given, convention=convention, backward=backward, loss_fn=None)

    try:
        if not _loops(BatchMaker(inner, batch), layout, sizes, lambda given: run(given, False)[0]):
            return None
        calibration = Calibration(inner, layout, batch, run, lengths=_LENGTHS)
        form = calibration.form()
    except (TruemfuError, NoClosedForm, IndexError):
        return None
    if calibration.layout is not layout:  # a size could not be changed
        return None
    note = f"the model loops over positions: its closed form was fitted on up to {max(_LENGTHS)} of them"
    for text in (note, *Windows(inner, convention).notes_for_sizes(sizes)):
        form = form.with_note(text)
    return form.count(sizes, convention)


def _loops(
    maker: BatchMaker, layout: Layout, sizes: Mapping[str, Any], count: Callable[[Any], CountingMode]
) -> bool:
    """Whether the number of operators grows with the length and exceeds the limit."""
    if sizes["length"] <= _PROBED[-1]:
        return False
    short, longer = (count(maker.make(layout, {**sizes, "length": n})).operators for n in _PROBED)
    growth = (longer - short) / (_PROBED[1] - _PROBED[0])
    return growth > 0 and longer + growth * (sizes["length"] - _PROBED[1]) > _MAX_OPERATORS
