"""The tally of calls that did not run under it: those of a graph, or of a recording. No tensor has values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..operators.dtype_names import dtype_name
from ..operators.matrix_work import factors
from .tally import Entry, Tally


class GradientEdges:
    """Replaces the autograd node of a kernel: which of its inputs need a gradient."""

    def __init__(self, needed: Iterable[bool]) -> None:
        self.next_functions = [(True if is_needed else None, 0) for is_needed in needed]

    def _sequence_nr(self) -> int:
        return -2  # of no node


class CallTally(Tally):
    """Counts calls, each as of a phase and on a device of a type; arguments are on the meta device."""

    _call_phase = "forward"

    def add(
        self, phase: str, device_type: str, name: str, func: Any, args: Any, kwargs: Any, out: Any
    ) -> Entry | None:
        """Count a call; `func` has the operator's schema."""
        self._call_phase = phase
        entry = self._count(name, func, args, kwargs, out)
        operand = next(iter(factors(name, args)), None)
        if entry is not None and isinstance(operand, torch.Tensor):
            entry.dtype = dtype_name(operand.dtype, device_type, convolution="conv" in name)
        return entry

    def _phase(self, node: Any) -> str:
        return self._call_phase
