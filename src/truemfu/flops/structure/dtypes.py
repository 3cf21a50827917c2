"""The dtype in which a layer multiplies: its weight's, or what autocast, FSDP2 or a quantiser make of it."""

from __future__ import annotations

import torch
from torch import nn

from ..operators.dtype_names import dtype_name

_LOW = (torch.float16, torch.bfloat16, torch.float32)


class ComputeDtypes:
    """Reads dtypes off modules, under the autocast that is on when it is made."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._autocast: torch.dtype | None = None
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            self._autocast = torch.get_autocast_dtype(device_type)

    def of(
        self,
        module: nn.Module,
        parameter: torch.Tensor | None,
        fsdp: torch.dtype | None,
        *,
        conv: bool = False,
    ) -> str:
        """The name of the dtype a module computes in with this parameter, as counts spell it."""
        dtype = None if parameter is None else parameter.dtype
        if dtype is None or not (dtype.is_floating_point or dtype.is_complex):  # packed by a quantiser
            own = getattr(module, "compute_dtype", None)
            dtype = own if isinstance(own, torch.dtype) else torch.get_default_dtype()
        dtype = fsdp or dtype
        if self._autocast is not None and dtype in _LOW:
            dtype = self._autocast
        return dtype_name(dtype, self._device_type, convolution=conv)


def fsdp_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype FSDP2 casts a module's parameters to, where it shards this module."""
    bases = type(module).__bases__
    if len(bases) != 2 or bases[0].__name__ != "FSDPModule":
        return None
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    dtype = policy.param_dtype
    return dtype if isinstance(dtype, torch.dtype) else None
