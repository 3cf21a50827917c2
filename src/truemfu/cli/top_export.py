"""`truemfu top --export [HOST:]PORT`: the last interval of every GPU, served to Prometheus.

    http://127.0.0.1:<port>/metrics  truemfu_gpu_tensor_active_ratio{gpu="0",name="NVIDIA H200",uuid="…"} 0.93

Names carry their units; unknown values are not served. A scrape reads stored values, it never queries the
driver. docs/grafana/truemfu-gpus.json shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ..errors import UsageError
from ..trackers.prometheus_server import LOOPBACK, MetricsServer
from .top_screen import NOT_HELD_BACK, TRUE_CLOCK, Reading

# Metric (after `truemfu_gpu_`) → attribute of the window.
_FROM_WINDOW: Mapping[str, str] = MappingProxyType(
    {
        "tensor_active_ratio": "tensor_active",
        "hmma_active_ratio": "hmma_active",
        "imma_active_ratio": "imma_active",
        "dfma_active_ratio": "dfma_active",
        "dmma_active_ratio": "dmma_active",
        "fp16_active_ratio": "fp16_active",
        "fp32_active_ratio": "fp32_active",
        "fp64_active_ratio": "fp64_active",
        "sm_active_ratio": "sm_active",
        "sm_occupancy_ratio": "sm_occupancy",
        "dram_active_ratio": "dram_active",
        "driver_utilisation_ratio": "gpu_utilisation",
        "sm_clock_hertz": "sm_clock_hz",
        "max_sm_clock_hertz": "max_sm_clock_hz",
        "power_watts": "power_w",
        "power_limit_watts": "power_limit_w",
        "memory_used_bytes": "memory_used_bytes",
        "memory_total_bytes": "memory_total_bytes",
    }
)
_FROM_READING: Mapping[str, str] = MappingProxyType(
    {
        "executed_flop_utilisation_ratio": "executed_flop_utilisation",
        "executed_flops_per_second": "executed_flops_per_s",
        "peak_flops_per_second": "peak_flops_per_s",
    }
)
_FIXED = ("max_sm_clock_hz", "power_limit_w", "memory_total_bytes", "peak_flops_per_s")
_UPPER_BOUND = f" (upper bound, at the clock the driver reports; {TRUE_CLOCK})"
_MORE: Mapping[str, str] = MappingProxyType(
    {
        "executed_flop_utilisation": _UPPER_BOUND,
        "executed_flops_per_s": _UPPER_BOUND,
        "gpu_utilisation": ", the driver's own: 1 as soon as any kernel runs",
        "sm_clock_hz": ", as the driver reports it",
        "peak_flops_per_s": ": dense, 16-bit",
    }
)
_LABELS = ("gpu", "name", "uuid")


@contextmanager
def serving(readings: Callable[[], Sequence[Reading]], port: int, host: str = LOOPBACK) -> Iterator[str]:
    """Serve on `port` (0: any free one) of `host` and yield the address."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise UsageError("--export needs prometheus_client: pip install 'truemfu[prometheus]'") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(readings))
    try:
        server = MetricsServer(registry, host, port)
    except OSError as problem:
        where = f"port {port}" if host == LOOPBACK else f"{host} port {port}"
        raise UsageError(
            f"cannot serve on {where}: {problem.strerror}; give --export another port or host"
        ) from None
    try:
        yield server.url
    finally:
        server.close()


class _Collector:
    """The values of each scrape."""

    def __init__(self, readings: Callable[[], Sequence[Reading]]) -> None:
        self._readings = readings

    def describe(self) -> Iterable[Any]:
        """Empty: the metrics depend on the GPUs."""
        return ()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = list(self._readings())
        for metric, attribute in {**_FROM_READING, **_FROM_WINDOW}.items():
            family = GaugeMetricFamily(f"truemfu_gpu_{metric}", _help_text(attribute), labels=_LABELS)
            for reading in found:
                holder = reading if metric in _FROM_READING else reading.window
                value = None if holder is None else getattr(holder, attribute)
                if value is not None:
                    family.add_metric(_labels(reading), value)
            yield family
        throttled = GaugeMetricFamily(
            "truemfu_gpu_throttled_ratio",
            "share of the last interval in which a reason throttled the clock",
            labels=(*_LABELS, "reason"),
        )
        dropped = CounterMetricFamily(
            "truemfu_gpu_dropped_intervals", "intervals without usable counters", labels=_LABELS
        )
        processes = GaugeMetricFamily(
            "truemfu_gpu_processes", "processes that use memory on the GPU", labels=_LABELS
        )
        for reading in found:
            dropped.add_metric(_labels(reading), reading.health.dropped)
            if reading.window is not None:
                for reason, share in (reading.window.throttle or {}).items():
                    if reason not in NOT_HELD_BACK:
                        throttled.add_metric([*_labels(reading), reason], share)
                if reading.window.processes is not None:
                    processes.add_metric(_labels(reading), len(reading.window.processes))
        yield from (throttled, dropped, processes)


def _labels(reading: Reading) -> list[str]:
    return [str(reading.gpu.index), reading.gpu.name, reading.gpu.uuid or ""]


def _help_text(attribute: str) -> str:
    when = "" if attribute in _FIXED else " over the last interval"
    return f"{attribute.replace('_', ' ')}{when}{_MORE.get(attribute, '')}"
