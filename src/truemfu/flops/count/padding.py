"""Head sizes before torch padded them for an attention kernel.

`scaled_dot_product_attention` pads heads to a multiple of eight and calls the kernel, within one call from
Python. A tensor that was padded within the same call as the kernel had its own size before; one that the
program padded by itself is what the model computes with.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ...torch_private.compiler import is_of_disable
from ..attention.kernels import AttentionWork

PAD = "aten::constant_pad_nd"

Place = tuple[int, int]


class PaddedHeads:
    """Tensors whose last dimension was padded, and where."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Any, tuple[int, Place]] = weakref.WeakKeyDictionary()

    def record(self, args: Sequence[Any], out: torch.Tensor) -> None:
        """Record a call of `constant_pad_nd`: a tensor and the padding, the last dimension first."""
        tensor, padding = args[:2]
        if len(padding) == 2 and padding[0] == 0:
            self._sizes[out.untyped_storage()] = (tensor.shape[-1], _place())

    def without(self, work: AttentionWork, args: Sequence[Any]) -> AttentionWork:
        """The work of a kernel by the sizes that queries and values had before they were padded for it."""
        if not self._sizes:
            return work
        here = _place()
        sizes = [self._sizes.get(tensor.untyped_storage()) for tensor in (args[0], args[2])]
        true = [size[0] if size is not None and size[1] == here else None for size in sizes]
        return replace(work, qk_dim=true[0] or work.qk_dim, v_dim=true[1] or work.v_dim)


def _place() -> Place:
    """The call in the program that runs the current operator."""
    frame: FrameType | None = sys._getframe()
    outside = frame
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            outside = frame.f_back
            while outside is not None and is_of_disable(outside):
                outside = outside.f_back
            if outside is None or outside.f_code.co_name != "__torch_dispatch__":
                break
        frame = frame.f_back
    return (id(outside), outside.f_lasti) if outside is not None else (0, 0)
