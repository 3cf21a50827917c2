"""What stands for a tensor in a shadow: a fake tensor, a real copy on the CPU, or a stand-in.

    fake_tensor   runs under a count; knows the values of small tensors that are no weights
    real_copy     for models that cannot do without values
    stand_in      shape, stride, dtype, device and need of a gradient: all a count asks of a weight; knows the
                  weight it stands for, as long as that exists, for counts that cannot do without values

Each is made by a function of the tensor, the dtype it should have, and the device it should stand on (None:
its own).
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
from ..host_copy import host_copy, place_of
from .values import Value, attach

_MAX_BUFFER_VALUE = 1 << 24
_COMMON = (torch.Tensor, nn.Parameter)


class StandIn(torch.Tensor):
    """A tensor that says what it is like and can do nothing: no memory is behind it."""

    _truemfu_unreadable = True
    _truemfu_of: weakref.ref[torch.Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(f"{func} was called on a parameter of a snapshot, which is there to be counted only")


def stand_in(tensor: torch.Tensor, dtype: torch.dtype, place: torch.device | None) -> torch.Tensor:
    """For a weight a stand-in; whatever else may hold a value is kept as it is, not copied."""
    sharded = _is_sharded(tensor)
    if not sharded and (not _is_plain(tensor) or nn.parameter.is_lazy(tensor) or _has_small_value(tensor)):
        return tensor
    made = _bare(tensor.shape, None if sharded else tensor.stride(), dtype, place or place_of(tensor))
    made.requires_grad_(tensor.requires_grad)
    made._truemfu_of = getattr(tensor, "_truemfu_of", None) or weakref.ref(tensor)
    return made


def _bare(
    shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype, place: torch.device
) -> StandIn:
    """A stand-in of this look; where torch cannot make one without memory, on the meta device."""
    make = table.get(table.WRAPPER_SUBCLASS)
    made = None if make is ABSENT else make(StandIn, shape, strides=stride, dtype=dtype, device=place)
    if isinstance(made, StandIn) and made.device == place:
        return made
    table.miss(table.WRAPPER_SUBCLASS)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(StandIn)
    meta._truemfu_place = place  # type: ignore[attr-defined]
    return meta


def live(tensor: torch.Tensor) -> torch.Tensor:
    """The weight that a stand-in stands for; any other tensor is its own."""
    if not isinstance(tensor, StandIn):
        return tensor
    weight = tensor._truemfu_of()
    if weight is None:
        raise ModelError("the model no longer exists, so its values cannot be read")
    return weight


def real_copy(tensor: torch.Tensor, dtype: torch.dtype, place: torch.device | None) -> torch.Tensor:
    """The same values in CPU memory; zeros for a tensor that has none."""
    wanted, tensor = tensor.requires_grad, live(tensor)
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu", dtype=dtype, requires_grad=wanted)
    return host_copy(tensor).to(dtype).requires_grad_(wanted)


class FakeLikeness:
    """Makes fake tensors of one mode; `on_read` is called whenever the values of one are asked for."""

    def __init__(self, mode: FakeTensorMode, *, on_read: Callable[[], None] | None = None) -> None:
        self._mode, self.on_read = mode, on_read

    def __call__(self, tensor: torch.Tensor, dtype: torch.dtype, place: torch.device | None) -> torch.Tensor:
        """A leaf like this tensor, without its data; small values stay readable."""
        wanted = tensor.requires_grad
        if _is_sharded(tensor):  # here it has its whole size
            shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
        elif _is_plain(tensor):
            shape, stride = tensor.shape, tensor.stride()
        else:
            made = self._mode.from_tensor(tensor.detach(), static_shapes=True)
            return made.requires_grad_(wanted)
        bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=wanted)
        fake: torch.Tensor = FakeTensor(self._mode, bare, place or place_of(tensor))
        if not _is_sharded(tensor) and _has_small_value(tensor):
            values, on_read = tensor.detach(), self.on_read

            def read() -> torch.Tensor:
                if on_read is not None:
                    on_read()
                return host_copy(values)

            attach(fake, Value(read))
        return fake


def _is_sharded(tensor: torch.Tensor) -> bool:
    """A DTensor: a piece of a tensor that is spread over devices."""
    return type(tensor) not in _COMMON and hasattr(tensor, "_spec") and hasattr(tensor, "device_mesh")


def _has_small_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may steer the model and can be kept: no weights, nothing large."""
    is_weight = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return not is_weight and is_readable(tensor) and tensor.numel() <= _MAX_BUFFER_VALUE


def _is_plain(tensor: torch.Tensor) -> bool:
    """A strided tensor of torch's own, or a Parameter (subclasses of Parameter carry their extras along)."""
    kind = type(tensor)
    return kind is StandIn or (
        tensor.layout is torch.strided
        and (
            kind in _COMMON
            or (isinstance(tensor, (nn.Parameter, FakeTensor)) and not hasattr(tensor, "__tensor_flatten__"))
        )
        and (kind in _COMMON or not hasattr(tensor, "_spec"))
    )
