"""What each remedy could gain at most, from the census alone.

A remedy can only shorten the kernels that it changes, and none of them below the least time that its FLOPs
need at the peak. So a bound is the time of those kernels without that least time, where it is known, and all
of their time where it is not. A remedy without evidence has no bound.

`try` uses the same names of remedies, and measures them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..text import counted, duration
from . import classes
from .items import FP32_OR_TF32, LAYOUT, Device, Item
from .record import Bound, Gaps
from .timeline import Timeline
from .trace import HOST, StepTrace

_NS = 1e-9
_COMPILED = re.compile(r"^triton_|CompiledFunction|^Torch-Compiled|^## Call CompiledFx")
_FUSED_OPTIMIZER = re.compile(r"_fused_|Fused|fused_adam|fused_sgd", re.IGNORECASE)
_SCORES = frozenset(
    ("aten::_softmax", "aten::_safe_softmax", "aten::softmax", "aten::_softmax_backward_data")
)
_OF_TORCH = re.compile(r"[A-Z]\w*_\d+")
"""How torch names modules (`with_stack`): by their class, not by where they are."""
_NOTHING = 1e-3
"""A smaller share of the step is no reason to change anything."""
_WHOLE_TILE = 64
"""A vocabulary that is a multiple of this fills whole tiles of every kernel."""
_SMALLEST_VOCABULARY = 1024
_ELEMENT_BYTES = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2}
_ADAMW_ACCESSES = 7
"""AdamW reads weight, gradient and two moments, and writes weight and moments."""


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

    @property
    def whole_s(self) -> float:
        """The step that gains are of."""
        return self.ordinary_step_s or (self.step.end - self.step.start) * _NS


Finding = tuple[float | None, str]
"""Seconds, and the evidence in a sentence; None: not applicable, or unknown, with the reason."""


def bounds_of(known: StepItems) -> list[Bound]:
    """The bound of every remedy: those with evidence first, the largest first; last of them a larger batch,
    which trains otherwise and whose bound has parts of most others."""
    found = []
    for remedy, bound in _REMEDIES.items():
        seconds, evidence = bound(known)
        seconds = None if seconds is None else min(seconds, known.whole_s)
        found.append(
            Bound(
                remedy=remedy,
                at_most_s=None if seconds is None else max(0.0, seconds),
                applies=seconds is not None and seconds > _NOTHING * known.whole_s,
                evidence=evidence,
            )
        )
    return sorted(
        found, key=lambda one: (not one.applies, one.remedy == "larger_batch", -(one.at_most_s or 0.0))
    )


def _time(items: Iterable[Item]) -> float:
    return sum(item.ns for item in items) * _NS


def _above_least(items: Iterable[Item], known: StepItems, dtype: str | None = None) -> float:
    """The time of kernels without the least that they need, in their own dtype or another one."""
    total = 0.0
    for item in items:
        least = known.device.arithmetic_s(item) if dtype is None else _in_dtype(item, known, dtype)
        total += max(0.0, item.ns * _NS - (least or 0.0))
    return total


def _in_dtype(item: Item, known: StepItems, dtype: str) -> float | None:
    peak = None if known.device.spec is None else known.device.spec.peak(dtype)
    return None if item.work is None or not peak else item.work.flops / peak


def _of(known: StepItems, *kinds: str) -> list[Item]:
    return [item for item in known.items if item.kind in kinds]


def _gaps(known: StepItems) -> tuple[float, str]:
    """The time without kernels that is not data wait, and what it is of."""
    gaps, ordinary = known.gaps, known.gaps.in_ordinary_steps_s
    if ordinary is not None:
        return max(0.0, ordinary - gaps.data_wait_s), "of an ordinary step"
    return gaps.host_s + gaps.device_s, "of the recorded step, which recording makes longer"


def _is_compiled(known: StepItems) -> bool:
    return any(_COMPILED.search(item.kernel.name) for item in known.items) or any(
        _COMPILED.search(one.name) for one in known.step.ranges
    )


def _fused_optimizer(known: StepItems) -> Finding:
    items = _of(known, classes.OPTIMIZER)
    if not items:
        return None, "no kernel of an optimizer is known"
    names = [item.kernel.name for item in items]
    names += [item.operator.name for item in items if item.operator is not None]
    if any(_FUSED_OPTIMIZER.search(name) for name in names):
        return None, "the optimizer is fused already"
    moved, least = _optimizer_bytes(known), 0.0
    bandwidth = None if known.device.spec is None else known.device.spec.memory_bandwidth_bytes_per_s
    evidence = f"{counted(len(items), 'kernel')} of the optimizer take {duration(_time(items))}"
    if moved and bandwidth:
        least = moved / bandwidth
        evidence += f", and moving weights, gradients and moments once takes {duration(least)}"
    waits_s, waiting = _waits(items, known)
    return _time(items) - least + waits_s, evidence + waiting


def _waits(items: Iterable[Item], known: StepItems) -> tuple[float, str]:
    """How long the GPU was idle before some kernels: another choice of them may be launched sooner."""
    waits_s = min(sum(item.waited_ns for item in items) * _NS, _gaps(known)[0])
    return waits_s, f"; kernels wait {duration(waits_s)} for their launch" if waits_s else ""


def _optimizer_bytes(known: StepItems) -> float | None:
    """What AdamW moves at least; None where the parameters' sizes are not recorded."""
    elements = 0
    kinds = [
        next(iter(one.args.get("Input type") or ()), None)
        for one in known.step.ranges
        if "AccumulateGrad" in one.name
    ]
    for one in known.step.ranges:
        dims = one.args.get("Input Dims")
        if not dims or not any(r.name.startswith("Optimizer.step#Adam") for r in one.up()):
            continue
        if one.name == "aten::_foreach_addcdiv_":
            elements += sum(math.prod(each) for each in dims[0] if isinstance(each, list))
        elif one.name == "aten::addcdiv_":
            elements += math.prod(dims[0])
    sizes = [_ELEMENT_BYTES[kind] for kind in kinds if kind in _ELEMENT_BYTES]
    return _ADAMW_ACCESSES * elements * min(sizes) if elements and sizes else None


def _compile(known: StepItems) -> Finding:
    if _is_compiled(known):
        return None, "compiled code runs already"
    items = [item for item in known.items if item.kind in classes.FUSIBLE]
    gaps, where = _gaps(known)
    return _time(items) + gaps, (
        f"normalisation, elementwise, reductions and copies take {duration(_time(items))}, "
        f"gaps {duration(gaps)} {where}"
    )


def _compile_blocks(known: StepItems) -> Finding:
    """The same, where two modules differ by a number alone: layers.0.mlp, layers.1.mlp."""
    modules = {item.module for item in known.items if item.module}
    alike: Counter[tuple[str, ...]] = Counter()
    for parts in (name.split(".") for name in modules):
        alike.update(
            (*parts[:at], "*", *parts[at + 1 :]) for at in range(len(parts) - 1) if parts[at].isdigit()
        )
    if modules and not any(_OF_TORCH.fullmatch(name) for name in modules) and alike.total() == len(alike):
        return None, "the model has no list of blocks of one class"
    return _compile(known)


def _runs_graphs(known: StepItems) -> bool:
    """Whether one launch started several kernels."""
    launches = Counter(item.kernel.correlation for item in known.items)
    return any(kernels > 1 for launch, kernels in launches.items() if launch is not None)


def _cuda_graphs(known: StepItems) -> Finding:
    if known.step.device == HOST:
        return None, "it needs a GPU"
    if _runs_graphs(known):
        return None, "CUDA graphs run already"
    if not _is_compiled(known):
        return _compile(known)  # the compiler makes the graphs, and fuses kernels too
    gaps, where = _gaps(known)
    return gaps, f"the GPU runs no kernel for {duration(gaps)} {where}"


def _fp32_products(known: StepItems, dtypes: Sequence[str]) -> list[Item]:
    return [item for item in known.items if item.work is not None and item.dtype in dtypes]


def _tf32(known: StepItems) -> Finding:
    items = _fp32_products(known, ("fp32",))
    if not items:
        unsure = _fp32_products(known, (FP32_OR_TF32,))
        why = "whether fp32 products ran as TF32 is not known" if unsure else "no product runs in fp32"
        return None, why
    if known.device.spec is None or known.device.spec.peak("tf32") is None:
        return None, f"no TF32 rate is known for {known.device.name or 'this device'}"
    return _above_least(items, known, "tf32"), f"products in fp32 take {duration(_time(items))}"


def _autocast(known: StepItems) -> Finding:
    products = _fp32_products(known, ("fp32", "tf32", FP32_OR_TF32))
    flops = sum(item.work.flops for item in products if item.work is not None)
    if 2 * flops <= sum(item.work.flops for item in known.items if item.work is not None):
        return None, "most FLOPs do not run in fp32 or TF32"
    if known.device.spec is None or known.device.spec.peak("bf16") is None:
        return None, f"no bf16 rate is known for {known.device.name or 'this device'}"
    others = [
        item
        for item in known.items
        if item.dtype == "fp32" and item.work is None and item.kind not in (classes.OPTIMIZER, classes.MEMORY)
    ]
    return _above_least(products, known, "bf16") + _time(others), (
        f"products in fp32 or TF32 take {duration(_time(products))}, other kernels in fp32 "
        f"{duration(_time(others))}"
    )


def _attention(known: StepItems) -> Finding:
    scores = {
        _shape(item) for item in known.items if item.operator is not None and item.operator.name in _SCORES
    }
    scores = {shape for shape in scores if len(shape) >= 3}
    fused = _of(known, classes.ATTENTION)
    plain = [item for item in known.items if item.kind != classes.ATTENTION and _has_scores(item, scores)]
    if not plain and not fused:
        return None, "no attention was found"
    waits_s, waiting = _waits([*plain, *fused], known)
    if plain:
        evidence = f"attention in plain operators, whose scores are in memory, takes {duration(_time(plain))}"
    else:
        evidence = f"fused attention takes {duration(_time(fused))}"
    return _time(plain) + _above_least(fused, known) + waits_s, evidence + waiting


def _shape(item: Item) -> tuple[int, ...]:
    dims = [] if item.operator is None else item.operator.args.get("Input Dims") or []
    return tuple(dims[0]) if dims and all(isinstance(size, int) for size in dims[0]) else ()


def _has_scores(item: Item, scores: set[tuple[int, ...]]) -> bool:
    """Whether a kernel reads scores, or is the product that makes them."""
    if item.operator is None or not scores:
        return False
    sizes = {tuple(dims) for dims in item.operator.args.get("Input Dims") or [] if dims and _is_flat(dims)}
    if sizes & scores:
        return True
    if item.work is None or item.work.shape is None or "bmm" not in item.operator.name:
        return False
    m, n, k = item.work.shape
    return any((m, n) == shape[-2:] or (m, k) == shape[-2:] or (k, m) == shape[-2:] for shape in scores)


def _is_flat(dims: Sequence[object]) -> bool:
    return all(isinstance(size, int) for size in dims)


def _channels_last(known: StepItems) -> Finding:
    convolutions = _of(known, classes.CONVOLUTIONS)
    if not convolutions:
        return None, "no convolution runs"
    layout = [item for item in known.items if LAYOUT.search(item.kernel.name)]
    first = [item for item in convolutions if _is_channels_first(item)]
    if not layout and not first:
        return None, "no convolution is seen to run on tensors with channels first"
    near = _of(known, classes.NORMALISATION, classes.ELEMENTWISE, classes.REDUCTIONS, classes.COPIES)
    others = [item for item in convolutions if item not in layout]
    return _time(layout) + _above_least(others, known) + _time(near), (
        f"convolutions on tensors with channels first take {duration(_time(first))}, kernels that only "
        f"change the layout {duration(_time(layout))}; normalisation and elementwise kernels may change too"
    )


def _is_channels_first(item: Item) -> bool:
    args = {} if item.operator is None else item.operator.args
    for dims, strides in zip(args.get("Input Dims") or (), args.get("Input Strides") or (), strict=False):
        if len(dims) >= 4 and len(strides) == len(dims) and dims[1] > 1:
            return bool(strides[1] != 1)
    return False


def _cudnn_benchmark(known: StepItems) -> Finding:
    items = _of(known, classes.CONVOLUTIONS)
    if not items or known.step.device == HOST:
        return None, "no convolution runs on a GPU"
    return _above_least(items, known), f"convolutions take {duration(_time(items))}"


def _no_checkpointing(known: StepItems) -> Finding:
    items = [item for item in known.items if item.recomputed]
    if not items:
        compiled = " outside compiled code, where it is not seen" if _is_compiled(known) else ""
        return None, f"no forward operator runs again in the backward pass{compiled}"
    return _time(
        items
    ), f"forward operators that run again in the backward pass take {duration(_time(items))}"


def _loader_workers(known: StepItems) -> Finding:
    if not known.step.waits:
        return None, "the trace has no wait for a DataLoader"
    wait = known.gaps.data_wait_s
    if wait <= 0:
        return None, "no kernel waits for a batch"
    return wait, f"no kernel runs for {duration(wait)} while the host waits for a batch"


def _pin_memory(known: StepItems) -> Finding:
    items = [item for item in known.items if "HtoD" in item.kernel.name and "Pageable" in item.kernel.name]
    if not items:
        return None, "no copy from pageable memory of the host"
    running = sum(item.running_ns + item.waited_ns for item in items) * _NS
    return running, f"copies from pageable memory, and the waits before them, take {duration(running)}"


def _liger(known: StepItems) -> Finding:
    if known.step.device == HOST:
        return None, "it needs a GPU"
    if not _of(known, classes.NORMALISATION):
        return None, "no normalisation and no softmax runs"
    if not _of(known, classes.EMBEDDING):
        return None, "no embedding is known: it replaces parts of language models"
    if _is_compiled(known):
        return None, "compiled code runs already"
    items = [item for item in known.items if item.kind in classes.FUSIBLE]
    return _time(items), (
        f"normalisation, losses, elementwise kernels and copies take {duration(_time(items))}; it fuses some"
    )


def _larger_batch(known: StepItems) -> Finding:
    products = [item for item in known.items if item.kind in classes.MATRIX_WORK]
    optimizer = _of(known, classes.OPTIMIZER)
    gaps, _ = _gaps(known)
    above = _above_least(products, known)
    return gaps + _time(optimizer) + above, (
        f"gaps {duration(gaps)}, the optimizer {duration(_time(optimizer))}, products and attention above "
        f"their least time {duration(above)}; the time for the same number of samples"
    )


def _pad_vocabulary(known: StepItems) -> Finding:
    items, odd = [], set[int]()
    for item in _of(known, classes.PRODUCTS):
        shape = () if item.work is None or item.work.shape is None else item.work.shape
        found = {size for size in shape if size >= _SMALLEST_VOCABULARY and size % _WHOLE_TILE}
        if found:
            items.append(item)
            odd |= found
    if not items:
        return None, f"no large dimension of a product is known that is not a multiple of {_WHOLE_TILE}"
    shown = ", ".join(map(str, sorted(odd)[-3:]))
    return _above_least(items, known), (
        f"products with a size that is no multiple of {_WHOLE_TILE} ({shown}) take {duration(_time(items))}"
    )


def _packing(known: StepItems) -> Finding:
    if known.padding_lost is None:
        return None, "how many tokens are padding is not known from a trace"
    return known.padding_lost * known.whole_s, f"{100 * known.padding_lost:.1f} % of the tokens are padding"


_REMEDIES: dict[str, Callable[[StepItems], Finding]] = {
    "fused_optimizer": _fused_optimizer,
    "compile": _compile,
    "compile_blocks": _compile_blocks,
    "cuda_graphs": _cuda_graphs,
    "tf32": _tf32,
    "autocast_bf16": _autocast,
    "attention": _attention,
    "channels_last": _channels_last,
    "cudnn_benchmark": _cudnn_benchmark,
    "no_checkpointing": _no_checkpointing,
    "loader_workers": _loader_workers,
    "pin_memory": _pin_memory,
    "liger": _liger,
    "larger_batch": _larger_batch,
    "pad_vocabulary": _pad_vocabulary,
    "packing": _packing,
}
