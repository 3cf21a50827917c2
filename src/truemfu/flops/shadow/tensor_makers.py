"""Replacements of a tensor in a shadow: a fake tensor, a real copy on the CPU, or a placeholder.

    FakeTensorMaker   fake tensors, for counts; the values of small tensors other than weights stay readable
    real_copy         CPU copies, for models that need values
    placeholder       shape, stride, dtype, device and requires_grad, which is all a count needs of a weight;
                      refers weakly to the weight, for counts that need its values

Each is called with the tensor, the new dtype and the new device (None: the tensor's own).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import ModelError
from ...torch_private import table
from ...torch_private.dispatch import FakeTensor, FakeTensorMode
from ...torch_private.find import ABSENT
from ..batch import is_readable
from ..host_copy import host_copy, original_device
from .values import Value, attach

_MAX_BUFFER_VALUE = 1 << 24
_COMMON = (torch.Tensor, nn.Parameter)


class PlaceholderTensor(torch.Tensor):
    """A tensor with metadata only: it has no memory, and operators on it fail."""

    _truemfu_unreadable = True
    _truemfu_of: weakref.ref[torch.Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(f"{func} was called on a parameter of a snapshot, which can only be counted")


def placeholder(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A placeholder for a weight; any tensor whose value may be needed is returned as it is, not copied."""
    sharded = _is_sharded(tensor)
    if not sharded and (not _is_plain(tensor) or nn.parameter.is_lazy(tensor) or _has_small_value(tensor)):
        return tensor
    made = _bare(tensor.shape, None if sharded else tensor.stride(), dtype, device or original_device(tensor))
    made.requires_grad_(tensor.requires_grad)
    made._truemfu_of = getattr(tensor, "_truemfu_of", None) or weakref.ref(tensor)
    return made


def _bare(
    shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> PlaceholderTensor:
    """A placeholder of this shape; on the meta device if torch cannot make one without memory."""
    make = table.get(table.WRAPPER_SUBCLASS)
    made = (
        None if make is ABSENT else make(PlaceholderTensor, shape, strides=stride, dtype=dtype, device=device)
    )
    if isinstance(made, PlaceholderTensor) and made.device == device:
        return made
    table.miss(table.WRAPPER_SUBCLASS)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(PlaceholderTensor)
    meta._truemfu_device = device  # type: ignore[attr-defined]
    return meta


def live(tensor: torch.Tensor) -> torch.Tensor:
    """The weight that a placeholder represents; any other tensor is returned as it is."""
    if not isinstance(tensor, PlaceholderTensor):
        return tensor
    weight = tensor._truemfu_of()
    if weight is None:
        raise ModelError("the model no longer exists, so its values cannot be read")
    return weight


def real_copy(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """The same values in CPU memory; zeros for a meta tensor."""
    needs_gradient, tensor = tensor.requires_grad, live(tensor)
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu", dtype=dtype, requires_grad=needs_gradient)
    return host_copy(tensor).to(dtype).requires_grad_(needs_gradient)


class FakeTensorMaker:
    """Makes fake tensors of one mode; `on_read` is called whenever the values of one are read."""

    def __init__(self, mode: FakeTensorMode, *, on_read: Callable[[], None] | None = None) -> None:
        self._mode, self.on_read = mode, on_read

    def __call__(self, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        """A leaf with this tensor's metadata and without its data; small values stay readable."""
        needs_gradient = tensor.requires_grad
        if _is_sharded(tensor):  # here it has its full size
            shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
        elif _is_plain(tensor):
            shape, stride = tensor.shape, tensor.stride()
        else:
            made = self._mode.from_tensor(tensor.detach(), static_shapes=True)
            return made.requires_grad_(needs_gradient)
        bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=needs_gradient)
        fake: torch.Tensor = FakeTensor(self._mode, bare, device or original_device(tensor))
        if not _is_sharded(tensor) and _has_small_value(tensor):
            values, on_read = tensor.detach(), self.on_read

            def read() -> torch.Tensor:
                if on_read is not None:
                    on_read()
                return host_copy(values)

            attach(fake, Value(read))
        return fake


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor: a shard of a tensor distributed over devices."""
    return type(tensor) not in _COMMON and hasattr(tensor, "_spec") and hasattr(tensor, "device_mesh")


def _has_small_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may affect control flow and can be stored: not a weight, not large."""
    is_weight = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return not is_weight and is_readable(tensor) and tensor.numel() <= _MAX_BUFFER_VALUE


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is one of torch's own strided tensors or a Parameter, subclasses of which are accepted."""
    cls = type(tensor)
    return cls is PlaceholderTensor or (
        tensor.layout is torch.strided
        and (
            cls in _COMMON
            or (isinstance(tensor, (nn.Parameter, FakeTensor)) and not hasattr(tensor, "__tensor_flatten__"))
        )
        and (cls in _COMMON or not hasattr(tensor, "_spec"))
    )
