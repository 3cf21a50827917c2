"""The counting mode: intercepts every operator of a step and adds up its FLOPs by phase.

    operator ──► formula ──► needed, executed ──► forward | backward | recompute, module, operator, dtype

What runs outside the backward pass is forward. Inside it, what runs with gradients enabled is the forward of
a checkpointed region run again: recomputation. The rest is backward; where a fused kernel executes more than
autograd needs, the surplus is recomputation too. Inside a custom Function the data flow decides
(`data_flow.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

from ...convention import Convention
from ...torch_private import table
from ...torch_private.dispatch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    disable_modes,
    disable_torch_function,
    flex_attention_operators,
    next_sequence_nr,
    top_saved_tensors_hooks,
)
from ..attention import kernels as attention_kernels
from ..attention.eager import EagerAttention, Scale, allowed_by, readable
from ..attention.kernels import AttentionWork
from ..attention.masks import PairCounter, mask_of_function
from ..attention.pairs import FULL
from ..flop_count import FlopCount
from ..interruption import supervision
from ..operators.conv_sizes import SizeStep, size_steps
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
from ..registry import OPERATOR_FORMULAS
from ..shadow.fake_kernels import FAKE_KERNELS
from ..shadow.values import Following, FollowingMode, Value
from ..splits import with_ancestors
from . import collectives
from .data_flow import DataFlow, in_function, is_custom

_DEVICE = torch.ops.prim.device.default
_PRODUCTS = frozenset(f"aten::{n}" for n in "mm addmm _addmm_activation bmm baddbmm".split())
_SAME_DTYPE = _PRODUCTS | frozenset(f"aten::{n}" for n in "mv addmv dot".split())


def _checkpoint_is_running() -> bool:
    """Whether `torch.utils.checkpoint` is recomputing a region, which it does to unpack a tensor it saved.

    Meanwhile saved-tensor hooks are active: its own, or on top of them those of a checkpoint inside the
    region. So for most operators the callers need not be searched.
    """
    if top_saved_tensors_hooks is None:
        table.miss(table.TOP_HOOKS)
    elif top_saved_tensors_hooks(True) is None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(checkpoint):
            return True
        frame = frame.f_back
    return False


class Entry:
    """One counted call: what was needed, what was executed, and where.

    `shape` is (m, n, k) of a plain product, else None. `blocked` is what a fused attention kernel
    (`is_attention`) executes if it skips only whole blocks of the mask; None if unknown.
    `channels` are the input channels of a convolution without groups, `groups` the matrices of a grouped
    product and the rows (or columns) they share: (matrices, rows); else None.
    """

    __slots__ = (
        "blocked",
        "channels",
        "dtype",
        "executed",
        "groups",
        "is_attention",
        "module",
        "needed",
        "operator",
        "phase",
        "sequence",
        "shape",
    )

    def __init__(
        self, phase: str, module: str, operator: str, dtype: str, needed: int, executed: int
    ) -> None:
        self.phase, self.module, self.operator, self.dtype = phase, module, operator, dtype
        self.needed, self.executed = needed, executed
        self.shape: tuple[int, int, int] | None = None
        self.is_attention = False
        self.blocked: int | None = None
        self.channels: int | None = None
        self.groups: tuple[int, int] | None = None
        self.sequence = next_sequence_nr() - 1 if torch.is_grad_enabled() else None


class Tally(TorchDispatchMode):
    """Adds up the FLOPs of everything that runs while the mode is active.

    `documents` are the lengths of packed documents, sample by sample, or None. `following` runs operators
    on fake tensors; without it they run unchanged, on their own devices, and those that draw random numbers
    use `generator` if one is given.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode's dispatch so that it is not compiled, at a cost per operator; during a count
        the compiler is disabled anyway."""
        return False

    def __init__(
        self,
        convention: Convention,
        *,
        documents: Sequence[Sequence[int]] | None = None,
        following: Following | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convention = convention
        self.pairs = PairCounter(convention, documents)
        self.entries: list[Entry] = []
        self.operators = 0
        self.is_on_shadow = False
        """Whether a shadow is counted, so that no collective may start."""
        self.outside_parameters: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Parameters outside the model that the step used, through globals, and their previous gradients."""
        self.uncounted: Counter[str] = Counter()
        self.size_steps: list[list[tuple[int, int, SizeStep]]] = []
        self._following, self._generator = following, generator
        self.has_drawn = False
        """Whether an operator drew from the process's generator instead of this count's own."""
        self.reads_model_values = False
        """Whether values stored in the model, such as its buffers, were read."""
        self._flow = DataFlow()
        self._is_launching = False
        self._supervision = supervision()
        self._final_backward = False
        self._paths: list[str] = [""]
        self._starts: list[int] = [0]
        self._start_paths: list[str] = [""]
        self._scales: dict[int, Scale] = {}
        self._forward_work: dict[int, AttentionWork] = {}
        self._head_dims: list[tuple[int, int]] = []
        self._true_dims: dict[str, tuple[int, int]] = {}
        self._eager = EagerAttention(self._resolve_eager, self._rescale) if self.pairs.masks_matter else None

    def mark_model_values_read(self) -> None:
        """Record that values stored in the model were read: the count may depend on them."""
        self.reads_model_values = True

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

    @contextmanager
    def sdpa_head_dims(self, qk_dim: int, v_dim: int) -> Iterator[None]:
        """The true head sizes of an attention call; kernels may get them padded to a multiple of eight."""
        self._head_dims.append((qk_dim, v_dim))
        try:
            yield
        finally:
            self._head_dims.pop()

    def _module_of(self, node: Any) -> str:
        """The module whose forward created this autograd node: nodes are numbered in order of creation."""
        return self._start_paths[max(0, bisect_right(self._starts, node._sequence_nr()) - 1)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self._supervision is not None:
            self._supervision.check()
        if current_graph_task_id() == -1:
            return self._run(func, args, kwargs or {})
        with disable_torch_function():  # in a backward pass it would intercept the calls made here as well
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count it."""
        self.operators += 1
        self._save_outside_gradients(args)
        name = _name(func)
        fake_kernel = FAKE_KERNELS.get(name) if self._following is not None else None
        if fake_kernel is not None:
            out = fake_kernel(*args, **kwargs)
        elif self.is_on_shadow and name.partition("::")[0] in collectives.NAMESPACES:
            out = collectives.run_on_shapes(
                func,
                args,
                kwargs,
                in_forward=current_graph_task_id() == -1,
                is_assumed=self._following is None or bool(self._following.assumptions),
            )
        elif self._following is not None and isinstance(func, OpOverload):
            out = self._following.run(func, args, kwargs)
        elif self._generator is not None and _draws(func):
            out = self._drawn(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        entry = self._count(name, func, args, kwargs, out)
        self._flow.record(name, func, args, kwargs, out, entry)
        if ("pool" in name or name == "aten::convolution") and (steps := size_steps(name, args, out)):
            self.size_steps.append(steps)
        if (
            self._eager is not None
            and isinstance(func, OpOverload)
            and self._phase(current_autograd_node()) != "backward"
        ):
            self._eager.record(func.overloadpacket, args, out, entry)
        return out

    def _drawn(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that draws random numbers, with our own generator if it accepts one."""
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        try:
            return func.overloadpacket(*args, **{**kwargs, "generator": self._generator})
        except (TypeError, RuntimeError):  # it accepts no generator, or none of this device
            self.has_drawn = True
            return func(*args, **kwargs)

    def _save_outside_gradients(self, args: Iterable[Any]) -> None:
        """Save the gradients of parameters outside the model, since this step would add to them."""
        for argument in args:
            cls = type(argument)
            if cls is list or cls is tuple:
                self._save_outside_gradients(argument)
            elif (
                cls is not FakeTensor
                and isinstance(argument, torch.Tensor)
                and argument.requires_grad
                and argument.is_leaf
                and id(argument) not in self.outside_parameters
            ):
                self.outside_parameters[id(argument)] = (argument, argument.grad)
                if self.is_on_shadow:
                    argument.grad = None  # else the count would add to it in place

    def _phase(self, node: Any) -> str:
        """The phase of an operator that runs now.

        Inside a backward pass, a checkpoint that recomputes its region is found among the callers or by its
        node. The phase of a custom Function's products is set later, by data flow. Otherwise gradients are
        enabled there by other ways of recomputing, or because the pass itself is to be differentiated
        (`create_graph`), which `final_backward` rules out.
        """
        if current_graph_task_id() == -1:
            return "forward"
        if _checkpoint_is_running() or (node is not None and "Checkpoint" in node.name()):
            return "recompute"
        if is_custom(node):
            return "backward"
        return "recompute" if self._final_backward and torch.is_grad_enabled() else "backward"

    @contextmanager
    def final_backward(self) -> Iterator[None]:
        """A context whose backward pass is not differentiated: gradients enabled there mean recompute."""
        self._final_backward = True
        try:
            yield
        finally:
            self._final_backward = False

    def record_launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a kernel of this name, launched outside the dispatcher with these arguments."""
        arguments, entry = [*args, *kwargs.values()], None
        if name in OPERATOR_FORMULAS:
            entry = self._count(name, None, args, kwargs, None)
        else:
            self.uncounted[name] += 1
        self._flow.record_launch(arguments, entry)
        if self._following is not None:
            self._following.record_launch(arguments)

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
        if name in attention_kernels.KERNELS:
            work = attention_kernels.work_of_kernel(name, _bind(func, args, kwargs))
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
        if name in _SAME_DTYPE and self._following is not None:
            left, right = factors(name, args)[:2]
            if left.dtype is not right.dtype:  # fake tensors accept this, a real product does not
                raise RuntimeError(f"{name} of {left.dtype} and {right.dtype}: a product needs one dtype")
        node = current_autograd_node()
        phase = self._phase(node)
        module = self._module_of(node) if phase == "backward" and node is not None else self._paths[-1]
        needed, executed = self._flops(work, module, node if phase == "backward" else None)
        operand = next(iter(factors(name, args)), None)
        if isinstance(operand, torch.Tensor) and operand.is_complex():
            needed, executed = 4 * needed, 4 * executed
        entry = Entry(phase, module, name.replace("::", "."), _dtype(name, operand), needed, executed)
        if name in _PRODUCTS:
            entry.shape = _product_shape(*factors(name, args)[:2])
        elif isinstance(work, AttentionWork):
            entry.is_attention, entry.blocked = True, _blocked_flops(work)
        elif "convolution" in name:
            entry.channels = input_channels(_bind(func, args, kwargs))
        elif "grouped_mm" in name:
            entry.groups = groups_and_rows(_bind(func, args, kwargs))
        self.entries.append(entry)
        return entry

    def _flops(self, work: Any, module: str, node: Any) -> tuple[int, int]:
        """(needed, executed) of one call."""
        if isinstance(work, AttentionWork):
            return self._attention_flops(work, module, node)
        if isinstance(work, RecurrentWork):
            if not work.backward:
                return work.forward_flops(), work.forward_flops()
            needed = work.needed_backward_flops([edge is not None for edge, _ in node.next_functions])
            return needed, max(needed, work.executed_backward_flops())
        if node is not None and (scale := self._scales.get(node._sequence_nr())) is not None:
            return scale(int(work))
        return int(work), int(work)

    def _attention_flops(self, work: AttentionWork, module: str, node: Any) -> tuple[int, int]:
        if not work.backward:
            if self._head_dims:
                self._true_dims[module] = self._head_dims[-1]
                work = _with_head_dims(work, *self._head_dims[-1])
            elif module in self._true_dims:  # recomputed by a checkpoint, where only the kernel is seen
                work = _with_head_dims(work, *self._true_dims[module])
            if torch.is_grad_enabled():
                self._forward_work[next_sequence_nr() - 1] = work
            needed, executed = self._pairs(work, module)
            per_pair = work.forward_flops(1) // work.heads
            return per_pair * needed, per_pair * executed
        q = k = v = True
        if node is not None:
            edges = [edge is not None for edge, _ in node.next_functions][:3]
            if len(edges) == 3:
                q, k, v = edges
            forward = self._forward_work.get(node._sequence_nr())
            if forward is not None:
                work = _with_head_dims(work, forward.qk_dim, forward.v_dim)
        needed, executed = self._pairs(work, module)
        return (
            work.needed_backward_flops(1, q=q, k=k, v=v) // work.heads * needed,
            work.executed_backward_flops(1) // work.heads * executed,
        )

    def _pairs(self, work: AttentionWork, module: str) -> tuple[int, int]:
        """(needed, executed) pairs of an attention kernel, all samples and heads."""
        if work.cumulative is not None:
            q_lengths, k_lengths = (
                _lengths(c if c is not None else work.cumulative[0]) for c in work.cumulative
            )
            pairs = self.pairs.packed(q_lengths, k_lengths, work.heads, work.band)
            return pairs, pairs
        shape = (work.samples, work.heads, work.q_len, work.k_len)
        masks: list[Value | None] = []
        if self.pairs.masks_matter:
            if work.mask is not None:
                masks.append(allowed_by(work.mask))
            if work.mask_function is not None:
                masks.append(self._evaluated(work.mask_function, shape, work.device))
        return self.pairs.dense(shape, masks, work.band, module)

    def _evaluated(self, function: Callable[..., Any], shape: Sequence[int], device: Any) -> Value | None:
        """A flex-attention mask, computed on real indices or on fake ones whose values are known."""
        indices = partial(torch.arange, device=device)
        if self._following is None:
            with disable_modes():
                allowed = mask_of_function(function, shape, indices)
        else:
            with FollowingMode(self._following):
                allowed = mask_of_function(function, shape, indices)
        return None if allowed is None else readable(allowed)

    def _resolve_eager(self, shape: Sequence[int], masks: Sequence[Value | None]) -> Scale:
        """For scores of this shape that enter a softmax: converts plain FLOPs to needed and executed ones."""
        needed, executed = self.pairs.dense(shape, masks, FULL, self._paths[-1])
        whole = prod(shape)

        def scale(flops: int) -> tuple[int, int]:
            return flops // whole * needed, flops // whole * executed

        return scale

    def _rescale(self, entry: Entry, scale: Scale) -> None:
        """Rescale a product that turns out to belong to attention, and its gradients later."""
        entry.needed, entry.executed = scale(entry.needed)
        if entry.sequence is not None:
            self._scales[entry.sequence] = scale

    def result(self, *, method: str, notes: Sequence[str] = ()) -> FlopCount:
        """Everything counted so far, added up."""
        totals: Counter[str] = Counter()
        by_module: defaultdict[str, int] = defaultdict(int)
        by_operator: defaultdict[str, int] = defaultdict(int)
        by_dtype: defaultdict[str, int] = defaultdict(int)
        for entry in self.entries:
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
            by_module=with_ancestors(by_module),
            by_operator=dict(by_operator),
            by_dtype=dict(by_dtype),
            uncounted=dict(self.uncounted),
            method=method,
            convention=self.convention,
            notes=(*self.pairs.notes, *notes),
        )


@functools.cache
def _name(func: Any) -> str:
    """An operator's name without its overload: `aten::mm`; `higher_order::…` if it takes functions."""
    if isinstance(func, OpOverload):
        return str(func.name()).partition(".")[0]
    return f"higher_order::{func.name()}" if hasattr(func, "name") else str(func)


def _draws(func: Any) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def _dtype(name: str, operand: Any) -> str:
    if not isinstance(operand, torch.Tensor):
        return "unknown"
    return dtype_name(operand.dtype, operand.device.type, convolution="conv" in name)


def _blocked_flops(work: AttentionWork) -> int | None:
    """What a kernel executes that processes whole blocks; None for a mask function with its own blocks."""
    if work.mask_function is not None:
        return None
    if work.cumulative is None:
        pairs = work.samples * work.band.blocked_pairs(work.q_len, work.k_len)
    else:
        q_lengths, k_lengths = (_lengths(c if c is not None else work.cumulative[0]) for c in work.cumulative)
        pairs = sum(work.band.blocked_pairs(q, k) for q, k in zip(q_lengths, k_lengths, strict=True))
    return pairs * (work.executed_backward_flops(1) if work.backward else work.forward_flops(1))


def _product_shape(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int]:
    """m, n, k of each product of m×k by k×n."""
    return left.shape[-2], right.shape[-1], left.shape[-1]


def _bind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name for a in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _with_head_dims(work: AttentionWork, qk_dim: int, v_dim: int) -> AttentionWork:
    return work if (work.qk_dim, work.v_dim) == (qk_dim, v_dim) else replace(work, qk_dim=qk_dim, v_dim=v_dim)


def _lengths(cumulative: torch.Tensor) -> list[int]:
    value = readable(cumulative)
    if value is None:
        raise RuntimeError("the cumulative lengths of packed sequences are unknown")
    with disable_modes():
        ends = [int(n) for n in value.tensor().tolist()]
    return [b - a for a, b in itertools.pairwise(ends)]


def _count_flex_attention() -> None:
    """Register this mode's rule, which some versions of torch require for operators that take functions."""

    def rule(operator: Any) -> Callable[..., Any]:
        return lambda mode, *args, **kwargs: mode.__torch_dispatch__(operator, (), args, kwargs)

    for operator in flex_attention_operators():
        operator.py_impl(Tally)(rule(operator))


if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
    with contextlib.suppress(Exception):  # without a rule, the operator itself raises when it is counted
        _count_flex_attention()
