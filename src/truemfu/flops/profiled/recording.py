"""Applies our formulas to the recording of a step by torch.profiler.

    events of all threads ──► operators ──► formula ──► forward | backward | recompute

A product is recorded several times: `aten::linear` calls `aten::addmm`, `aten::convolution` calls the
backend's own. It counts once, at the outermost operator with a formula, where a dispatch mode would see it.
What autograd nodes run is backward; what runs there with gradients enabled is a checkpointed region of the
forward pass that is run again, so recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...convention import Convention
from ...errors import UsageError, one_line
from ..attention.kernels import KERNELS, AttentionWork
from ..count.call_tally import CallTally, GradientEdges
from ..count.tally import Entry
from ..flop_count import FlopCount
from ..operators.formulas import RecurrentWork
from ..operators.matrix_work import (
    INDEX_DTYPES,
    does_matrix_work,
    factors,
    is_torch_own,
    may_be_matrix_work,
)
from ..registry import OPERATOR_FORMULAS
from .recorded_call import LazyResult, RecordedCall, has_data, is_composite, is_tensor, tensors_of
from .recorded_phase import COMPILING, NODE, EventContext, context_of_node, is_call, is_function

METHOD = "torch.profiler"

_SDPA = "aten::scaled_dot_product_attention"
_SOFTMAX = frozenset(("aten::_softmax", "aten::_safe_softmax"))
_COMPILED = "CompiledFunction"
_TRITON_TEMPLATE = "triton_tem_"
_REPLAYS = frozenset(("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"))

_ALL_GRADIENTS = "all gradients that a fused attention kernel computes are counted as needed"
_MASK_NOT_READ = "an attention mask was not read: documents packed into one row count as one sequence"
_PLAIN_ATTENTION = "attention in plain operators, if there is any, is counted with all its pairs"
_RECURRENT_GRADIENTS = (
    "all gradients that a recurrent kernel computes are counted as needed, except that of its initial state"
)
_COMPILED_NOW = "code was compiled during the measured step: operators that the compiler ran are not counted"
_COMPILED_CODE = "recomputation inside compiled code counts as backward: they cannot be distinguished"
_OWN_BACKWARD = (
    "recomputation inside a custom Function's backward counts as backward: they cannot be distinguished"
)
_PACKED = "attention over packed sequences is not counted: their lengths are not recorded"


class _LengthsUnknown(Exception):
    """Of packed sequences."""


class Recording(CallTally):
    """Walks through one recording and counts its operators."""

    def __init__(self, recording: Any, convention: Convention) -> None:
        super().__init__(convention)
        self._recording = recording
        self._raw_events: dict[int, Any] = {}
        self._notes: dict[str, None] = {}
        self._unpadded_dims: dict[tuple[int, int], tuple[int, int]] = {}
        self._event: Any = None
        self._context = EventContext()

    def count(self) -> FlopCount:
        """The FLOPs of the recorded step."""
        roots = self._recording.experimental_event_tree()
        for root in sorted(roots, key=lambda event: event.start_time_ns):  # forward before backward
            self._visit(root, EventContext())
        if not self.operators:
            raise UsageError("no operator was recorded: the step ran nothing, or another profiler took over")
        return self.result(method=METHOD, notes=tuple(self._notes))

    def _visit(self, event: Any, context: EventContext) -> int:
        """Count an event and those below it; returns how many products were found, counted or not."""
        name: str = event.name
        if COMPILING in name:
            self._notes[_COMPILED_NOW] = None
            return 0
        if name.startswith(NODE):
            found = self._visit_children(event, context_of_node(event))
            if found and is_function(event):
                self._notes[_OWN_BACKWARD] = None
            return found
        if name.startswith(_TRITON_TEMPLATE) or name in _REPLAYS:
            return self._add_uncounted(name)
        if not is_call(event):
            return self._visit_children(event, context)
        self.operators += 1
        if event.extra_fields.sequence_number >= 0:
            context = replace(context, phase=context.enabled)
        return self._operator(event, context) if "::" in name else self._function(event, context)

    def _visit_children(self, event: Any, context: EventContext) -> int:
        return sum([self._visit(child, context) for child in event.children])

    def _add_uncounted(self, name: str) -> int:
        self.uncounted[name] += 1
        return 1

    def _function(self, event: Any, context: EventContext) -> int:
        """A custom Function, compiled or written by hand, with its operators below it.

        One that takes two or more matrices and has no products below it may run unrecorded kernels.
        """
        found = self._visit_children(event, context)
        if event.name.startswith(_COMPILED):
            self._notes[_COMPILED_CODE] = None
            return found
        inputs = event.extra_fields.inputs
        has_gradient = event.extra_fields.sequence_number >= 0  # else it is a step of torch's dispatcher
        unseen = has_gradient and has_data(inputs) and _may_multiply(inputs)
        return self._add_uncounted(event.name) if unseen and not found else found

    def _operator(self, event: Any, context: EventContext) -> int:
        name, inputs = event.name, event.extra_fields.inputs
        if name == _SDPA and is_tensor(inputs[0]) and is_tensor(inputs[2]):  # nested tensors are not recorded
            context = replace(context, head_dims=(inputs[0].sizes[-1], inputs[2].sizes[-1]))
        elif name in _SOFTMAX and self.pairs.masks_matter:
            self._notes[_PLAIN_ATTENTION] = None
        known = name in KERNELS or name in OPERATOR_FORMULAS
        if not known and _is_without_products(name, len(inputs)):
            return self._visit_children(event, context) if event.children and not has_data(inputs) else 0
        if not has_data(inputs):
            return self._visit_children(event, context)
        if not known and not does_matrix_work(name):
            return self._visit_children(event, context) or self._unknown_operator(event)
        # a composite operator, and one under autocast, calls the operator that does the work
        calls_others = is_composite(name, len(inputs)) or any(child.name == name for child in event.children)
        if calls_others and (found := self._visit_children(event, context)):
            return found
        if event.correlation_id == context.stopped:
            return 1
        return self._product(event, context) if known else self._add_uncounted(name)

    def _unknown_operator(self, event: Any) -> int:
        """An operator without a formula and without products below it."""
        name, inputs = event.name, event.extra_fields.inputs
        if is_torch_own(name) or not _may_multiply(inputs):
            return 0
        call = self._call(event)
        args, kwargs = call.operands
        try:
            is_suspect = may_be_matrix_work(name, args, kwargs, call.result())
        except Exception:  # it cannot run without data: decide by its inputs alone
            is_suspect = True
        return self._add_uncounted(name) if is_suspect else 0

    def _product(self, event: Any, context: EventContext) -> int:
        name, call = event.name, self._call(event)
        operand = factors(name, event.extra_fields.inputs)[0]
        device_type = operand.device.type if is_tensor(operand) else ""
        self._event, self._context = event, context
        try:
            args, kwargs = call.operands
            self.add(context.phase, device_type, name, call, args, kwargs, LazyResult(call))
        except _LengthsUnknown:
            self._notes[_PACKED] = None
            return self._add_uncounted(name)
        except Exception as error:  # the formula needs something not recorded, such as nested tensors
            if found := self._visit_children(event, context):
                return found
            self._notes[f"{name} is not counted: {one_line(error)}"] = None
            return self._add_uncounted(name)
        return 1

    def _set_flops(self, entry: Entry, work: Any, times: int, node: Any) -> None:
        if isinstance(work, RecurrentWork) and work.backward:
            self._notes[_RECURRENT_GRADIENTS] = None
            tensors = 4 * sum(len(layer) for layer in work.layers)
            node = GradientEdges([True, *[True] * tensors, False, False])
        super()._set_flops(entry, work, times, node)

    def _set_attention_flops(self, entry: Entry, work: AttentionWork, node: Any) -> None:
        if work.cumulative is not None and any(c is not None and c.numel() > 2 for c in work.cumulative):
            raise _LengthsUnknown
        if work.mask is not None and not self.pairs.masks_matter:
            self._notes[_MASK_NOT_READ] = None
        if work.backward:
            self._notes[_ALL_GRADIENTS] = None
        work = self._with_true_dims(replace(work, cumulative=None))
        super()._set_attention_flops(entry, work, None)

    def _with_true_dims(self, work: AttentionWork) -> AttentionWork:
        """The work with the head sizes given to SDPA, which some kernels get padded to a multiple of 8."""
        dims = (work.qk_dim, work.v_dim)
        true_dims = self._context.head_dims or dims
        if work.backward and self._unpadded_dims and self._context.node is not None:
            node = self._raw(self._context.node)
            true_dims = self._unpadded_dims.get((node.fwd_thread_id(), node.sequence_nr()), dims)
        elif true_dims != dims:
            raw = self._raw(self._event)
            self._unpadded_dims[raw.start_thread_id(), raw.sequence_nr()] = true_dims
        return replace(work, qk_dim=true_dims[0], v_dim=true_dims[1])

    def _call(self, event: Any) -> RecordedCall:
        inputs = event.extra_fields.inputs
        return RecordedCall(event.name, inputs, lambda: self._raw(event).concrete_inputs())

    def _raw(self, event: Any) -> Any:
        """The event outside the tree, which has lists of numbers and the thread of the forward pass."""
        if not self._raw_events:
            self._raw_events = {raw.correlation_id(): raw for raw in self._recording.events()}
        return self._raw_events[event.correlation_id]


@lru_cache(maxsize=4096)
def _is_without_products(name: str, arguments: int) -> bool:
    """Whether an operator is one of torch's own, not decomposed before autograd, without matrix products."""
    return is_torch_own(name) and not is_composite(name, arguments) and not does_matrix_work(name)


def _may_multiply(inputs: Sequence[Any]) -> bool:
    """Whether recorded arguments could be factors of a product: two or more matrices, not all of one shape,
    or possible queries, keys and values."""
    matrices = [t for t in tensors_of(inputs) if len(t.sizes) >= 2 and t.dtype not in INDEX_DTYPES]
    if len(matrices) >= 3 and all(len(t.sizes) >= 3 for t in matrices):
        return True
    return len({tuple(t.sizes) for t in matrices}) >= 2
