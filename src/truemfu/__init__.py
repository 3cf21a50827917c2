"""Exact FLOPs, MFU and HFU for PyTorch training.

Only the public names. They load on first use, so `import truemfu` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .convention import Convention
    from .errors import BatchError, ModelError, TruemfuError, TruemfuWarning, UsageError
    from .flops import (
        FlopCount,
        FlopModel,
        count_flops,
        count_step,
        profile_model_flops,
        register_formula,
        register_module,
    )
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
    "FlopModel": "flops",
    "count_flops": "flops",
    "count_step": "flops",
    "profile_model_flops": "flops",
    "FlopCount": "flops",
    "register_formula": "flops",
    "register_module": "flops",
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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
