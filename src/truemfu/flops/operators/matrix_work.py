"""Which operators multiply matrices, with or without a formula, and how a formula is called.

Shared by `tally.py`, for operators that run, and `recording.py`, for those that torch.profiler recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError, one_line
from ...torch_private.trees import tree_flatten
from ..attention.kernels import KERNELS, AttentionWork
from ..registry import OPERATOR_FORMULAS
from .formulas import MATRIX_WORK_WITHOUT_FORMULA, RecurrentWork

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.bool)
"""Tensors of these dtypes are taken to be indices or masks, not factors of a product."""

_OWN_LIBRARIES = frozenset(
    "aten prim prims profiler inductor rngprims debugprims c10d _c10d_functional c10d_functional "
    "_c10d_functional_autograd symm_mem higher_order fsdp _dtensor torch_attn quantized_decomposed".split()
)
_BIAS_FIRST = frozenset(
    f"aten::{n}"
    for n in (
        "addmm addmm_ _sparse_addmm sparse_sampled_addmm "
        "_addmm_activation _scaled_addmm _scaled_addmm_ baddbmm baddbmm_ addbmm addbmm_ "
        "addmv addmv_"
    ).split()
)


def is_torch_own(name: str) -> bool:
    """Whether an operator belongs to torch, so that its matrix work is known by name."""
    return name.partition("::")[0] in _OWN_LIBRARIES


def factors(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """A product's arguments from its first factor on: some operators take an addend before it."""
    return args[1:] if name in _BIAS_FIRST else args


def apply_formula(
    name: str, formula: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> int | RecurrentWork | AttentionWork:
    """The work that a formula returns; raises UsageError with the operator's name if it fails."""
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    try:
        work = formula(*args, **kwargs, out=out)
    except Exception as error:
        raise UsageError(f"the formula of {name} failed: {one_line(error)}") from error
    if isinstance(work, (int, RecurrentWork, AttentionWork)):
        return work
    raise UsageError(f"the formula of {name} must return an integer; it returned {work!r}")


def does_matrix_work(name: str) -> bool:
    """Whether one of torch's operators multiplies matrices in a way that no formula covers."""
    if name.startswith("higher_order::"):  # control flow: the work of its branches is not seen
        return True
    packed = name.startswith(
        ("quantized::linear", "quantized::conv", "mkldnn::_convolution", "mkldnn::_linear")
    )
    return name in MATRIX_WORK_WITHOUT_FORMULA or (packed and "prepack" not in name and "unpack" not in name)


def matters(name: str) -> bool:
    """Whether a call of this operator may multiply matrices: only some of those from outside torch do."""
    has_formula = name in KERNELS or name in OPERATOR_FORMULAS
    return has_formula or does_matrix_work(name) or (bool(name) and not is_torch_own(name))


def may_be_matrix_work(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an operator from outside torch could multiply matrices: it takes two or more tensors of two or
    more dimensions, not all of the result's shape unless they could be queries, keys and values; integers of
    16 bits and more are indices."""
    if is_torch_own(name):
        return False
    inputs = [
        a
        for a in tree_flatten((args, kwargs))[0]
        if isinstance(a, torch.Tensor) and a.dim() >= 2 and a.dtype not in INDEX_DTYPES
    ]
    results = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor) and o.is_floating_point()]
    if not results or len(inputs) < 2:
        return False
    attends = len(inputs) >= 3 and all(a.dim() >= 3 for a in inputs)
    return attends or any(a.shape != results[0].shape for a in inputs)


def input_channels(arguments: Mapping[str, Any]) -> int | None:
    """The input channels of a convolution or its backward; None if it has groups or is transposed."""
    weight = arguments.get("weight")
    if not isinstance(weight, torch.Tensor) or arguments.get("transposed") or arguments.get("groups", 1) != 1:
        return None
    return int(weight.shape[1])


def groups_and_rows(arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """The number of groups of a grouped product and the size they split; None if they split no dimension.

    2-D by 3-D splits the rows of the left factor, 3-D by 2-D the columns of the right, 2-D by 2-D the inner
    dimension.
    """
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    offsets = arguments.get("offs")
    if len(tensors) < 2 or not isinstance(offsets, torch.Tensor):
        return None
    left, right = tensors[:2]
    if left.dim() == 2:
        split = left.shape[0] if right.dim() == 3 else left.shape[1]
    elif right.dim() == 2:
        split = right.shape[1]
    else:
        return None
    return int(offsets.shape[0]), int(split)
