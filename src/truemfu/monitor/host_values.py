"""Numbers that lie on the device, read without waiting for them.

`log_step` may get its loss, gradient norm and mask as device tensors. Reading one there would wait for the
GPU. Instead a copy into pinned memory is queued behind the work that makes the value; the step's end mark is
queued behind the copy, so once that mark has passed the number lies on the host.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_SLOTS = 1 << 14


class Slot:
    """A number on its way from the device; `read` it after the step's end mark has passed."""

    __slots__ = ("_cell", "_free")

    def __init__(self, cell: torch.Tensor, free: deque[torch.Tensor]) -> None:
        self._cell, self._free = cell, free

    def read(self) -> float:
        """The number; the slot is free afterwards."""
        value = float(self._cell)
        self._free.append(self._cell)
        return value


class HostValues:
    """Takes numbers of any kind on the training thread; device tensors become slots in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._free: deque[torch.Tensor] = deque()
        if device.type == "cuda":
            self._free.extend(torch.zeros(_SLOTS, dtype=torch.float32, pin_memory=True).unbind())

    def take(self, value: Any) -> float | Slot | None:
        """A number now, a slot for a number that is on its way, or None for what is no number.

        None comes back for None alone; anything else that holds no single number is a TypeError.
        """
        if value is None or type(value) is float:
            return value
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value)
        return float(value)

    def _take_tensor(self, tensor: torch.Tensor) -> float | Slot | None:
        if type(tensor) is not torch.Tensor:
            tensor = _local(tensor)
        if tensor.numel() != 1:
            raise TypeError(f"a tensor of shape {tuple(tensor.shape)}, where one number was expected")
        if tensor.is_meta:
            raise TypeError("a tensor without a value (meta)")
        if not tensor.is_cuda:
            return float(tensor.detach())
        if not self._free:
            return None  # the reading side is far behind; a step without this value is better than a wait
        cell = self._free.popleft()
        cell.copy_(tensor.detach() if tensor.dim() == 0 else tensor.detach().reshape(()), non_blocking=True)
        return Slot(cell, self._free)

    def tokens_in(self, mask: torch.Tensor) -> float | Slot | None:
        """How many positions of a mask are set."""
        return self._take_tensor(mask.detach().count_nonzero() if mask.is_cuda else mask.count_nonzero())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be spread over ranks; a TypeError where that is a part of it."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() for placement in placements):
        raise TypeError(
            "a sharded DTensor: its value is known after a collective, which is yours to start "
            "(pass tensor.full_tensor())"
        )
    return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def resolved(value: float | Slot | None) -> float | None:
    """A taken number, once its step's end mark has passed."""
    return value.read() if isinstance(value, Slot) else value

