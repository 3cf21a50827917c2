"""The tally of a real training step: like that of a count, but it reads no value and holds no tensor.

Phases besides those of a count: what runs without gradients, outside of a training pass and of Functions, is
work of a reference model, an evaluation or the optimizer, and is kept apart. Values on the device are copied
without waiting, and what depends on them is resolved after the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...convention import Convention
from ...torch_private.compiler import is_compiled_node
from ...torch_private.dispatch import (
    FakeTensor,
    current_autograd_node,
    current_graph_task_id,
    next_sequence_nr,
)
from ..attention import kernels as attention_kernels
from ..attention.masks import MASK_NOT_READ
from ..count.data_flow import is_custom
from ..count.tally import Entry, Tally, operator_name
from ..operators.matrix_work import does_matrix_work, is_torch_own
from ..registry import OPERATOR_FORMULAS
from ..shadow.values import Value
from .calls import Call, function_call
from .compiled import RegionRun
from .copies import Copies, Uncopied
from .graphs import Replay
from .region_graph import RegionError

APART = "without gradients"
"""The phase of work that trains nothing."""

UNSEEN = "part of its forward pass ran on another thread or before the observation began"


OTHER_BACKEND = "torch.compile ran its backward pass with a backend other than inductor"


class ObservedTally(Tally):
    """Adds up the FLOPs of a step while it runs; `problem` is the reason why they are unknown, or None."""

    def __init__(self, convention: Convention, *, is_capture: bool = False) -> None:
        super().__init__(convention)
        self._is_capture = is_capture
        self._is_region = False
        self.problem: str | None = None
        self.copies = Copies()
        self.training_passes = 0
        self.unseen_forward = False
        self.runs: list[RegionRun | Replay] = []
        """Calls of compiled code, and replays: what they multiply follows `entries` once it is resolved."""
        self._is_work: dict[Any, bool] = {}
        self._pending: list[Callable[[], None]] = []
        self._uncounted_runs: list[RegionRun | Replay] = []
        self._nodes: dict[int, str] = {}
        """The operator that ran first after the node of this number was made: its own."""
        self._ranges: dict[int, list[int]] = {}
        """By thread, the first and last number of its nodes."""

    def fail(self, reason: str) -> None:
        """Record why the FLOPs of this step are unknown; the first reason stays."""
        self.problem = self.problem or reason

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that has run."""
        self.operators += 1
        if torch.is_grad_enabled():
            self._mark_node(func)
        is_work = self._is_work.get(func)
        if is_work is None:
            is_work = self._is_work[func] = _may_be_work(operator_name(func))
        if is_work or self._eager is not None:
            if not _is_on_device(out):
                return
            self.record(operator_name(func), func, args, kwargs, out)
        elif self._flow.is_active():
            self._flow.record(operator_name(func), func, args, kwargs, out, None)

    def saw_region(self, region: Any, inputs: Any) -> None:
        """Record that a region of compiled code is about to run; it is counted after the step."""
        node = current_autograd_node()
        self._is_region = True
        run = RegionRun(region, inputs, self._phase(node), position=len(self.entries))
        self._is_region = False
        if run.is_backward and node is not None and not self._is_seen(node):
            self.unseen_forward = True
            self.fail(UNSEEN)
        self.add_later(run)

    def add_later(self, run: RegionRun | Replay) -> None:
        """Record work that is counted when the step is resolved."""
        self._uncounted_runs.append(run)
        self.runs.append(run)

    def _mark_node(self, func: Any) -> None:
        number = next_sequence_nr() - 1
        self._nodes.setdefault(number, operator_name(func))
        seen = self._ranges.get(threading.get_ident())
        if seen is None:
            self._ranges[threading.get_ident()] = [number, number]
        else:
            seen[1] = number

    def mark_start(self) -> None:
        """Record that nodes which this thread makes from now on are seen."""
        self._ranges[threading.get_ident()] = [next_sequence_nr(), next_sequence_nr()]

    def _is_seen(self, node: Any) -> bool:
        """Whether the forward of a node ran while this step was observed; a graph may be a backward pass."""
        if self._is_capture:
            return True
        number = node._sequence_nr()
        if is_custom(node):
            return any(first - 1 <= number <= last + 1 for first, last in self._ranges.values())
        operator = self._nodes.get(number)
        if operator is None:
            return False
        made_by = _plain(operator.partition("::")[2])
        return made_by not in _BY_NODE or made_by == _plain(node.name().partition("Backward")[0])

    def _phase(self, node: Any) -> str:
        if current_graph_task_id() != -1:
            if is_compiled_node(node) and not self._is_region:
                self.fail(OTHER_BACKEND)
            return super()._phase(node)
        if torch.is_grad_enabled() or self.training_passes:
            return "forward"
        return "forward" if function_call() in (Call.WITH_GRADIENTS, Call.UNKNOWN) else APART

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Entry | None:
        try:
            return super()._count(name, func, args, kwargs, out)
        except Uncopied as reason:
            self.fail(str(reason))
            return None

    def _set_flops(self, entry: Entry, work: Any, times: int, node: Any) -> None:
        super()._set_flops(entry, work, times, node)
        if node is not None and not self.unseen_forward and not self._is_seen(node):
            self.unseen_forward = True
            self.fail(UNSEEN)

    def _when_known(self, resolve: Callable[[], None]) -> None:
        self._pending.append(resolve)

    def resolve(self) -> None:
        """Compute what depends on values, which must be ready."""
        pending, self._pending = self._pending, []
        for resolve in pending:
            resolve()
        runs, self._uncounted_runs = self._uncounted_runs, []
        for run in runs:
            try:
                run.count(self.convention)
            except RegionError as reason:
                self.fail(str(reason))
                break
            self.entries.extend(run.entries)
            self.uncounted.update(run.uncounted)
        if MASK_NOT_READ in self.pairs.notes:
            self.fail("an attention mask could not be read")

    def training_entries(self) -> Sequence[Entry]:
        return [entry for entry in self.entries if entry.phase != APART]

    def _value(self, tensor: torch.Tensor) -> Value | None:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return None
        return self.copies.value(tensor)

    def _evaluated(self, function: Callable[..., Any], shape: Sequence[int], device: Any) -> Value | None:
        raise Uncopied("the pairs that a flex-attention mask function allows are unknown in a training run")


def _may_be_work(name: str) -> bool:
    return (
        name in attention_kernels.KERNELS
        or name in OPERATOR_FORMULAS
        or does_matrix_work(name)
        or not is_torch_own(name)
    )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_BY_NODE = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "mv"))
"""Operators whose node is named after them."""


def _is_on_device(out: Any) -> bool:
    """Whether an operator's result is a real tensor, or has none."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return not (isinstance(first, torch.Tensor) and (first.is_meta or isinstance(first, FakeTensor)))
