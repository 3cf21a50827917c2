"""The census of one step, from its trace.

    trace ─► StepTrace ─► items: a kernel with its class, operator, module, FLOPs and bytes
                              ├─► timeline: the time that belongs to each, and the gaps
                              ├─► rows: items that are alike ─► limit
                              └─► bounds: what each remedy could gain at most

FLOPs and bytes of an operator belong to its longest kernel. FLOPs are by our formulas; bytes are those of the
operator's tensors, each read or written once, so a limit is a least time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..flops import OperatorWork, bytes_moved, work_of_trace
from ..hardware.detect import find_spec
from ..hardware.specs import DTYPES, DeviceSpec
from . import classes
from .record import Census, ClassTime, Gaps, KernelRow
from .timeline import Timeline, lanes, timeline
from .trace import HOST, MODULE, Kernel, Range, StepTrace, read_step

NODE = "autograd::engine::evaluate_function: "
FP32_OR_TF32 = "fp32 or tf32"
_NS = 1e-9
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_LONGEST_NAME = 160
_MOST_ROWS = 500
_DTYPES = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
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

    def least_s(self, item: Item) -> float | None:
        """The least time that is known for a kernel."""
        return max((s for s in (self.arithmetic_s(item), self.memory_s(item)) if s is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class StepItems:
    """Everything that bounds are computed from."""

    items: Sequence[Item]
    step: StepTrace
    line: Timeline
    device: Device
    gaps: Gaps
    ordinary_step_s: float | None
    padding_lost: float | None


def census_of(
    path: Path,
    *,
    device_name: str | None = None,
    ordinary_step_s: float | None = None,
    padding_lost: float | None = None,
) -> Census:
    """The census of the last whole step in a trace; RecordError where it has none.

    `ordinary_step_s` is the time of a step that was not recorded, `padding_lost` the share of padding tokens;
    None if unknown.
    """
    from .bounds import bounds_of

    step = read_step(path)
    device = _device(step, device_name)
    items, notes = _items(step)
    line = timeline(step, {id(item.kernel): item.kind for item in items})
    for item in items:
        item.ns = line.own[id(item.kernel)]
    by_kernel = {id(item.kernel): item for item in items}
    for gap in line.gaps:
        if gap.is_host:
            by_kernel[id(gap.before)].waited_ns += gap.end - gap.start - gap.data_wait
    length_s, busy_s = (step.end - step.start) * _NS, line.busy * _NS
    gaps = _gaps(line, busy_s, ordinary_step_s)
    known = StepItems(
        items=items,
        step=step,
        line=line,
        device=device,
        gaps=gaps,
        ordinary_step_s=ordinary_step_s,
        padding_lost=padding_lost,
    )
    rows = _rows(items, device)
    return Census(
        truemfu_version=__version__,
        source=path.name,
        step=step.name,
        steps_in_trace=step.steps,
        device=device.name,
        peak_known=device.spec is not None,
        is_host=step.device == HOST,
        step_s=length_s,
        busy_s=busy_s,
        ordinary_step_s=ordinary_step_s,
        launches=len(items),
        classes=_classes(items, length_s, line),
        gaps=gaps,
        kernels=rows[:_MOST_ROWS],
        bounds=bounds_of(known),
        lanes=lanes(step, {id(item.kernel): item.kind for item in items}),
        notes=[*step.notes, *notes, *_about(step, rows)],
    )


def _device(step: StepTrace, given: str | None) -> Device:
    properties = step.properties
    name = given or properties.get("name")
    if not isinstance(name, str):
        return Device(name=HOST if step.device == HOST else None, spec=None)
    if given is not None:
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
        if kernel.bytes is not None:
            item.bytes = kernel.bytes
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
        longest = max(group, key=lambda item: item.running_ns)
        longest.work = work.products[number]
        longest.dtype = _product_dtype(longest.work.dtype, longest.kernel)
    notes = [f"FLOPs of {name} are unknown ({calls:,} calls)" for name, calls in work.uncounted.items()]
    if not any("Input Dims" in one.args for one in step.ranges):
        notes.append("recorded without shapes: FLOPs and bytes are unknown (record_shapes=True records them)")
    return items, notes


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


def _gaps(line: Timeline, busy_s: float, ordinary_step_s: float | None) -> Gaps:
    host = sum(gap.end - gap.start - gap.data_wait for gap in line.gaps if gap.is_host)
    return Gaps(
        host_s=host * _NS,
        data_wait_s=sum(gap.data_wait for gap in line.gaps) * _NS,
        device_s=sum(gap.end - gap.start for gap in line.gaps if not gap.is_host) * _NS,
        in_ordinary_steps_s=None if ordinary_step_s is None else max(0.0, ordinary_step_s - busy_s),
    )


def _classes(items: Sequence[Item], length_s: float, line: Timeline) -> list[ClassTime]:
    of: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        of[item.kind].append(item)
    found = []
    for key, group in of.items():
        ns = sum(item.ns for item in group)
        flops = [item.work.flops for item in group if item.work is not None]
        moved = [item.bytes for item in group if item.bytes is not None]
        found.append(
            ClassTime(
                key=key,
                name=classes.CLASSES[key],
                seconds=ns * _NS,
                share=ns * _NS / length_s if length_s else 0.0,
                launches=len(group),
                flops=sum(flops) if flops else None,
                bytes=sum(moved) if moved else None,
            )
        )
    found.sort(key=lambda one: -one.seconds)
    gaps = sum(gap.end - gap.start for gap in line.gaps) * _NS
    found.append(
        ClassTime(
            key=classes.GAPS,
            name=classes.CLASSES[classes.GAPS],
            seconds=gaps,
            share=gaps / length_s if length_s else 0.0,
            launches=0,
        )
    )
    return found


def _rows(items: Sequence[Item], device: Device) -> list[KernelRow]:
    of: defaultdict[tuple[str, str | None, str, str | None, str | None], list[Item]] = defaultdict(list)
    for item in items:
        operator = None if item.operator is None else item.operator.name
        module = None if item.module is None else _NUMBER.sub("*", item.module)
        of[item.kind, operator, item.kernel.name, module, item.dtype].append(item)
    found = []
    for (kind, operator, kernel, module, dtype), group in of.items():
        flops = [item.work.flops for item in group if item.work is not None]
        moved = [item.bytes for item in group if item.bytes is not None]
        waited_s = sum(item.waited_ns for item in group) * _NS
        running_s = sum(item.running_ns for item in group) * _NS
        limit, limit_s, unknown = _limit(group, device, running_s, waited_s)
        found.append(
            KernelRow(
                kind=kind,
                operator=operator,
                kernel=kernel if len(kernel) <= _LONGEST_NAME else f"{kernel[: _LONGEST_NAME - 1]}…",
                module=module,
                launches=len(group),
                seconds=sum(item.ns for item in group) * _NS,
                running_s=running_s,
                flops=sum(flops) if flops else None,
                bytes=sum(moved) if moved else None,
                dtype=dtype,
                limit=limit,
                limit_s=limit_s,
                unknown=unknown,
                waited_s=waited_s,
            )
        )
    return sorted(found, key=lambda row: -row.seconds)


def _limit(
    group: Sequence[Item], device: Device, running_s: float, waited_s: float
) -> tuple[str | None, float | None, str | None]:
    """What binds kernels, the least time for them, and why that is not known."""
    arithmetic = [s for item in group if (s := device.arithmetic_s(item)) is not None]
    memory = [s for item in group if (s := device.memory_s(item)) is not None]
    least = max(sum(arithmetic), sum(memory)) if arithmetic or memory else None
    if waited_s > running_s:
        return "launch", least, None
    if least is not None:
        return ("arithmetic" if sum(arithmetic) >= sum(memory) else "memory"), least, None
    if device.spec is None:
        return None, None, f"the rates of {device.name or 'this device'} are not known"
    if group[0].operator is None:
        return None, None, "no operator launched it, so its shapes are not known"
    return None, None, "its shapes or dtypes are not recorded"


def _about(step: StepTrace, rows: Sequence[KernelRow]) -> list[str]:
    notes = []
    if step.other_devices:
        notes.append(f"{step.other_devices} more devices are in the trace: this is the busiest one")
    if step.device == HOST:
        notes.append("a CPU: operators stand for kernels, and what runs beside them counts as gaps")
    if len(rows) > _MOST_ROWS:
        left = sum(row.seconds for row in rows[_MOST_ROWS:])
        notes.append(f"{len(rows) - _MOST_ROWS:,} smaller rows are left out, {1e3 * left:.2f} ms together")
    unknown = Counter(item.kind for item in rows if item.kind == classes.OTHER)
    if unknown:
        notes.append(f"{unknown.total()} rows have no known class: neither operator nor name tells it")
    return notes
