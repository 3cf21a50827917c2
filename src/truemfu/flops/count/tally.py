"""The tally of a step: the FLOPs of each operator that ran, by phase.

    operator ──► formula ──► needed, executed ──► forward | backward | recompute, module, operator, dtype

`phases.py` finds the phase; inside a custom Function the data flow decides (`data_flow.py`). Where a fused
kernel executes more than autograd needs, the surplus is recomputation too.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from ...convention import Convention
from ...torch_private.dispatch import (
    OpOverload,
    arguments_by_name,
    current_autograd_node,
    current_graph_task_id,
    disable_modes,
    next_sequence_nr,
)
from ..attention import kernels as attention_kernels
from ..attention.eager import EagerAttention, Scale, readable
from ..attention.kernels import AttentionWork
from ..attention.masks import PairCounter, mask_of_function
from ..attention.pairs import FULL
from ..flop_count import FlopCount
from ..operators.dtype_names import dtype_name
from ..operators.formulas import RecurrentWork
from ..operators.matrix_work import (
    apply_formula,
    does_matrix_work,
    factors,
    groups_and_rows,
    input_channels,
    may_be_matrix_work,
)
from ..operators.sparse import is_sparse
from ..registry import OPERATOR_FORMULAS
from ..shadow.values import Value
from .data_flow import DataFlow, Ran, in_function
from .padding import PAD, PaddedHeads
from .phases import phase_in_backward

PRODUCTS = frozenset(f"aten::{n}" for n in "mm addmm _addmm_activation bmm baddbmm".split())


@dataclass(eq=False, slots=True)
class Entry:
    """One counted call: what was needed, what was executed, and where.

    `shape` is (m, n, k) of a plain product, else None. `blocked` is what a fused attention kernel
    (`is_attention`) executes if it skips only whole blocks of the mask; None if unknown.
    `channels` are the input channels of a convolution without groups, `groups` the matrices of a grouped
    product and the rows (or columns) they share: (matrices, rows); else None.
    """

    phase: str
    module: str
    operator: str
    dtype: str
    sequence: int | None
    """The number of the autograd node that it made, if gradients were enabled."""
    needed: int = 0
    executed: int = 0
    shape: tuple[int, int, int] | None = None
    is_attention: bool = False
    blocked: int | None = None
    channels: int | None = None
    groups: tuple[int, int] | None = None


class Tally:
    """Adds up the FLOPs of the operators that are reported to it; `CountingMode` and `StepObserver` do.

    `documents` are the lengths of packed documents, sample by sample, or None.
    """

    def __init__(
        self,
        convention: Convention,
        *,
        documents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.convention = convention
        self.pairs = PairCounter(convention, documents)
        self.entries: list[Entry] = []
        self.operators = 0
        self.uncounted: Counter[str] = Counter()
        self._flow = DataFlow()
        self._is_launching = False
        self._paths: list[str] = [""]
        self._starts: list[int] = [0]
        self._start_paths: list[str] = [""]
        self._scales: dict[int, Scale] = {}
        self._forward_work: dict[int, tuple[int, int]] = {}
        self._padded = PaddedHeads()
        self._eager = EagerAttention(self) if self.pairs.masks_matter else None

    def enter_module(self, path: str) -> None:
        """Record that a module's forward begins."""
        self._paths.append(path)
        self._mark(path)

    def leave_module(self) -> None:
        """Record that the module's forward has ended, by return or exception."""
        self._paths.pop()
        self._mark(self._paths[-1])

    def _mark(self, path: str) -> None:
        self._starts.append(next_sequence_nr())
        self._start_paths.append(path)

    def _module_of(self, node: Any) -> str:
        """The module whose forward created this autograd node: nodes are numbered in order of creation."""
        return self._start_paths[max(0, bisect_right(self._starts, node._sequence_nr()) - 1)]

    def record(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that has run."""
        entry = self._count(name, func, args, kwargs, out)
        self._flow.record(Ran(name, func, args, kwargs, out), entry)
        if (
            self._eager is not None
            and isinstance(func, OpOverload)
            and self._eager.concerns(func.overloadpacket)
            and self._phase(current_autograd_node()) != "backward"
        ):
            self._eager.record(func.overloadpacket, args, out, entry)

    def _phase(self, node: Any) -> str:
        """The phase of an operator that runs now, in this autograd node if it is not None."""
        return "forward" if current_graph_task_id() == -1 else phase_in_backward(node)

    def record_launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a kernel of this name, launched outside the dispatcher with these arguments."""
        arguments, entry = [*args, *kwargs.values()], None
        if name in OPERATOR_FORMULAS:
            entry = self._count(name, None, args, kwargs, None)
        else:
            self.uncounted[name] += 1
        self._flow.record_launch(arguments, entry)

    @contextmanager
    def inside_launch(self) -> Iterator[None]:
        """A context in which a launched kernel reads its arguments' pointers; these are not exports."""
        self._is_launching = True
        try:
            yield
        finally:
            self._is_launching = False

    def record_export(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor exported from torch by this call: inside a model it may become a factor of a
        product that torch does not see. Integers are indices, and a single number is not a factor."""
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if self._is_launching:
            return
        if is_number and tensor.numel() > 1 and (len(self._paths) > 1 or in_function()):
            self._flow.record_export()
            self.uncounted[name] += 1

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Entry | None:
        work: Any
        if name == PAD:
            self._padded.record(args, out)
            return None
        if (kernel := attention_kernels.KERNELS.get(name)) is not None:
            work = attention_kernels.work_of_kernel(name, arguments_by_name(func, args, kwargs))
            if kernel.is_padded:
                work = self._padded.without(work, args)
        elif name in ("higher_order::flex_attention", "higher_order::flex_attention_backward"):
            work = attention_kernels.work_of_flex(name, args)
        elif (formula := OPERATOR_FORMULAS.get(name)) is not None:
            work = apply_formula(name, formula, args, kwargs, out)
        else:
            if does_matrix_work(name) or may_be_matrix_work(name, args, kwargs, out):
                self.uncounted[name] += 1
            return None
        if isinstance(work, int) and work == 0:
            return None
        node = current_autograd_node()
        phase = self._phase(node)
        module = self._module_of(node) if phase == "backward" and node is not None else self._paths[-1]
        operand = next(iter(factors(name, args)), None)
        sequence = next_sequence_nr() - 1 if torch.is_grad_enabled() else None
        entry = Entry(phase, module, name.replace("::", "."), _dtype(name, operand), sequence)
        times = 4 if isinstance(operand, torch.Tensor) and operand.is_complex() else 1
        self._set_flops(entry, work, times, node if phase == "backward" else None)
        if name in PRODUCTS:
            left, right = factors(name, args)[:2]
            if not is_sparse(left) and not is_sparse(right):
                entry.shape = left.shape[-2], right.shape[-1], left.shape[-1]
        elif "convolution" in name:
            entry.channels = input_channels(arguments_by_name(func, args, kwargs))
        elif "grouped_mm" in name:
            entry.groups = groups_and_rows(arguments_by_name(func, args, kwargs))
        self.entries.append(entry)
        return entry

    def _when_known(self, resolve: Callable[[], None]) -> None:
        """Run a function that needs the values of tensors which it holds: at once."""
        resolve()

    def value(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor for a function given to `_when_known`; None if it is unknown."""
        return readable(tensor)

    def value_later(self, tensor: torch.Tensor, scores: torch.Tensor) -> Callable[[], Value | None]:
        """The same for a tensor that is added to a product, and may not matter."""
        value = readable(tensor)
        return lambda: value

    def _set_flops(self, entry: Entry, work: Any, times: int, node: Any) -> None:
        """Set what a call needed and executed, `times` over; `node` is that of a backward pass, else None."""
        if isinstance(work, AttentionWork):
            self._set_attention_flops(entry, work, node)
        elif isinstance(work, RecurrentWork):
            needed = executed = work.forward_flops()
            if work.backward:
                needed = work.needed_backward_flops([edge is not None for edge, _ in node.next_functions])
                executed = max(needed, work.executed_backward_flops())
            entry.needed, entry.executed = times * needed, times * executed
        else:
            entry.needed = entry.executed = times * int(work)
            if node is not None and (scale := self._scales.get(node._sequence_nr())) is not None:
                self._when_known(partial(_rescale, entry, scale))

    def _set_attention_flops(self, entry: Entry, work: AttentionWork, node: Any) -> None:
        entry.is_attention = True
        q = k = v = True
        if not work.backward:
            if torch.is_grad_enabled():
                self._forward_work[next_sequence_nr() - 1] = (work.qk_dim, work.v_dim)
        elif node is not None:
            edges = [edge is not None for edge, _ in node.next_functions][:3]
            if len(edges) == 3:
                q, k, v = edges
            if (dims := self._forward_work.get(node._sequence_nr())) is not None:
                work = replace(work, qk_dim=dims[0], v_dim=dims[1])
        pairs = self._pairs(work, entry.module)
        has_blocks, work = work.mask_function is None, work.without_tensors()

        def resolve() -> None:
            needed, executed, blocked = pairs()
            if work.backward:
                per_needed = work.needed_backward_flops(1, q=q, k=k, v=v) // work.heads
                per_executed = work.executed_backward_flops(1)
            else:
                per_needed = work.forward_flops(1) // work.heads
                per_executed = work.forward_flops(1)
            entry.needed = per_needed * needed
            entry.executed = per_executed // work.heads * executed
            entry.blocked = per_executed * blocked if has_blocks else None

        self._when_known(resolve)

    def _pairs(self, work: AttentionWork, module: str) -> Callable[[], tuple[int, int, int]]:
        """Gives the pairs of an attention kernel: needed and executed ones of all samples and heads, and
        for one head those executed if only whole blocks are skipped."""
        heads, band = work.heads, work.band
        if work.cumulative is not None:
            ends_q, ends_k = (self.value(c if c is not None else work.cumulative[0]) for c in work.cumulative)

            def packed() -> tuple[int, int, int]:
                lengths = _lengths(ends_q), _lengths(ends_k)
                pairs = self.pairs.packed(*lengths, heads, band)
                return pairs, pairs, sum(itertools.starmap(band.blocked_pairs, zip(*lengths, strict=True)))

            return packed
        shape = (work.samples, heads, work.q_len, work.k_len)
        masks: list[Value | None] = []
        if self._eager is not None:
            if work.mask is not None:
                masks.append(self._eager.allowed_by(work.mask))
            if work.mask_function is not None:
                masks.append(self._evaluated(work.mask_function, shape, work.device))

        def dense() -> tuple[int, int, int]:
            blocked = shape[0] * band.blocked_pairs(shape[2], shape[3])
            return (*self.pairs.dense(shape, masks, band, module), blocked)

        return dense

    def _evaluated(self, function: Callable[..., Any], shape: Sequence[int], device: Any) -> Value | None:
        """A flex-attention mask, computed on real indices."""
        with disable_modes():
            allowed = mask_of_function(function, shape, partial(torch.arange, device=device))
        return None if allowed is None else readable(allowed)

    def resolve_eager(self, shape: Sequence[int], masks: Sequence[Value | None]) -> Scale:
        """For scores of this shape that enter a softmax: converts plain FLOPs to needed and executed ones."""
        module, whole = self._paths[-1], prod(shape)
        pairs = functools.cache(lambda: self.pairs.dense(shape, masks, FULL, module))

        def scale(flops: int) -> tuple[int, int]:
            needed, executed = pairs()
            return flops // whole * needed, flops // whole * executed

        return scale

    def rescale(self, entry: Entry, scale: Scale) -> None:
        """Rescale a product that turns out to belong to attention, and its gradients later."""
        self._when_known(partial(_rescale, entry, scale))
        if entry.sequence is not None:
            self._scales[entry.sequence] = scale

    def training_entries(self) -> Sequence[Entry]:
        """The calls that belong to the step's training."""
        return self.entries

    def result(self, *, method: str, notes: Sequence[str] = ()) -> FlopCount:
        """Everything counted so far, added up."""
        totals: Counter[str] = Counter()
        by_module: defaultdict[str, int] = defaultdict(int)
        by_operator: defaultdict[str, int] = defaultdict(int)
        by_dtype: defaultdict[str, int] = defaultdict(int)
        for entry in self.training_entries():
            if entry.phase == "recompute":
                totals["recompute"] += entry.executed
                continue
            totals[entry.phase] += entry.needed
            totals["recompute"] += entry.executed - entry.needed
            by_operator[entry.operator] += entry.needed
            by_dtype[entry.dtype] += entry.needed
            by_module[entry.module] += entry.needed
        return FlopCount(
            forward=totals["forward"],
            backward=totals["backward"],
            recompute=totals["recompute"],
            by_module=_with_ancestors(by_module),
            by_operator=dict(by_operator),
            by_dtype=dict(by_dtype),
            uncounted=dict(self.uncounted),
            method=method,
            convention=self.convention,
            notes=(*self.pairs.notes, *notes),
        )


def _with_ancestors(own: Mapping[str, int]) -> dict[str, int]:
    """FLOPs per module including its children, from each module's own FLOPs; "" is the whole model."""
    total = Counter({"": sum(own.values())})
    for path, flops in own.items():
        parts = path.split(".") if path else []
        for depth in range(1, len(parts) + 1):
            total[".".join(parts[:depth])] += flops
    return dict(total)


@functools.cache
def operator_name(func: Any) -> str:
    """An operator's name without its overload: `aten::mm`; `higher_order::…` if it takes functions."""
    if isinstance(func, OpOverload):
        return str(func.name()).partition(".")[0]
    return f"higher_order::{func.name()}" if hasattr(func, "name") else str(func)


def _dtype(name: str, operand: Any) -> str:
    if not isinstance(operand, torch.Tensor):
        return "unknown"
    return dtype_name(operand.dtype, operand.device.type, convolution="conv" in name)


def _rescale(entry: Entry, scale: Scale) -> None:
    entry.needed, entry.executed = scale(entry.needed)


def _lengths(cumulative: Value | None) -> list[int]:
    if cumulative is None:
        raise RuntimeError("the cumulative lengths of packed sequences are unknown")
    with disable_modes():
        ends = [int(n) for n in cumulative.tensor().tolist()]
    return [b - a for a, b in itertools.pairwise(ends)]
