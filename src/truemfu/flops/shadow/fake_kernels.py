"""Shape functions of operators that torch cannot run on fake tensors, or only for some dtypes.

Each takes the operator's arguments and returns an empty tensor of the result's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's own accepts only bfloat16; real kernels accept more dtypes."""
    rows, columns = a.shape[-2], b.shape[-1]
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.numel(), rows, columns)
    elif a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


FAKE_KERNELS: Mapping[str, Callable[..., Any]] = {"aten::_grouped_mm": grouped_mm}
