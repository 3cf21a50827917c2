"""Collectives inside a counted model: only their shapes are needed, and none is ever started.

A count runs on one rank while the others go on, so a real collective would never end. On fake tensors torch
computes the shape of a result and sends nothing. Three cases have no answer on one rank, and raise:

    real tensors                  the collective would start
    all_to_all of unequal parts   how many tokens arrive is decided by the other ranks
    sums of matrices over ranks   tensor parallelism written by hand: which layers are split is not visible
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import SplitOverRanks
from ...torch_private.dispatch import FakeTensor, arguments_by_name
from ...torch_private.trees import tree_flatten
from ..shadow.values import mark_unknown

NAMESPACES = frozenset("c10d _c10d_functional _c10d_functional_autograd c10d_functional symm_mem".split())
_SUMS = ("allreduce", "reducescatter")


def run_on_shapes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_forward: bool, is_assumed: bool
) -> Any:
    """The fake result of a collective, whose values are unknown; raises SplitOverRanks if it has none.

    `is_assumed`: values were assumed before this call, so that equal parts may be a result of that.
    """
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    kind = func.overloadpacket.__name__.replace("_", "")
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise SplitOverRanks(
            f"the model calls a collective ({kind}) on tensors with values: a count cannot run it"
        )
    if kind.startswith("alltoall") and (is_assumed or not _has_equal_parts(func, args, kwargs)):
        raise SplitOverRanks(
            "the model exchanges tokens with other ranks (all_to_all), so how many this rank processes is "
            "unknown before they arrive: attach the modules around the exchange as a list"
        )
    if in_forward and kind.startswith(_SUMS) and any(map(_is_matrix, tensors)):
        raise SplitOverRanks(
            f"the model adds up matrices over ranks in its forward pass ({kind}): which of its layers are "
            "split over ranks is not visible; split them with torch.distributed.tensor"
        )
    out = func(*args, **kwargs)
    mark_unknown(tensors)
    return out


def _has_equal_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an all_to_all has parts of one size; one of lists of tensors is taken to have others."""
    given = arguments_by_name(func, args, kwargs)
    sizes = [value for name, value in given.items() if "split_sizes" in name]
    return bool(sizes) and len({size for part in sizes for size in part or ()}) <= 1


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() > tensor.shape[-1]
