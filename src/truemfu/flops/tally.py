"""The counting mode: sees every operator of a step, adds up its FLOPs and says what they were for.

    operator ──► formula ──► needed, executed ──► forward | backward | recompute, module, operator, dtype

What runs outside the backward pass is forward. Inside it, what runs with gradients enabled is the forward of
a checkpointed stretch run again: recomputation. The rest is backward, of which a fused kernel may execute
more than autograd needs; the surplus is recomputation too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..convention import Convention
from ..errors import UsageError
from . import attention as attention_kernels
from .attention import AttentionWork
from .eager_attention import EagerAttention, allowed_by, readable
from .flop_count import FlopCount
from .formulas import MATRIX_WORK_WITHOUT_FORMULA, RecurrentWork
from .pairs import FULL, Band, band_of_mask, document_ids
from .registry import OPERATOR_FORMULAS
from .sizes import SizeStep, size_steps
from .stand_ins import STAND_INS
from .values import Following, Value

_DEVICE = torch.ops.prim.device.default
_OWN_LIBRARIES = frozenset(
    "aten prim prims profiler inductor rngprims debugprims c10d _c10d_functional c10d_functional "
    "_c10d_functional_autograd symm_mem higher_order fsdp _dtensor torch_attn quantized_decomposed".split()
)
_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}
_INDICES = (torch.int64, torch.int32, torch.int16, torch.bool)
_BIAS_FIRST = frozenset(
    f"aten::{n}"
    for n in "addmm addmm_ _addmm_activation baddbmm baddbmm_ addbmm addbmm_ addmv addmv_".split()
)


def _next_sequence_nr() -> int:
    """The number the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def _checkpoint_is_running() -> bool:
    """Whether `torch.utils.checkpoint` has its hooks on the tensors saved right now."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # before torch 2.7 the hooks cannot be seen; gradients enabled are the best sign
        return torch.is_grad_enabled()
    hooks = top(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class Entry:
    """One counted call: what was needed, what was executed, and where."""

    __slots__ = ("dtype", "executed", "module", "needed", "operator", "phase", "sequence")

    def __init__(
        self, phase: str, module: str, operator: str, dtype: str, needed: int, executed: int
    ) -> None:
        self.phase, self.module, self.operator, self.dtype = phase, module, operator, dtype
        self.needed, self.executed = needed, executed
        self.sequence = _next_sequence_nr() - 1 if torch.is_grad_enabled() else None


class Tally(TorchDispatchMode):
    """Adds up the FLOPs of everything that runs while it is entered.

    `documents` are the lengths of packed documents, sample by sample, or None. `following` runs operators
    on fake tensors; without it they run as they are, on whatever device they live.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        convention: Convention,
        *,
        documents: Sequence[Sequence[int]] | None = None,
        following: Following | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convention = convention
        self.documents = documents
        self.entries: list[Entry] = []
        self.operators = 0
        self.uncounted: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.windows: dict[str, int] = {}
        """Sliding windows that modules declare, by path: a mask over short documents does not show them."""
        self.bands: set[Band] = set()
        self.size_steps: list[list[tuple[int, int, SizeStep]]] = []
        self._following = following
        self._final_backward = False
        self._paths: list[str] = [""]
        self._starts: list[int] = [0]
        self._start_paths: list[str] = [""]
        self._scales: dict[int, Callable[[int], tuple[int, int]]] = {}
        self._forward_work: dict[int, AttentionWork] = {}
        self._head_dims: list[tuple[int, int]] = []
        packed = documents is not None and any(len(d) > 1 for d in documents)
        self._pairs_matter = packed or convention.attention == "causal"
        self._eager = EagerAttention(self._resolve_eager, self._rescale) if self._pairs_matter else None

    @contextmanager
    def module(self, path: str) -> Iterator[None]:
        """Everything that runs inside belongs to this module."""
        self.enter_module(path)
        try:
            yield
        finally:
            self.leave_module()

    def enter_module(self, path: str) -> None:
        """A module's forward begins."""
        self._paths.append(path)
        self._mark(path)

    def leave_module(self) -> None:
        """The module's forward has ended, by return or exception."""
        self._paths.pop()
        self._mark(self._paths[-1])

    def _mark(self, path: str) -> None:
        self._starts.append(_next_sequence_nr())
        self._start_paths.append(path)

    @contextmanager
    def sdpa_head_dims(self, qk_dim: int, v_dim: int) -> Iterator[None]:
        """The true head sizes of an attention call: kernels may see them padded to a multiple of eight."""
        self._head_dims.append((qk_dim, v_dim))
        try:
            yield
        finally:
            self._head_dims.pop()

    def _module_of(self, node: Any) -> str:
        """The module whose forward made this autograd node: nodes are numbered in order of creation."""
        return self._start_paths[max(0, bisect_right(self._starts, node._sequence_nr()) - 1)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        self.operators += 1
        if isinstance(func, HigherOrderOperator):
            name = f"higher_order::{func.name()}"
        elif isinstance(func, OpOverload):
            name = func.overloadpacket._qualified_op_name
        else:
            name = str(func)
        stand_in = STAND_INS.get(name) if self._following is not None else None
        if stand_in is not None:
            out = stand_in(*args, **kwargs)
        elif self._following is not None and isinstance(func, OpOverload):
            out = self._following.run(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        entry = self._count(name, func, args, kwargs, out)
        if ("pool" in name or name == "aten::convolution") and (steps := size_steps(name, args, out)):
            self.size_steps.append(steps)
        if (
            self._eager is not None
            and isinstance(func, OpOverload)
            and self._phase(torch._C._current_autograd_node()) != "backward"
        ):
            self._eager.see(func.overloadpacket, args, out, entry)
        return out

    def _phase(self, node: Any) -> str:
        """What an operator that runs now is for.

        Inside a backward pass a checkpoint that runs its stretch again shows by the hooks it sets on saved
        tensors, or by its node. Otherwise gradients are enabled there by other ways of recomputing, or as
        the pass is to be differentiated itself (`create_graph`), which `final_backward` rules out.
        """
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        if _checkpoint_is_running() or (node is not None and "Checkpoint" in node.name()):
            return "recompute"
        return "recompute" if self._final_backward and torch.is_grad_enabled() else "backward"

    @contextmanager
    def final_backward(self) -> Iterator[None]:
        """The backward pass inside is not to be differentiated: what enables gradients there recomputes."""
        self._final_backward = True
        try:
            yield
        finally:
            self._final_backward = False

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Entry | None:
        work: Any
        if name in attention_kernels.KERNELS:
            work = attention_kernels.work_of_kernel(name, _bind(func, args, kwargs))
        elif name in ("higher_order::flex_attention", "higher_order::flex_attention_backward"):
            work = attention_kernels.work_of_flex(name, args)
        elif (formula := OPERATOR_FORMULAS.get(name)) is not None:
            work = _apply(name, formula, args, kwargs, out)
        else:
            if name in MATRIX_WORK_WITHOUT_FORMULA or _may_be_matrix_work(name, args, kwargs, out):
                self.uncounted[name] += 1
            return None
        if isinstance(work, int) and work == 0:
            return None
        node = torch._C._current_autograd_node()
        phase = self._phase(node)
        module = self._module_of(node) if phase == "backward" and node is not None else self._paths[-1]
        needed, executed = self._flops(work, module, node if phase == "backward" else None)
        operand = args[1] if name in _BIAS_FIRST else args[0]
        if isinstance(operand, torch.Tensor) and operand.is_complex():
            needed, executed = 4 * needed, 4 * executed
        entry = Entry(phase, module, name.replace("::", "."), self._dtype(name, operand), needed, executed)
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
                qk_dim, v_dim = self._head_dims[-1]
                work = _with_head_dims(work, qk_dim, v_dim)
            if torch.is_grad_enabled():
                self._forward_work[_next_sequence_nr() - 1] = work
            needed, executed = self._pairs(work, module)
            return work.forward_flops(needed), work.forward_flops(executed)
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
            work.needed_backward_flops(needed, q=q, k=k, v=v),
            work.executed_backward_flops(executed),
        )

    def _pairs(self, work: AttentionWork, module: str) -> tuple[int, int]:
        """(needed, executed) pairs of an attention call, all samples, one head."""
        if work.cumulative is not None:
            lengths = [_lengths(c if c is not None else work.cumulative[0]) for c in work.cumulative]
            band = work.band if self.convention.attention == "causal" else FULL
            self.bands.add(band)
            pairs = sum(band.pairs(q, k) for q, k in zip(*lengths, strict=True))
            return pairs, pairs
        if not self._pairs_matter:
            pairs = work.samples * work.q_len * work.k_len
            return pairs, pairs
        masks: list[Value] = []
        if work.mask is not None:
            allowed = allowed_by(work.mask)
            if allowed is None:
                self._unread_mask()
            else:
                masks.append(allowed)
        if work.mask_function is not None:
            masks.append(_mask_of_function(work.mask_function, work.q_len, work.k_len))
        shape = (work.samples, work.heads, work.q_len, work.k_len)
        return self._masked_pairs(shape, masks, work.band, module)

    def _unread_mask(self) -> None:
        self.notes["an attention mask could not be read: all its pairs are counted"] = None

    def _masked_pairs(
        self, shape: Sequence[int], masks: list[Value], band: Band, module: str
    ) -> tuple[int, int]:
        """Pairs for scores of this shape (samples, heads, queries, keys), by convention and documents."""
        with _disable_current_modes(), torch.no_grad():
            return self._pairs_of(shape, masks, band, self.windows.get(module))

    def _pairs_of(
        self, shape: Sequence[int], masks: list[Value], band: Band, window: int | None
    ) -> tuple[int, int]:
        samples, _, q_len, k_len = shape
        causal = self.convention.attention == "causal"
        allowed = _intersection(masks, samples, q_len, k_len)
        documents = self._documents_of(samples, q_len, k_len, allowed)
        if not causal:
            self.bands.add(FULL)
            executed = samples * q_len * k_len
            return (sum(n * n for d in documents for n in d) if documents else executed), executed
        if allowed is not None and not bool(allowed.all()):
            if band.behind is not None or band.ahead is not None:
                distance = torch.arange(q_len)[:, None] - torch.arange(k_len)[None, :]
                if band.behind is not None:
                    allowed = allowed & (distance <= band.behind)
                if band.ahead is not None:
                    allowed = allowed & (distance >= -band.ahead)
            fullest = int(allowed.flatten(1).sum(1).argmax())
            lengths = documents[fullest % len(documents)] if documents else [k_len]
            found = band_of_mask(allowed[fullest], lengths)
            if found is None:
                pairs = int(allowed.expand(samples, q_len, k_len).sum())
                self.notes["an attention mask is no band: the pairs it allows were counted one by one"] = None
                return pairs, pairs
            if found.behind is None and window is not None and max(lengths) <= window < k_len:
                found = Band(behind=window - 1, ahead=found.ahead)
            band = found
        self.bands.add(band)
        executed = samples * band.pairs(q_len, k_len)
        return (sum(band.pairs(n) for d in documents for n in d) if documents else executed), executed

    def _documents_of(
        self, samples: int, q_len: int, k_len: int, allowed: torch.Tensor | None
    ) -> Sequence[Sequence[int]] | None:
        """The batch's documents where this attention keeps them apart, else None."""
        documents = self.documents
        if documents is None or q_len != k_len or samples % len(documents):
            return None
        if any(sum(d) != q_len for d in documents) or allowed is None:
            return None
        each = samples // len(documents)
        documents = [d for d in documents for _ in range(each)]
        for sample, lengths in enumerate(documents):
            ids = document_ids(lengths, q_len)
            view = allowed[sample if allowed.shape[0] > 1 else 0]
            if bool((view & (ids[:, None] != ids[None, :])).any()):
                return None
        return documents

    def _resolve_eager(self, shape: Sequence[int], masks: list[Value]) -> Callable[[int], tuple[int, int]]:
        """Scores of this shape met a softmax: how their plain FLOPs become needed and executed ones."""
        if len(shape) < 3:
            return lambda flops: (flops, flops)
        samples = shape[0]
        heads = 1
        for n in shape[1:-2]:
            heads *= n
        needed, executed = self._masked_pairs(
            (samples, heads, shape[-2], shape[-1]), masks, FULL, self._paths[-1]
        )
        whole = samples * shape[-2] * shape[-1]

        def scale(flops: int) -> tuple[int, int]:
            unit = flops // whole
            return unit * needed, unit * executed

        return scale

    def _rescale(self, entry: Entry, scale: Callable[[int], tuple[int, int]]) -> None:
        """A product has turned out to belong to attention: so do its gradients, later."""
        entry.needed, entry.executed = scale(entry.needed)
        if entry.sequence is not None:
            self._scales[entry.sequence] = scale

    def _dtype(self, name: str, operand: Any) -> str:
        if not isinstance(operand, torch.Tensor):
            return "unknown"
        if operand.dtype is torch.float32 and operand.device.type == "cuda":
            return _float32_on_cuda("conv" in name)
        known = _DTYPES.get(operand.dtype)
        if known is not None:
            return known
        text = str(operand.dtype)
        return "fp8" if "float8" in text else "fp4" if "float4" in text else text.removeprefix("torch.")

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
            notes=(*self.notes, *notes),
        )


def with_ancestors(own: dict[str, int]) -> dict[str, int]:
    """Each module's own FLOPs added to all modules that contain it; "" contains them all."""
    total: defaultdict[str, int] = defaultdict(int)
    total[""] = 0
    for path, flops in own.items():
        total[""] += flops
        parts = path.split(".") if path else []
        for depth in range(1, len(parts) + 1):
            total[".".join(parts[:depth])] += flops
    return dict(total)


def _apply(name: str, formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Any:
    """Ask a formula; what goes wrong in it is said with the operator's name."""
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    try:
        work = formula(*args, **kwargs, out=out)
    except Exception as error:
        raise UsageError(f"the formula of {name} failed: {type(error).__name__}: {error}") from error
    if isinstance(work, (int, RecurrentWork)):
        return work
    raise UsageError(f"the formula of {name} must return an integer; it returned {work!r}")


def _bind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name for a in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _with_head_dims(work: AttentionWork, qk_dim: int, v_dim: int) -> AttentionWork:
    return work if (work.qk_dim, work.v_dim) == (qk_dim, v_dim) else replace(work, qk_dim=qk_dim, v_dim=v_dim)


def _may_be_matrix_work(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an operator from outside torch could multiply matrices: two or more tensors of two or more
    dimensions go in, not all of the result's shape; integers of 16 bits and more are indices."""
    if name.partition("::")[0] in _OWN_LIBRARIES:
        return False
    inputs = [
        a
        for a in tree_flatten((args, kwargs))[0]
        if isinstance(a, torch.Tensor) and a.dim() >= 2 and a.dtype not in _INDICES
    ]
    results = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor) and o.is_floating_point()]
    return len(inputs) >= 2 and any(a.shape != results[0].shape for a in inputs) if results else False


def _lengths(cumulative: torch.Tensor) -> list[int]:
    value = readable(cumulative)
    if value is None:
        raise RuntimeError("cumulative lengths of packed sequences are not known")
    with _disable_current_modes():
        ends = [int(n) for n in value.tensor().tolist()]
    return [b - a for a, b in itertools.pairwise(ends)]


def _mask_of_function(function: Callable[..., Any], q_len: int, k_len: int) -> Value:
    def compute() -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64)
        allowed = function(zero, zero, torch.arange(q_len)[:, None], torch.arange(k_len)[None, :])
        return torch.as_tensor(allowed).expand(q_len, k_len)

    return Value(compute)


def _intersection(masks: list[Value], samples: int, q_len: int, k_len: int) -> torch.Tensor | None:
    """What all masks allow, as (samples or 1, queries, keys); masks of one dimension per head use head 0."""
    together: torch.Tensor | None = None
    for mask in masks:
        allowed = mask.tensor()
        while allowed.dim() < 3:
            allowed = allowed[None]
        if allowed.dim() == 4:
            allowed = allowed[:, 0]
        if allowed.dim() != 3 or allowed.shape[0] not in (1, samples):
            continue
        allowed = allowed.expand(allowed.shape[0], q_len, k_len)
        together = allowed if together is None else together & allowed
    return together


def _float32_on_cuda(convolution: bool) -> str:
    """fp32 or tf32, as torch's settings and the device decide."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "fp32"
    if convolution:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
