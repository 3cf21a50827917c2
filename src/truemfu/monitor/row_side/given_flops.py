"""A step whose FLOPs the caller gives: no count, and the peak of the model's dominant dtype."""

from __future__ import annotations

import torch
from torch import nn

from ...flops import AutocastState
from ...hardware.detect import get_gpu_peak_flops, known_spec, override_flops_per_s
from ..training_side.model_state import ModelState
from .flops_of_steps import StepFlops

METHOD = "given by the caller"


def given_flops(
    flops: float,
    *,
    state: ModelState | None,
    autocast: AutocastState | None,
    device: torch.device,
    peak_flops_per_s: float | None,
) -> StepFlops:
    """The FLOPs given for a step; without a model only a configured peak is known."""
    source = None if peak_flops_per_s is None else "monitoring.peak_tflops"
    if peak_flops_per_s is None and state is not None and autocast is not None:
        with autocast.applied():
            dtype = dominant_dtype(state.model, device)
        peak_flops_per_s = None if dtype is None else get_gpu_peak_flops(device, dtype)
        if peak_flops_per_s is not None:
            spec = known_spec(device) if override_flops_per_s() is None else None
            source = "override" if spec is None else f"datasheet: {spec.name}"
    return StepFlops(
        model_flops=flops,
        hardware_flops=None,
        peak_flops_per_s=peak_flops_per_s,
        peak_source=source,
        method=METHOD,
    )


def dominant_dtype(model: nn.Module, device: torch.device | None) -> torch.dtype | None:
    """Autocast's dtype on this thread, or else the dtype most parameters have."""
    device_type = "cpu" if device is None else device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=None)
