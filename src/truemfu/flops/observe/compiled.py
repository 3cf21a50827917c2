"""Compiled code in an observed step: which regions ran, and what they multiplied.

Inductor writes most of a region's work as kernels of its own, and may write products too (templates of
max-autotune, `flex_attention`, a C++ wrapper), or replay the region as a CUDA graph: none of these are
operators. But each region is an object that is called, and it keeps the text of its graph
(`region_graph.py`). So what a region multiplies is counted from its graph each time it is called, and the
operators seen inside are ignored:

    call of a region ──► sizes of its inputs, phase ──► (after the step) graph ──► entries of the tally

The call is watched through the class's `__call__`, replaced only while a step is observed: the objects, the
code they run, and the compiler's guards on it stay as they are. Code of other backends runs operators, which
are seen as usual.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ...convention import Convention
from ...errors import one_line
from ...torch_private import compiler
from ...torch_private.mode_stack import why_not_to_observe
from ..attention.kernels import AttentionWork
from ..attention.masks import MASK_NOT_READ
from ..count.call_tally import CallTally, GradientEdges
from ..count.tally import Entry
from ..operators.matrix_work import matters
from ..registry import OPERATOR_FORMULAS
from ..shadow.values import Value
from .region_graph import Product, RegionError, read_graph

NO_GRAPHS = f"torch {torch.__version__} does not keep the graphs of compiled code"
RECOMPILES = f"torch {torch.__version__} would compile code again while a step is observed"
_TRITON = "higher_order::triton_kernel_wrapper"


class RegionRun:
    """One call of a compiled region.

    `phase` is that of an operator which would run in its place; `position` counts the entries before it.
    """

    def __init__(self, region: Any, inputs: Any, phase: str, *, position: int) -> None:
        self._text = compiler.graph_text(region)
        self.is_backward = compiler.is_backward(region)
        self.phase = "backward" if self.is_backward else phase
        self.position = position
        self._sizes = [_size(value) for value in inputs]
        self.entries: list[Entry] = []
        self.uncounted: Counter[str] = Counter()

    def count(self, convention: Convention) -> None:
        """Count the region's products into `entries`; RegionError with the reason if that is impossible."""
        if not self._text:
            raise RegionError(NO_GRAPHS)
        tally = _RegionTally(convention, self.phase)
        products = read_graph(self._text).products(self._sizes, is_backward=self.is_backward, matters=matters)
        for product in products:
            tally.add_product(product)
        if MASK_NOT_READ in tally.pairs.notes:
            raise RegionError("the values of a mask or of lengths inside compiled code are unknown")
        self.entries, self.uncounted = tally.entries, tally.uncounted


class CompiledRegions:
    """Watches the calls of compiled regions on threads for which `is_watched()` holds.

    `ran` receives each call; it is called on the thread that makes the call, before the region runs.
    """

    def __init__(self, is_watched: Callable[[], bool], ran: Callable[[Any, Any], None]) -> None:
        self._is_watched, self._ran = is_watched, ran
        self._local = threading.local()

    def watch(self) -> Callable[[], None]:
        """Begin to watch; returns what ends that."""
        return compiler.replace_region_call(self._call)

    def is_inside(self) -> bool:
        """Whether this thread runs a region's code: its operators are counted from the graph."""
        return bool(getattr(self._local, "depth", 0))

    def _call(self, run: Callable[[Any, Any], Any], region: Any, inputs: Any) -> Any:
        if self.is_inside() or not self._is_watched():
            return run(region, inputs)
        self._ran(region, inputs)
        self._local.depth = 1
        try:
            return run(region, inputs)
        finally:
            self._local.depth = 0


def reason_not_to_observe() -> str | None:
    """Why a step of this process must not be observed; else None."""
    if (missing := why_not_to_observe()) is not None:
        return missing
    if not compiler.has_compiled():
        return None
    if not compiler.guards_ignore_modes():
        return RECOMPILES
    if compiler.compiles_backward_passes():
        return "compiled autograd merges the backward passes of different operators"
    return None


def _size(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return value if isinstance(value, int) else None


class _RegionTally(CallTally):
    """Counts products of one region."""

    def __init__(self, convention: Convention, phase: str) -> None:
        super().__init__(convention)
        self._region_phase = phase
        self._used: frozenset[int] = frozenset()

    def add_product(self, product: Product) -> None:
        """Count a product."""
        if product.name.startswith(_TRITON):
            self.uncounted["triton::kernel in compiled code"] += 1
            return
        self._used = product.used
        phase = "recompute" if product.recomputes else self._region_phase
        device_type = product.device.partition(":")[0]
        call = product.name, product.operator, product.args, product.kwargs, product.out
        try:
            entry = self.add(phase, device_type, *call)
            if entry is not None and product.executed is not None:
                formula = OPERATOR_FORMULAS[product.name]
                entry.executed = int(formula(*product.executed, **product.kwargs, out=product.out))
        except RegionError:
            raise
        except Exception as error:
            raise RegionError(
                f"counting {product.name} in compiled code failed: {one_line(error)}"
            ) from error

    def _set_attention_flops(self, entry: Entry, work: AttentionWork, node: Any) -> None:
        edges = GradientEdges(position in self._used for position in range(3))
        super()._set_attention_flops(entry, work, edges if work.backward else None)

    def _evaluated(self, function: Any, shape: Any, device: Any) -> Value | None:
        raise RegionError(
            "the pairs that a flex-attention mask function allows are unknown in a training run"
        )
