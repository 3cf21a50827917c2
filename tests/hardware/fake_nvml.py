"""What stands for the module `pynvml`: H200s that do what a recorded trace says, or the same all the time.

The counters behave as they were seen to: two samples within one renewal compare to zeros and a NaN. Which
reads of a trace were such is in the trace (`dram_active` is NaN, null in JSON).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.hardware.recorded import says_nothing

from truemfu.hardware.counters.gpm import _PERCENT_IDS
from truemfu.hardware.counters.nvml import _THROTTLE_BITS
from truemfu.hardware.counters.samples import CounterSample, GpuProcess

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INVALID_ARGUMENT, GPU_IS_LOST, UNKNOWN_ERROR = 3, 4, 6, 2, 15, 999

# Every share is its metric's number in per cent.
STEADY = CounterSample(
    index=0,
    at_s=0.0,
    sm_clock_hz=1335e6,
    power_w=688.0,
    power_limit_w=700.0,
    energy_j=5000.0,
    memory_used_bytes=300,
    gpu_utilisation=1.0,
    throttle_reasons=("power_limit",),
    processes=(GpuProcess(pid=7, name="/usr/bin/python3 train.py", memory_bytes=200),),
    **{name: number / 100 for name, number in _PERCENT_IDS.items()},
)


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """`errors` maps a call to the error it raises; `before_read` is told how many reads there were."""

    NVMLError = FakeNvmlError
    NVML_CLOCK_SM = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *, rows: Sequence[CounterSample] = (STEADY,), gpus: int = 1, **errors: int) -> None:
        self.rows = rows
        self.errors = errors
        self.calls: list[str] = []
        self.before_read: Callable[[int], object] = lambda reads: None
        self.reads = 0
        self.freed = 0
        self.cycles = self.stands_still = False
        self.mig, self.gpm = 0, 1
        self._handles = [SimpleNamespace(index=index, place=-1, renewals=0) for index in range(gpus)]

    def clock(self) -> float:
        """The time of the read that comes next, of one GPU that plays a trace."""
        return self.rows[self._handles[0].place + 1].at_s

    def row(self, handle: Any) -> CounterSample:
        return self.rows[max(handle.place, 0) % len(self.rows)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A call that answers without a change of state."""
        if name not in _ANSWERS:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, lambda: _ANSWERS[name](self, *arguments))

    def _answer(self, name: str, value: Callable[[], Any]) -> Any:
        self.calls.append(name)
        if name in self.errors:
            raise FakeNvmlError(self.errors[name])
        return value()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._answer("nvmlDeviceGetHandleByIndex", lambda: self._handles[index])

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(15)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmSampleGet(self, handle: Any, into: Any) -> None:
        self.before_read(self.reads)
        self.reads += 1
        handle.place += 1
        self._answer("nvmlGpmSampleGet", lambda: None)
        if not (self.stands_still or says_nothing(self.row(handle))):
            handle.renewals += 1
        into.renewal, into.row = handle.renewals, self.row(handle)

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        before, after = request.sample1, request.sample2
        assert 0 <= after.renewal - before.renewal <= 1, "each renewal is compared with the one before"
        raw = request.metrics[0].metricId == 248
        self._answer("raw" if raw else "nvmlGpmMetricsGet", lambda: None)
        for place in range(request.numMetrics):
            metric = request.metrics[place]
            if raw:
                metric.value = 1e9 * after.renewal
                metric.nvmlReturn = 0 if self.cycles else INVALID_ARGUMENT
            elif after.renewal == before.renewal:
                metric.value = math.nan if _NAMES[metric.metricId] == "dram_active" else 0.0
            else:
                metric.value = 100 * getattr(after.row, _NAMES[metric.metricId])

    def nvmlGpmSampleFree(self, handle: Any) -> None:
        self.freed += 1


_NAMES: Mapping[int, str] = {number: name for name, number in _PERCENT_IDS.items()}
_BITS: Mapping[str, int] = {name: bit for bit, name in _THROTTLE_BITS.items()}


def _mask(reasons: Iterable[str]) -> int:
    return sum(_BITS[reason] for reason in reasons)


# What each call says, from the fake and what the call is given.
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "nvmlInit": lambda nvml: None,
    "nvmlShutdown": lambda nvml: None,
    "nvmlDeviceGetCount": lambda nvml: len(nvml._handles),
    "nvmlSystemGetDriverVersion": lambda nvml: "580.1",
    "nvmlDeviceGetName": lambda nvml, handle: "NVIDIA H200",
    "nvmlDeviceGetUUID": lambda nvml, handle: f"GPU-{handle.index}",
    "nvmlDeviceGetMaxClockInfo": lambda nvml, handle, kind: 1980,
    "nvmlDeviceGetClockInfo": lambda nvml, handle, kind: nvml.row(handle).sm_clock_hz / 1e6,
    "nvmlDeviceGetPowerUsage": lambda nvml, handle: nvml.row(handle).power_w * 1e3,
    "nvmlDeviceGetEnforcedPowerLimit": lambda nvml, handle: nvml.row(handle).power_limit_w * 1e3,
    "nvmlDeviceGetTotalEnergyConsumption": lambda nvml, handle: nvml.row(handle).energy_j * 1e3,
    "nvmlDeviceGetMemoryInfo": lambda nvml, handle: SimpleNamespace(
        total=150754820096, used=nvml.row(handle).memory_used_bytes
    ),
    "nvmlDeviceGetUtilizationRates": lambda nvml, handle: SimpleNamespace(
        gpu=100 * nvml.row(handle).gpu_utilisation
    ),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda nvml, handle: _mask(nvml.row(handle).throttle_reasons),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda nvml, handle: _BITS["thermal_limit"],
    "nvmlDeviceGetComputeRunningProcesses": lambda nvml, handle: [
        SimpleNamespace(pid=process.pid, usedGpuMemory=process.memory_bytes)
        for process in nvml.row(handle).processes
    ],
    "nvmlSystemGetProcessName": lambda nvml, pid: next(
        process.name for row in nvml.rows for process in row.processes if process.pid == pid
    ),
    "nvmlDeviceGetMigMode": lambda nvml, handle: [nvml.mig, nvml.mig],
    "nvmlGpmQueryDeviceSupport": lambda nvml, handle: SimpleNamespace(isSupportedDevice=nvml.gpm),
    "nvmlGpmSampleAlloc": lambda nvml: SimpleNamespace(renewal=0, row=None),
}


def hang() -> None:
    """What a driver does that does not answer: no signal ends it, and no lock of the interpreter is held."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
