"""Replacements of a tensor in a shadow: a fake tensor, or a real copy on the CPU.

    fake_tensor   for counts, given their mode; the values of small tensors other than weights stay readable
    real_copy     on the CPU, for models that need values

Each is called with the tensor, the new dtype and the new device (None: the tensor's own).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ...torch_private.dispatch import FakeTensor, FakeTensorMode
from ..batch import is_readable
from ..host_copy import host_copy
from .values import Value, attach

_MAX_BUFFER_VALUE = 1 << 24
_COMMON = (torch.Tensor, nn.Parameter)


def real_copy(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """The same values in CPU memory; zeros for a meta tensor."""
    needs_gradient = tensor.requires_grad
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu", dtype=dtype, requires_grad=needs_gradient)
    return host_copy(tensor).to(dtype).requires_grad_(needs_gradient)


def fake_tensor(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """A leaf of this mode with the tensor's metadata and without its data; small values stay readable."""
    needs_gradient = tensor.requires_grad
    if _is_sharded(tensor):  # here it has its full size
        shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    elif _is_plain(tensor):
        shape, stride = tensor.shape, tensor.stride()
    else:
        return mode.from_tensor(tensor.detach(), static_shapes=True).requires_grad_(needs_gradient)
    bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=needs_gradient)
    fake: torch.Tensor = FakeTensor(mode, bare, device or device_of(tensor))
    if not _is_sharded(tensor) and _has_small_value(tensor):
        attach(fake, Value(partial(host_copy, tensor.detach())))
    return fake


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device a tensor is on in the step that is counted: for a meta tensor the CPU."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


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
    return tensor.layout is torch.strided and (
        cls in _COMMON
        or (
            isinstance(tensor, (nn.Parameter, FakeTensor))
            and not hasattr(tensor, "__tensor_flatten__")
            and not hasattr(tensor, "_spec")
        )
    )
