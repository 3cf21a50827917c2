"""FLOPs and bytes of the operators in a Kineto trace, by the sizes and dtypes it recorded.

ranges of the trace ─► events as torch's own recording has them ─► Recording: our formulas ─► each product
one operator        ─► its call on the meta device ─► bytes that it reads and writes
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from ...convention import Convention
from ...errors import UsageError
from ..count.tally import Entry
from .recorded_call import RecordedCall, is_tensor
from .recorded_phase import NODE, EventContext
from .recording import Recording

_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "short": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}
_TENSORS = "TensorList"
_WRITE_ONLY = frozenset(
    f"aten::{n}"
    for n in "copy_ fill_ zero_ normal_ uniform_ bernoulli_ _foreach_copy_ _foreach_zero_".split()
)
"""Operators that do not read what they change."""
_CPU = torch.device("cpu")


class TracedRange(Protocol):
    """A range of a trace, as its reader has it."""

    name: str
    kind: str
    thread: int
    start: int
    children: list[Any]
    args: Mapping[str, Any]


class OperatorWork(NamedTuple):
    """What a call of an operator multiplied."""

    flops: int
    """As executed; under the causal convention, so pairs that a mask excludes by its kind are left out."""
    dtype: str
    """That of its operands: fp32 may have run as TF32."""
    shape: tuple[int, int, int] | None
    """(m, n, k) of a plain product."""


class TracedWork(NamedTuple):
    """Of the ranges of a step, by their identity."""

    products: Mapping[int, OperatorWork]
    recomputed: frozenset[int]
    """Operators of the forward pass that a checkpoint ran again."""
    uncounted: Mapping[str, int]
    notes: Sequence[str]


class _Traced(Recording):
    """Counts the ranges of a trace, and remembers which range each product is of."""

    def __init__(self, roots: Sequence[_Event]) -> None:
        tree = SimpleNamespace(experimental_event_tree=lambda: roots)
        super().__init__(tree, Convention(attention="causal"))
        self.found: dict[int, Entry] = {}
        self.recomputed: set[int] = set()

    def _raw(self, event: Any) -> Any:
        return event

    def _operator(self, event: Any, context: EventContext) -> int:
        if context.phase == "recompute":
            self.recomputed.add(event.correlation_id)
        return super()._operator(event, context)

    def _product(self, event: Any, context: EventContext) -> int:
        if not event.extra_fields.inputs:  # recorded without shapes
            return self._visit_children(event, context) or self._add_uncounted(event.name)
        before = len(self.entries)
        result = super()._product(event, context)
        for entry in self.entries[before:]:
            self.found.setdefault(event.correlation_id, entry)
        return result


def work_of_trace(ranges: Sequence[TracedRange]) -> TracedWork:
    """The products among the ranges of a step, which are linked to their children."""
    inside = {id(child) for one in ranges for child in one.children}
    counting = _Traced([_Event(one) for one in ranges if id(one) not in inside])
    notes: Sequence[str] = ()
    with contextlib.suppress(UsageError):  # not one operator
        notes = counting.count().notes
    return TracedWork(
        products={
            number: OperatorWork(entry.executed, entry.dtype, entry.shape)
            for number, entry in counting.found.items()
        },
        recomputed=frozenset(counting.recomputed),
        uncounted=dict(counting.uncounted),
        notes=notes,
    )


def bytes_moved(one: TracedRange) -> int | None:
    """What an operator reads and writes at least, by shape; None where that is not recorded or not known."""
    dims, types = one.args.get("Input Dims"), one.args.get("Input type")
    if dims is None or types is None or "::" not in one.name or _TENSORS in types:
        return None  # of a list of tensors the dtypes are not recorded
    concrete = one.args.get("Concrete Inputs") or [""] * len(dims)
    return _bytes_of(one.name, repr(dims), repr(types), repr(concrete))


@lru_cache(maxsize=65536)
def _bytes_of(name: str, dims: str, types: str, concrete: str) -> int | None:
    inputs = _inputs(ast.literal_eval(dims), ast.literal_eval(types), ast.literal_eval(concrete))
    try:
        return _moved(name, inputs)
    except Exception:  # an operator that this torch does not know, or that needs values
        return None


def _moved(name: str, inputs: list[Any]) -> int | None:
    call = RecordedCall(name, inputs, lambda: ())
    schema = call.schema
    if schema is None:
        return None
    read = written = 0
    for argument, value in zip(schema.arguments, inputs, strict=True):
        size = sum(_size(t) for t in (value if isinstance(value, list) else [value]) if is_tensor(t))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        read += 0 if argument.is_out or (is_written and name in _WRITE_ONLY) else size
        written += size if is_written else 0
    if not written and schema.returns:
        result = call.result()
        for out in result if isinstance(result, (list, tuple)) else [result]:
            written += out.numel() * out.element_size() if isinstance(out, torch.Tensor) else 0
    return read + written


def _size(tensor: Any) -> int:
    return int(torch.Size(tensor.sizes).numel()) * int(tensor.dtype.itemsize)


class _Event:
    """A range as an event of torch's tree, and as that event outside of it."""

    def __init__(self, one: TracedRange, node: str | None = None) -> None:
        """`node` is the name of the autograd node that it is directly below."""
        self.name, self.start_time_ns = one.name, one.start
        self.correlation_id = id(one)
        args = one.args
        sequence = args.get("Sequence number", -1)
        is_operator = one.kind == "cpu_op" and not one.name.startswith(NODE) and one.name != node
        inputs = _inputs(
            args.get("Input Dims") or (), args.get("Input type") or (), args.get("Concrete Inputs")
        )
        self.extra_fields = SimpleNamespace(
            scope=SimpleNamespace(name="FUNCTION" if is_operator else "USER_SCOPE"),
            inputs=inputs,
            sequence_number=sequence,
        )
        self.concrete_inputs, self.sequence_nr = (lambda: inputs), (lambda: sequence)
        self.fwd_thread_id = self.start_thread_id = lambda: 0
        inner = one.name.removeprefix(NODE) if one.name.startswith(NODE) else None
        self.children = [_Event(child, inner) for child in one.children]


def _inputs(dims: Sequence[Any], types: Sequence[Any], concrete: Sequence[Any] | None) -> list[Any]:
    values = concrete if concrete is not None and len(concrete) == len(dims) else [""] * len(dims)
    return [_input(*each) for each in zip(dims, types, values, strict=False)]


def _input(dims: Any, kind: Any, concrete: Any) -> Any:
    """A recorded argument: a tensor, tensors, or a value."""
    if kind == _TENSORS:
        return [_tensor(each, torch.float32) for each in dims if isinstance(each, list)]
    if (dtype := _DTYPES.get(kind)) is not None:
        return _tensor(dims, dtype)
    if not isinstance(concrete, str) or not concrete:
        return None
    try:
        return ast.literal_eval(concrete)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _tensor(dims: Sequence[int], dtype: torch.dtype) -> Any:
    return SimpleNamespace(sizes=list(dims), dtype=dtype, storage_data_ptr=1, device=_CPU)
