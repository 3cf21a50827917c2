"""The kernels of a step, each with its class, operator, module, FLOPs and bytes.

    StepTrace ─► Item: a kernel ─► timeline: the time that belongs to it, and the gap before it

FLOPs are by our formulas; those of an operator with several kernels are divided by their time. Bytes are
those of the operator's tensors, each read or written once, and belong to its longest kernel. Both give a
least time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..flops import OperatorWork, bytes_moved, work_of_trace
from ..hardware.detect import find_spec
from ..hardware.specs import DTYPES, DeviceSpec
from . import classes
from .timeline import Timeline, timeline
from .trace import HOST, MODULE, Kernel, Range, StepTrace, read_step

NODE = "autograd::engine::evaluate_function: "
FP32_OR_TF32 = "fp32 or tf32"
_DTYPES = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
LAYOUT = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)
"""Kernels that only change the layout of a convolution's tensors."""
_TF32 = re.compile(r"tf32|s1688|s16816.*f32_tf32")
_PLAIN_FP32 = re.compile(r"sgemm|simt|ffma|f32f32_f32f32|gemmSN|gemv|splitKreduce")


@dataclass(slots=True, eq=False)
class Item:
    """A kernel of the step."""

    kernel: Kernel
    kind: str
    operator: Range | None
    """The operator that launched it."""
    module: str | None
    dtype: str | None
    ns: int = 0
    """The time that belongs to it."""
    waited_ns: int = 0
    work: OperatorWork | None = None
    bytes: int | None = None
    recomputed: bool = False

    @property
    def running_ns(self) -> int:
        """From its begin to its end."""
        return self.kernel.end - self.kernel.start


@dataclass(frozen=True, kw_only=True)
class Device:
    """The limits of a device, None where it is not in the table."""

    name: str | None
    spec: DeviceSpec | None

    def arithmetic_s(self, item: Item) -> float | None:
        """The least time for the FLOPs of a kernel."""
        if item.work is None or self.spec is None or item.dtype not in DTYPES:
            return None
        peak = self.spec.peak(item.dtype)
        return None if not peak else item.work.flops / peak

    def memory_s(self, item: Item) -> float | None:
        """The least time for the bytes of a kernel."""
        bandwidth = None if self.spec is None else self.spec.memory_bandwidth_bytes_per_s
        return None if not bandwidth or item.bytes is None else item.bytes / bandwidth

    def limit_of(self, items: Sequence[Item]) -> tuple[str, float] | None:
        """What binds kernels once they are launched, and the least time for them, as far as known."""
        arithmetic = [s for item in items if (s := self.arithmetic_s(item)) is not None]
        memory = [s for item in items if (s := self.memory_s(item)) is not None]
        if not arithmetic and not memory:
            return None
        limits = (("arithmetic", sum(arithmetic)), ("memory", sum(memory)))
        return max(limits, key=lambda limit: limit[1])


class Found(NamedTuple):
    """What a trace has of a step, before it is summed."""

    step: StepTrace
    device: Device
    items: Sequence[Item]
    line: Timeline
    notes: Sequence[str]


def items_of(path: Path, device_name: str | None = None) -> Found:
    """Every kernel of the step in a trace, with all that the trace tells of it."""
    step = read_step(path)
    items, notes = _items(step)
    line = timeline(step, {id(item.kernel): item.kind for item in items})
    for item in items:
        item.ns = line.own[id(item.kernel)]
    by_kernel = {id(item.kernel): item for item in items}
    for gap in line.gaps:
        if gap.is_host:
            by_kernel[id(gap.before)].waited_ns += gap.end - gap.start - gap.data_wait
    return Found(step, _device(step, device_name), items, line, notes)


def _device(step: StepTrace, given: str | None) -> Device:
    properties = step.properties
    name = given or properties.get("name")
    if not isinstance(name, str):
        return Device(name=HOST if step.device == HOST else None, spec=None)
    if given is not None:
        if step.device == HOST:
            raise UsageError(f"--device {given}: the trace has operators of a CPU and no kernels")
        return Device(name=name, spec=find_spec(name))
    memory, sms = properties.get("totalGlobalMem"), properties.get("numSms")
    return Device(
        name=name,
        spec=find_spec(
            name, memory if isinstance(memory, int) else None, sms if isinstance(sms, int) else None
        ),
    )


def _items(step: StepTrace) -> tuple[list[Item], list[str]]:
    """The kernels with all that the trace tells of them, and what to know about it."""
    work = work_of_trace(step.ranges)
    modules = _modules(step.ranges)
    items = []
    of_call: defaultdict[int, list[Item]] = defaultdict(list)
    of_product: defaultdict[int, list[Item]] = defaultdict(list)
    for kernel in step.kernels:
        around = [] if kernel.within is None else list(kernel.within.up())
        named = [r for r in around if r.kind == "cpu_op" or r.name.startswith("Optimizer.")]
        kind = classes.class_of(kernel.name, kernel.kind, [r.name for r in named])
        operator = next((r for r in named if not r.name.startswith(NODE)), None)
        module = next((modules[id(r)] for r in around if id(r) in modules), None)
        item = Item(kernel, kind, operator, module, _dtype_of(operator))
        item.recomputed = any(id(r) in work.recomputed for r in around)
        items.append(item)
        if kernel.bytes is not None:  # of a copy within the device both read and written
            item.bytes = kernel.bytes * (2 if "DtoD" in kernel.name else 1)
        elif operator is not None:
            of_call[id(operator)].append(item)
        if kernel.kind == HOST:  # it stands for all that the operator called
            around = list(_below(kernel.within))
        product = next((r for r in around if id(r) in work.products), None)
        if product is not None and kind in classes.MATRIX_WORK:
            of_product[id(product)].append(item)
    for group in of_call.values():
        operator = group[0].operator
        assert operator is not None
        max(group, key=lambda item: item.running_ns).bytes = bytes_moved(operator)
    for number, group in of_product.items():
        _share(work.products[number], group)
    notes = [f"FLOPs of {name} are unknown ({calls:,} calls)" for name, calls in work.uncounted.items()]
    if not any("Input Dims" in one.args for one in step.ranges):
        notes.append("recorded without shapes: FLOPs and bytes are unknown (record_shapes=True records them)")
    return items, notes


def _share(work: OperatorWork, group: Sequence[Item]) -> None:
    """Divide the FLOPs of an operator among its kernels by their time, without those that change a layout."""
    multiply = [item for item in group if not LAYOUT.search(item.kernel.name)] or group
    time_ns = sum(item.running_ns for item in multiply) or 1
    left = work.flops
    for item in sorted(multiply, key=lambda item: item.running_ns):
        flops = work.flops * item.running_ns // time_ns
        item.work, left = work._replace(flops=flops), left - flops
        item.dtype = _product_dtype(work.dtype, item.kernel)
    if item.work is not None:  # the longest has what rounding left
        item.work = item.work._replace(flops=item.work.flops + left)


def _modules(ranges: Sequence[Range]) -> Mapping[int, str]:
    """Of ranges of modules, and of autograd's nodes, by the operator that made the node."""
    found = {id(one): one.name.removeprefix(MODULE) for one in ranges if one.name.startswith(MODULE)}
    if not found:
        return {}
    made: dict[int, str] = {}
    for one in ranges:
        if one.sequence is None or one.sequence < 0 or one.kind != "cpu_op":
            continue
        around = list(one.up())
        module = next((found[id(r)] for r in around if id(r) in found), None)
        if module is not None and not any(r.name.startswith(NODE) for r in around):
            made[one.sequence] = module
    nodes = {
        id(one): made[one.sequence]
        for one in ranges
        if one.name.startswith(NODE) and one.sequence is not None and one.sequence in made
    }
    return {**nodes, **found}


def _dtype_of(operator: Range | None) -> str | None:
    """The dtype of an operator's first floating-point tensor."""
    kinds: Iterable[str] = () if operator is None else operator.args.get("Input type") or ()
    return next((_DTYPES[kind] for kind in kinds if kind in _DTYPES), None)


def _below(one: Range | None) -> Iterator[Range]:
    """A range and all that are in it."""
    stack = [] if one is None else [one]
    while stack:
        one = stack.pop()
        yield one
        stack += one.children


def _product_dtype(dtype: str, kernel: Kernel) -> str:
    """fp32 products of a GPU may have run as TF32: the kernel's name tells, or it is not known."""
    if dtype != "fp32" or kernel.kind == HOST or _PLAIN_FP32.search(kernel.name):
        return dtype
    return "tf32" if _TF32.search(kernel.name) else FP32_OR_TF32
