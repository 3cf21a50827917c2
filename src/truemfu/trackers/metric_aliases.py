"""Metric names of other tools, for existing dashboards.

One table per preset: our key → their key and the factor to their unit. A key without a counterpart keeps its
name, so nothing is lost. Checked against Composer's `SpeedMonitor` and `MemoryMonitor` and torchtitan's
`components/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GIB = 1 / 2**30
_GB = 1e-9

_COMPOSER: Mapping[str, tuple[str, float]] = {
    "training/loss": ("loss/train/total", 1),
    "training/epoch": ("time/epoch", 1),
    "training/grad_norm": ("l2_norm/grad/global", 1),
    "perf/steps_per_second": ("throughput/batches_per_sec", 1),
    "perf/samples_per_second": ("throughput/samples_per_sec", 1),
    "perf/samples_per_second_per_gpu": ("throughput/device/samples_per_sec", 1),
    "perf/tokens_per_second": ("throughput/tokens_per_sec", 1),
    "perf/tokens_per_second_per_gpu": ("throughput/device/tokens_per_sec", 1),
    "perf/tflops_per_gpu": ("throughput/device/flops_per_sec", 1e12),
    "perf/mfu": ("throughput/device/mfu", 1),
    "perf/memory_peak_bytes": ("memory/peak_allocated_mem", _GB),
}

# Its tps is tokens per second per device. Peak memory is allocated memory: the nearest is their "active",
# which adds blocks that are freed but still waiting for another stream.
_TORCHTITAN: Mapping[str, tuple[str, float]] = {
    "training/loss": ("loss_metrics/global_avg_loss", 1),
    "training/lr": ("lr", 1),
    "training/grad_norm": ("grad_norm", 1),
    "perf/tokens_per_second_per_gpu": ("throughput(tps)", 1),
    "perf/tflops_per_gpu": ("tflops", 1),
    "perf/mfu_percent": ("mfu(%)", 1),
    "perf/step_time": ("time_metrics/end_to_end(s)", 1),
    "perf/data_wait": ("time_metrics/data_loading(s)", 1),
    "perf/memory_peak_bytes": ("memory/max_active(GiB)", _GIB),
}

PRESETS: Mapping[str, Mapping[str, tuple[str, float]]] = MappingProxyType(
    {"truemfu": {}, "composer": _COMPOSER, "torchtitan": _TORCHTITAN}
)


def rename(metrics: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The row with the names and units of `preset`, as a new dictionary."""
    renamed: dict[str, Any] = {}
    for key, value in metrics.items():
        name, factor = PRESETS[preset].get(key, (key, 1))
        renamed[name] = value if factor == 1 or value is None else value * factor
    return renamed
