"""The dtype in which a layer multiplies: its weight's, or the one set by autocast, FSDP2 or a quantiser."""

from __future__ import annotations

import torch
from torch import nn

from ..operators.dtype_names import dtype_name

_LOW = (torch.float16, torch.bfloat16, torch.float32)


class ComputeDtypes:
    """Finds the dtypes of modules under the autocast state at construction."""

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
        """The name of the dtype in which a module computes with this parameter, as in counts."""
        dtype = None if parameter is None else parameter.dtype
        if dtype is None or not (dtype.is_floating_point or dtype.is_complex):  # packed by a quantiser
            own = getattr(module, "compute_dtype", None)
            dtype = own if isinstance(own, torch.dtype) else torch.get_default_dtype()
        dtype = fsdp or dtype
        if self._autocast is not None and dtype in _LOW:
            dtype = self._autocast
        return dtype_name(dtype, self._device_type, convolution=conv)


def fsdp_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype to which FSDP2 casts a module's parameters, if it shards this module."""
    bases = type(module).__bases__
    if len(bases) != 2 or bases[0].__name__ != "FSDPModule":
        return None
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    dtype = policy.param_dtype
    return dtype if isinstance(dtype, torch.dtype) else None
