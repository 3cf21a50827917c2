"""A step whose FLOPs the caller knows: no count, and the peak of the dtype most of the model is in."""

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
    """The FLOPs of a step as they were given; without a model only a configured peak is known."""
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
    """The dtype autocast has set on this thread, else the one most parameters have."""
    kind = "cpu" if device is None else device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=None)
