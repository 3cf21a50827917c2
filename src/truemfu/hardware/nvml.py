"""The one door to NVIDIA's driver: NVML's calls turned into `CounterSample`.

No root, no daemon, no CUDA context: the library that nvidia-smi uses, which lets go of the interpreter's lock
for the length of each call. What a GPU or driver cannot tell is asked for once and None from then on; what
goes wrong otherwise (a GPU off the bus, a driver that is being replaced) fails that one read.

Activity comes from GPM, the counters of Hopper and later: the driver compares two samples, so the first
read has none. The raw cycle counters of newer drivers (ids 248 to 260) are read beside them.

nvidia-ml-py (module `pynvml`) is imported on opening; the extra is `nvidia`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from ..errors import CounterError, warn_once
from .counters import CounterSample, Cycles, GpuInfo, GpuProcess

T = TypeVar("T")

# The driver's own numbers, the same in every release; older versions of the Python module lack some names.
_PERCENT_IDS: Mapping[str, int] = MappingProxyType(
    {
        "graphics_active": 1,
        "sm_active": 2,
        "sm_occupancy": 3,
        "integer_active": 4,
        "tensor_active": 5,
        "dfma_active": 6,
        "hmma_active": 7,
        "dmma_active": 8,
        "imma_active": 9,
        "dram_active": 10,
        "fp64_active": 11,
        "fp32_active": 12,
        "fp16_active": 13,
    }
)
_CYCLE_IDS: Mapping[str, int] = MappingProxyType(
    {
        "elapsed": 248,
        "sm": 249,
        "mma": 250,
        "dmma": 251,
        "hmma": 252,
        "imma": 253,
        "dfma": 254,
        "integer": 257,
        "fp64": 258,
        "fp32": 259,
        "fp16": 260,
    }
)
_THROTTLE_BITS: Mapping[int, str] = MappingProxyType(
    {
        0x001: "gpu_idle",
        0x002: "application_clocks",
        0x004: "power_limit",
        0x008: "hardware_slowdown",
        0x010: "sync_boost",
        0x020: "thermal_limit",
        0x040: "hardware_thermal_limit",
        0x080: "power_brake",
        0x100: "display_clocks",
        0x200: "board_limit",
        0x400: "reliability",
    }
)
# Error numbers after which asking again is of no use: invalid argument, not supported, no permission,
# function not found, argument version, deprecated.
_NEVER = frozenset({2, 3, 4, 13, 25, 26})
_INVALID_ARGUMENT, _NO_PERMISSION = 2, 4
# Nothing to say this time: not found, no data, not ready.
_NOT_NOW = frozenset({6, 21, 27})

# Memory, processes and limits change slowly and cost more to ask than the counters.
_SLOW_S = 0.9
_CLOSE_S = 1.0


class NvmlSource:
    """Every GPU of this machine. `nvml` is the module `pynvml`, or what stands for it in a test."""

    def __init__(self, *, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = _module() if nvml is None else nvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as problem:
            raise CounterError(f"NVML cannot be opened, so no NVIDIA GPU can be read: {problem}") from None
        try:
            count = self._nvml.nvmlDeviceGetCount()
            driver = str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError as problem:
            raise CounterError(f"NVML cannot list the GPUs: {problem}") from None
        if not count:
            raise CounterError("NVML finds no GPU on this machine")
        self._reading = threading.Lock()
        self._closed = False
        self._gpus = [_Gpu(self._nvml, index, driver, clock) for index in range(count)]

    def gpus(self) -> Sequence[GpuInfo]:
        return [gpu.info() for gpu in self._gpus]

    def read(self, index: int) -> CounterSample:
        with self._reading:
            if self._closed:
                raise CounterError("NVML is closed")
            return self._gpus[index].read()

    def close(self) -> None:
        # A read that hangs in the driver still uses what would be freed here: the process's end frees it too.
        if self._closed or not self._reading.acquire(timeout=_CLOSE_S):
            return
        try:
            self._closed = True
            for gpu in self._gpus:
                gpu.close()
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as problem:
            warn_once(f"NVML did not close: {problem}")
        finally:
            self._reading.release()


@dataclass(kw_only=True)
class _Slow:
    """What is asked for about once a second, as it was then."""

    at_s: float
    values: Mapping[str, Any] = field(default_factory=dict)


class _Gpu:
    """One GPU: its handle, what it has been found not to support, and its two GPM samples."""

    def __init__(self, nvml: Any, index: int, driver: str, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._index = index
        self._driver = driver
        self._clock = clock
        self._unsupported: set[str] = set()
        self._slow: _Slow | None = None
        self._names: dict[int, str | None] = {}
        self._gpm: _Gpm | None = None
        self._no_gpm_reason: str | None = None
        self._lost: str | None = None
        self._info = GpuInfo(index=index, name="unknown", driver=driver)
        try:
            self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._info = self._describe()
            self._gpm = self._open_gpm()
        except (nvml.NVMLError, CounterError) as problem:
            # The other GPUs of the machine are as good as ever.
            self._lost = self._no_gpm_reason = f"GPU {index} cannot be opened: {problem}"

    def info(self) -> GpuInfo:
        return msgspec.structs.replace(self._info, no_gpm_reason=self._no_gpm_reason)

    def read(self) -> CounterSample:
        if self._lost is not None:
            raise CounterError(self._lost)
        nvml, handle = self._nvml, self._handle
        at_s = self._clock()
        try:
            shares, cycles = self._read_gpm()
            clock_mhz = self._ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            power_mw = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            energy_mj = self._ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            return CounterSample(
                index=self._index,
                at_s=at_s,
                cycles=cycles,
                sm_clock_hz=_times(clock_mhz, 1e6),
                power_w=_times(power_mw, 1e-3),
                energy_j=_times(energy_mj, 1e-3),
                throttle_reasons=self._throttle_reasons(),
                **self._slow_values(at_s),
                **shares,
            )
        except CounterError:
            if self._gpm is not None:
                self._gpm.forget()
            raise

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _describe(self) -> GpuInfo:
        nvml, handle = self._nvml, self._handle
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        clock_mhz = self._ask("max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        return GpuInfo(
            index=self._index,
            name=self._ask("name", lambda: str(nvml.nvmlDeviceGetName(handle))) or "unknown",
            uuid=self._ask("uuid", lambda: str(nvml.nvmlDeviceGetUUID(handle))),
            memory_total_bytes=None if memory is None else int(memory.total),
            max_sm_clock_hz=_times(clock_mhz, 1e6),
            driver=self._driver,
        )

    def _open_gpm(self) -> _Gpm | None:
        """The counters, or None and `_no_gpm_reason`."""
        nvml, handle = self._nvml, self._handle
        mig = self._ask("mig", lambda: nvml.nvmlDeviceGetMigMode(handle))
        if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            self._no_gpm_reason = "no activity counters: MIG is on, and they are not read by slice"
            return None
        if not hasattr(nvml, "nvmlGpmMetricsGet"):
            self._no_gpm_reason = "no activity counters: this nvidia-ml-py has no GPM; install a newer one"
            return None
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._no_gpm_reason = "no activity counters: this GPU has no GPM (Hopper and later have it)"
                return None
            return _Gpm(nvml, handle)
        except nvml.NVMLError as problem:
            self._no_gpm_reason = self._why_no_gpm(problem)
            return None

    def _why_no_gpm(self, problem: Any) -> str:
        if problem.value == _NO_PERMISSION:
            return "no activity counters: this user may not read GPM counters"
        return f"no activity counters: GPM of driver {self._driver}: {problem}"

    def _read_gpm(self) -> tuple[dict[str, Any], Cycles | None]:
        if self._gpm is None:
            return {}, None
        try:
            return self._gpm.read()
        except self._nvml.NVMLError as problem:
            # Samples it does not like to compare are an invalid argument as well, once it has compared some.
            passing = problem.value == _INVALID_ARGUMENT and self._gpm.has_worked
            if passing or problem.value not in _NEVER:
                raise self._failed("the activity counters", problem) from None
            self._no_gpm_reason = self._why_no_gpm(problem)
            self._gpm = None  # its two samples are freed with the process
            return {}, None

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        nvml, handle = self._nvml, self._handle
        mask = self._ask("reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if mask is None:  # its name before driver 535
            mask = self._ask("reasons before", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return None if mask is None else tuple(name for bit, name in _THROTTLE_BITS.items() if mask & bit)

    def _slow_values(self, at_s: float) -> Mapping[str, Any]:
        if self._slow is None or not 0 <= at_s - self._slow.at_s < _SLOW_S:
            nvml, handle = self._nvml, self._handle
            memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
            rates = self._ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
            limit_mw = self._ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            values = {
                "memory_used_bytes": None if memory is None else int(memory.used),
                "gpu_utilisation": None if rates is None else rates.gpu / 100,
                "power_limit_w": _times(limit_mw, 1e-3),
                "processes": self._processes(),
            }
            self._slow = _Slow(at_s=at_s, values=values)
        return self._slow.values

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        nvml, handle = self._nvml, self._handle
        found = self._ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if found is None:
            return None
        # A name is asked for once in the life of a process; a number that comes back is another process.
        self._names = {
            process.pid: self._names[process.pid]
            if process.pid in self._names
            else self._process_name(process.pid)
            for process in found
        }
        return tuple(
            GpuProcess(pid=process.pid, name=self._names[process.pid], memory_bytes=process.usedGpuMemory)
            for process in found
        )

    def _process_name(self, pid: int) -> str | None:
        """The program's name without its folder; in a container the driver may not find it."""
        try:
            words = str(self._nvml.nvmlSystemGetProcessName(pid)).split()
        except self._nvml.NVMLError:
            return None  # unknown is None: another user's, or gone by now
        return PurePath(words[0]).name if words else None

    def _ask(self, what: str, call: Callable[[], T]) -> T | None:
        """The answer; None where there is none. What is not supported is not asked for again."""
        if what in self._unsupported:
            return None
        try:
            return call()
        except AttributeError:  # the Python module is older than the call
            self._unsupported.add(what)
        except self._nvml.NVMLError as problem:
            if problem.value in _NEVER:
                self._unsupported.add(what)
            elif problem.value not in _NOT_NOW:
                raise self._failed(what, problem) from None
        return None

    def _failed(self, what: str, problem: Any) -> CounterError:
        return CounterError(f"GPU {self._index} ({self._info.name}): {what}: {problem}")


class _Gpm:
    """Two samples in the driver's memory, compared and exchanged at every read."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._percents = self._request(_PERCENT_IDS)
        self._counts: Any = self._request(_CYCLE_IDS)
        self._primed = False
        self.has_worked = False

    def read(self) -> tuple[dict[str, Any], Cycles | None]:
        """Shares since the read before and the raw cycles; nothing the first time."""
        self._nvml.nvmlGpmSampleGet(self._handle, self._after)
        primed, self._primed = self._primed, True
        if not primed:
            self._before, self._after = self._after, self._before
            return {}, None
        percents = self._compare(self._percents, _PERCENT_IDS)
        self.has_worked = True
        shares = {name: _times(value, 0.01) for name, value in percents.items()}
        cycles = self._read_cycles()
        self._before, self._after = self._after, self._before
        return shares, cycles

    def forget(self) -> None:
        """The next read is a first one: nothing spans the trouble between."""
        self._primed = False

    def close(self) -> None:
        for sample in (self._before, self._after):
            self._nvml.nvmlGpmSampleFree(sample)

    def _read_cycles(self) -> Cycles | None:
        if self._counts is None:
            return None
        try:
            counts = self._compare(self._counts, _CYCLE_IDS)
        except self._nvml.NVMLError as problem:
            if problem.value not in _NEVER:
                raise
            counts = {}
        elapsed = counts.pop("elapsed", None)
        if elapsed is None:  # driver 580 answers "invalid argument"
            self._counts = None
            return None
        return Cycles(elapsed=elapsed, **counts)

    def _request(self, ids: Mapping[str, int]) -> Any:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(ids)
        for place, metric in enumerate(ids.values()):
            request.metrics[place].metricId = metric
        return request

    def _compare(self, request: Any, ids: Mapping[str, int]) -> dict[str, float | None]:
        request.sample1, request.sample2 = self._before, self._after
        self._nvml.nvmlGpmMetricsGet(request)
        answers = (request.metrics[place] for place in range(len(ids)))
        return {
            name: None if answer.nvmlReturn else float(answer.value)
            for name, answer in zip(ids, answers, strict=True)
        }


def _module() -> Any:
    try:
        import pynvml
    except ImportError:
        raise CounterError(
            "reading a GPU's counters needs nvidia-ml-py: pip install 'truemfu[nvidia]'"
        ) from None
    return pynvml


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor
