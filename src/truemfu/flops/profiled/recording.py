"""What torch.profiler recorded of a step, read with our formulas.

    events of all threads ──► operators ──► formula ──► forward | backward | recompute

A product is recorded several times over: `aten::linear` calls `aten::addmm`, `aten::convolution` calls the
backend's own. It counts once, at the outermost operator that a formula knows, where a dispatch mode would see
it. What autograd's nodes run is backward; what runs there with
gradients enabled is a checkpointed stretch of the forward pass run again, so recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...convention import Convention
from ...errors import UsageError, one_line
from ..attention.kernels import KERNELS, AttentionWork, work_of_kernel
from ..attention.masks import PairCounter
from ..flop_count import FlopCount
from ..operators.dtype_names import dtype_name
from ..operators.formulas import RecurrentWork
from ..operators.matrix_work import (
    INDEX_DTYPES,
    apply_formula,
    does_matrix_work,
    factors,
    is_torch_own,
    may_be_matrix_work,
)
from ..registry import OPERATOR_FORMULAS
from .recorded_call import LazyResult, RecordedCall, has_data, is_composite, is_tensor, tensors_of
from .recorded_place import COMPILING, NODE, Place, is_call, is_function, place_of_node

METHOD = "torch.profiler"

_SDPA = "aten::scaled_dot_product_attention"
_SOFTMAX = frozenset(("aten::_softmax", "aten::_safe_softmax"))
_COMPILED = "CompiledFunction"
_TRITON_TEMPLATE = "triton_tem_"
_REPLAYS = frozenset(("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"))

_ALL_GRADIENTS = "every gradient of a fused attention kernel was taken as needed"
_MASK_NOT_READ = "an attention mask was not read: documents packed into one row count as one sequence"
_PLAIN_ATTENTION = "attention in plain operators, where there is any, is counted with all its pairs"
_RECURRENT_GRADIENTS = (
    "every gradient of a recurrent kernel but that of its initial state was taken as needed"
)
_COMPILED_NOW = "code was compiled in the measured step: what the compiler ran is left out"
_COMPILED_CODE = "recomputation inside compiled code counts as backward: it cannot be told apart"
_OWN_BACKWARD = (
    "recomputation inside a custom Function's backward counts as backward: it cannot be told apart"
)
_PACKED = "attention over packed sequences is not counted: their lengths are not recorded"


def read_recording(recording: Any, convention: Convention) -> FlopCount:
    """The FLOPs of a recorded step."""
    return _Reading(recording, convention).count()


class _Reading:
    """Goes through one recording and adds up."""

    def __init__(self, recording: Any, convention: Convention) -> None:
        self._recording = recording
        self._convention = convention
        self._pairs = PairCounter(convention, None)
        self._raw_events: dict[int, Any] = {}
        self._calls = 0
        self._totals: Counter[str] = Counter()
        self._by_operator: Counter[str] = Counter()
        self._by_dtype: Counter[str] = Counter()
        self._uncounted: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._true_dims: dict[tuple[int, int], tuple[int, int]] = {}

    def count(self) -> FlopCount:
        roots = self._recording.experimental_event_tree()
        for root in sorted(roots, key=lambda event: event.start_time_ns):  # forward before backward
            self._visit(root, Place())
        if not self._calls:
            raise UsageError("no operator was recorded: the step ran nothing, or another profiler took over")
        return FlopCount(
            forward=self._totals["forward"],
            backward=self._totals["backward"],
            recompute=self._totals["recompute"],
            by_module={"": self._totals["forward"] + self._totals["backward"]},
            by_operator=dict(self._by_operator),
            by_dtype=dict(self._by_dtype),
            uncounted=dict(self._uncounted),
            method=METHOD,
            convention=self._convention,
            notes=(*self._pairs.notes, *self._notes),
        )

    def _visit(self, event: Any, place: Place) -> int:
        """Count an event and what is beneath it; how many products were found, counted or not."""
        name: str = event.name
        if COMPILING in name:
            self._notes[_COMPILED_NOW] = None
            return 0
        if name.startswith(NODE):
            found = self._beneath(event, place_of_node(event))
            if found and is_function(event):
                self._notes[_OWN_BACKWARD] = None
            return found
        if name.startswith(_TRITON_TEMPLATE) or name in _REPLAYS:
            return self._miss(name)
        if not is_call(event):
            return self._beneath(event, place)
        self._calls += 1
        if event.extra_fields.sequence_number >= 0:
            place = replace(place, phase=place.enabled)
        return self._operator(event, place) if "::" in name else self._function(event, place)

    def _beneath(self, event: Any, place: Place) -> int:
        return sum([self._visit(child, place) for child in event.children])

    def _miss(self, name: str) -> int:
        self._uncounted[name] += 1
        return 1

    def _function(self, event: Any, place: Place) -> int:
        """A function with its own gradient, compiled or written by hand: its operators are beneath.

        One that takes two or more matrices and beneath which nothing was found may run kernels nobody sees.
        """
        found = self._beneath(event, place)
        if event.name.startswith(_COMPILED):
            self._notes[_COMPILED_CODE] = None
            return found
        inputs = event.extra_fields.inputs
        has_gradient = event.extra_fields.sequence_number >= 0  # else it is a step of torch's dispatcher
        unseen = has_gradient and has_data(inputs) and _may_multiply(inputs)
        return self._miss(event.name) if unseen and not found else found

    def _operator(self, event: Any, place: Place) -> int:
        name, inputs = event.name, event.extra_fields.inputs
        if name == _SDPA and is_tensor(inputs[0]) and is_tensor(inputs[2]):  # nested tensors are not recorded
            place = replace(place, head_dims=(inputs[0].sizes[-1], inputs[2].sizes[-1]))
        elif name in _SOFTMAX and self._pairs.masks_matter:
            self._notes[_PLAIN_ATTENTION] = None
        known = name in KERNELS or name in OPERATOR_FORMULAS
        if not known and _is_without_products(name, len(inputs)):
            return self._beneath(event, place) if event.children and not has_data(inputs) else 0
        if not has_data(inputs):
            return self._beneath(event, place)
        if not known and not does_matrix_work(name):
            return self._beneath(event, place) or self._stranger(event)
        # a composite operator, and one under autocast, calls the operator that does the work
        calls_on = is_composite(name, len(inputs)) or any(child.name == name for child in event.children)
        if calls_on and (found := self._beneath(event, place)):
            return found
        if event.correlation_id == place.stopped:
            return 1
        return self._product(event, place) if known else self._miss(name)

    def _stranger(self, event: Any) -> int:
        """An operator that no formula knows and beneath which nothing was found."""
        name, inputs = event.name, event.extra_fields.inputs
        if is_torch_own(name) or not _may_multiply(inputs):
            return 0
        call = self._call(event)
        args, kwargs = call.operands
        try:
            suspect = may_be_matrix_work(name, args, kwargs, call.result())
        except Exception:  # it cannot run without data, so what it takes has to do
            suspect = True
        return self._miss(name) if suspect else 0

    def _product(self, event: Any, place: Place) -> int:
        name, inputs = event.name, event.extra_fields.inputs
        try:
            flops = self._flops(event, self._work(event), place)
        except Exception as error:  # what the formula asks for is not recorded, such as nested tensors
            if found := self._beneath(event, place):
                return found
            self._notes[f"{name} is not counted: {one_line(error)}"] = None
            flops = None
        if flops is None:
            return self._miss(name)
        needed, executed = flops
        operand = factors(name, inputs)[0]
        if is_tensor(operand) and operand.dtype.is_complex:
            needed, executed = 4 * needed, 4 * executed
        if place.phase == "recompute":
            self._totals["recompute"] += executed
        elif executed:
            self._totals[place.phase] += needed
            self._totals["recompute"] += executed - needed
            self._by_operator[name.replace("::", ".")] += needed
            self._by_dtype[_dtype(name, operand)] += needed
        return 1

    def _work(self, event: Any) -> Any:
        name, call = event.name, self._call(event)
        if name in KERNELS:
            return work_of_kernel(name, call.by_name)
        args, kwargs = call.operands
        return apply_formula(name, OPERATOR_FORMULAS[name], args, kwargs, LazyResult(call))

    def _flops(self, event: Any, work: Any, place: Place) -> tuple[int, int] | None:
        """(needed, executed) of one call; None where the recording says too little."""
        if isinstance(work, AttentionWork):
            return self._attention(event, work, place)
        if isinstance(work, RecurrentWork):
            if not work.backward:
                return work.forward_flops(), work.forward_flops()
            self._notes[_RECURRENT_GRADIENTS] = None
            tensors = 4 * sum(len(layer) for layer in work.layers)
            needed = work.needed_backward_flops([True, *[True] * tensors, False, False])
            return needed, max(needed, work.executed_backward_flops())
        return int(work), int(work)

    def _attention(self, event: Any, work: AttentionWork, place: Place) -> tuple[int, int] | None:
        if work.cumulative is not None and any(c is not None and c.numel() > 2 for c in work.cumulative):
            self._notes[_PACKED] = None
            return None
        work = self._with_true_dims(event, work, place)
        if work.mask is not None and not self._pairs.masks_matter:
            self._notes[_MASK_NOT_READ] = None
        shape = (work.samples, work.heads, work.q_len, work.k_len)
        needed, executed = self._pairs.dense(shape, [] if work.mask is None else [None], work.band, "")
        if not work.backward:
            per_pair = work.forward_flops(1) // work.heads
            return per_pair * needed, per_pair * executed
        self._notes[_ALL_GRADIENTS] = None
        return (
            work.needed_backward_flops(1, q=True, k=True, v=True) // work.heads * needed,
            work.executed_backward_flops(1) // work.heads * executed,
        )

    def _with_true_dims(self, event: Any, work: AttentionWork, place: Place) -> AttentionWork:
        """SDPA pads head sizes to a multiple of eight for some kernels; what it was called with counts."""
        dims = (work.qk_dim, work.v_dim)
        true_dims = place.head_dims or dims
        if work.backward and self._true_dims and place.node is not None:
            node = self._raw(place.node)
            true_dims = self._true_dims.get((node.fwd_thread_id(), node.sequence_nr()), dims)
        elif true_dims != dims:
            raw = self._raw(event)
            self._true_dims[raw.start_thread_id(), raw.sequence_nr()] = true_dims
        return work if true_dims == dims else replace(work, qk_dim=true_dims[0], v_dim=true_dims[1])

    def _call(self, event: Any) -> RecordedCall:
        inputs = event.extra_fields.inputs
        return RecordedCall(event.name, inputs, lambda: self._raw(event).concrete_inputs())

    def _raw(self, event: Any) -> Any:
        """The event as it is outside the tree, with lists of numbers and the thread of the forward pass."""
        if not self._raw_events:
            self._raw_events = {raw.correlation_id(): raw for raw in self._recording.events()}
        return self._raw_events[event.correlation_id]


@lru_cache(maxsize=4096)
def _is_without_products(name: str, arguments: int) -> bool:
    """Whether an operator is one of torch's own, whole for autograd, that multiplies no matrices."""
    return is_torch_own(name) and not is_composite(name, arguments) and not does_matrix_work(name)


def _may_multiply(inputs: Sequence[Any]) -> bool:
    """Whether recorded arguments could be factors of a product: two or more matrices, not all alike, or
    what could be queries, keys and values."""
    matrices = [t for t in tensors_of(inputs) if len(t.sizes) >= 2 and t.dtype not in INDEX_DTYPES]
    if len(matrices) >= 3 and all(len(t.sizes) >= 3 for t in matrices):
        return True
    return len({tuple(t.sizes) for t in matrices}) >= 2


def _dtype(name: str, operand: Any) -> str:
    if not is_tensor(operand):
        return "unknown"
    return dtype_name(operand.dtype, operand.device.type, convolution="conv" in name)
