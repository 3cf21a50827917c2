"""Exact FLOPs, MFU and HFU for PyTorch training.

The public names, nothing else. They load on first use, so `import truemfu` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convention import Convention
    from .errors import BatchError, ModelError, TruemfuError, TruemfuWarning, UsageError
    from .flops.closed_form.flop_model import FlopModel
    from .flops.count.count import count_flops, count_step, profile_model_flops
    from .flops.flop_count import FlopCount
    from .flops.registry import register_formula, register_module
    from .hardware.detect import get_gpu_peak_flops
    from .monitor.monitor import TrainingMonitor
    from .monitor.on_demand import calculate_mfu_with_profiler, calculate_precise_mfu
    from .utilization import Utilization, calculate_mfu

__version__ = "0.1.0"

_HOMES = {
    "Convention": "convention",
    "BatchError": "errors",
    "ModelError": "errors",
    "TruemfuError": "errors",
    "TruemfuWarning": "errors",
    "UsageError": "errors",
    "FlopModel": "flops.closed_form.flop_model",
    "count_flops": "flops.count.count",
    "count_step": "flops.count.count",
    "profile_model_flops": "flops.count.count",
    "FlopCount": "flops.flop_count",
    "register_formula": "flops.registry",
    "register_module": "flops.registry",
    "get_gpu_peak_flops": "hardware.detect",
    "TrainingMonitor": "monitor.monitor",
    "calculate_mfu_with_profiler": "monitor.on_demand",
    "calculate_precise_mfu": "monitor.on_demand",
    "Utilization": "utilization",
    "calculate_mfu": "utilization",
}

__all__ = [
    "BatchError",
    "Convention",
    "FlopCount",
    "FlopModel",
    "ModelError",
    "TrainingMonitor",
    "TruemfuError",
    "TruemfuWarning",
    "UsageError",
    "Utilization",
    "__version__",
    "calculate_mfu",
    "calculate_mfu_with_profiler",
    "calculate_precise_mfu",
    "count_flops",
    "count_step",
    "get_gpu_peak_flops",
    "profile_model_flops",
    "register_formula",
    "register_module",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
