"""The only module that opens NVML, NVIDIA's driver library: its calls turned into `CounterSample`.

No root, no daemon, no CUDA context: the library that nvidia-smi uses, whose calls release the GIL. A value
that a GPU or driver does not support is queried once and None from then on; any other error (a GPU off the
bus, a driver that is being replaced) fails that one read.

Activity comes from GPM (`gpm.py`): the driver compares two samples, so the first read has none, and updates
them ten times a second, so a read that comes too soon has `fresh=False` and no values.

nvidia-ml-py (module `pynvml`) is imported on opening; the extra is `nvidia`. torch is never imported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import msgspec

from ...errors import CounterError, NvmlMissing, warn_once
from .gpm import NEVER, Compared, Gpm
from .samples import CounterSample, GpuInfo, GpuProcess

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
_INVALID_ARGUMENT, _NO_PERMISSION = 2, 4
# No value this time: not found, no data, not ready.
_NOT_NOW = frozenset({6, 21, 27})

# Memory, processes and limits change slowly. The energy counter costs 3 ms of processor time a read on an
# H200, a thousand times as much as any other figure; it is cumulative, so nothing is lost between two reads.
_SLOW_S = 0.9
_CLOSE_S = 1.0


class NvmlSource:
    """Every GPU of this machine.

    `energy` is False for callers that do not need it: it is most of the cost of a read. `nvml` is the module
    `pynvml`, or its replacement in a test.
    """

    def __init__(
        self, *, energy: bool = True, nvml: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        self._gpus = [_Gpu(self._nvml, index, driver, clock, energy) for index in range(count)]

    def gpus(self) -> Sequence[GpuInfo]:
        return [gpu.info() for gpu in self._gpus]

    def read(self, index: int) -> CounterSample:
        with self._reading:
            if self._closed:
                raise CounterError("NVML is closed")
            return self._gpus[index].read()

    def close(self) -> None:
        # A read that hangs in the driver still uses this memory: it is freed at the end of the process.
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


class _Gpu:
    """One GPU: its handle, its unsupported queries, and its two GPM samples."""

    def __init__(self, nvml: Any, index: int, driver: str, clock: Callable[[], float], energy: bool) -> None:
        self._nvml = nvml
        self._index = index
        self._driver = driver
        self._clock = clock
        self._energy = energy
        self._unsupported: set[str] = set()
        self._slow: tuple[float, Mapping[str, Any]] | None = None
        self._names: dict[int, str | None] = {}
        self._gpm: Gpm | None = None
        self._no_gpm_reason: str | None = None
        self._lost: str | None = None
        self._info = GpuInfo(index=index, name="unknown", driver=driver)
        try:
            self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._info = self._describe()
            self._gpm = self._open_gpm()
        except (nvml.NVMLError, CounterError) as problem:
            # The other GPUs of the machine can still be read.
            self._lost = self._no_gpm_reason = f"GPU {index} cannot be opened: {problem}"

    def info(self) -> GpuInfo:
        reason, gpm = self._no_gpm_reason, self._gpm
        if reason is None and gpm is not None and gpm.standstill_s:
            reason = f"no activity counters: unchanged for {gpm.standstill_s:.1f} s"
        return msgspec.structs.replace(self._info, no_gpm_reason=reason)

    def read(self) -> CounterSample:
        if self._lost is not None:
            raise CounterError(self._lost)
        at_s = self._clock()
        try:
            activity = self._read_gpm(at_s)
            if activity is None:
                return CounterSample(index=self._index, at_s=at_s, fresh=False)
            clock_mhz = self._query("clock", "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
            power_mw = self._query("power", "nvmlDeviceGetPowerUsage")
            return CounterSample(
                index=self._index,
                at_s=at_s,
                cycles=activity.cycles,
                sm_clock_hz=_times(clock_mhz, 1e6),
                power_w=_times(power_mw, 1e-3),
                throttle_reasons=self._throttle_reasons(),
                **self._slow_values(at_s),
                **activity.shares,
            )
        except CounterError:
            self._slow = None
            if self._gpm is not None:
                self._gpm.reset()
            raise

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def _describe(self) -> GpuInfo:
        memory = self._query("memory", "nvmlDeviceGetMemoryInfo")
        clock_mhz = self._query("max", "nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM)
        return GpuInfo(
            index=self._index,
            name=self._query("name", "nvmlDeviceGetName") or "unknown",
            uuid=self._query("uuid", "nvmlDeviceGetUUID"),
            memory_total_bytes=None if memory is None else int(memory.total),
            max_sm_clock_hz=_times(clock_mhz, 1e6),
            driver=self._driver,
        )

    def _open_gpm(self) -> Gpm | None:
        """The counters, or None and `_no_gpm_reason`."""
        nvml, handle = self._nvml, self._handle
        mig = self._query("mig", "nvmlDeviceGetMigMode")
        if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            self._no_gpm_reason = "no activity counters: MIG is on, and counters of slices are not supported"
            return None
        if not hasattr(nvml, "nvmlGpmMetricsGet"):
            self._no_gpm_reason = "no activity counters: this nvidia-ml-py has no GPM; install a newer one"
            return None
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._no_gpm_reason = "no activity counters: this GPU has no GPM (Hopper and later have it)"
                return None
            return Gpm(nvml, handle)
        except nvml.NVMLError as problem:
            self._no_gpm_reason = self._gpm_reason(problem)
            return None

    def _gpm_reason(self, problem: Any) -> str:
        if problem.value == _NO_PERMISSION:
            return "no activity counters: this user has no permission to read GPM counters"
        return f"no activity counters: GPM of driver {self._driver}: {problem}"

    def _read_gpm(self, at_s: float) -> Compared | None:
        if self._gpm is None:
            return Compared()
        try:
            return self._gpm.read(at_s)
        except self._nvml.NVMLError as problem:
            # After a first comparison, an invalid argument can also mean two samples it cannot compare.
            passing = problem.value == _INVALID_ARGUMENT and self._gpm.has_worked
            if passing or problem.value not in NEVER:
                raise self._failed("the activity counters", problem) from None
            self._no_gpm_reason = self._gpm_reason(problem)
            self._gpm = None  # its two samples are freed at the end of the process
            return Compared()

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        mask = self._query("reasons", "nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # its name before driver 535
            mask = self._query("reasons before", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if mask is None else tuple(name for bit, name in _THROTTLE_BITS.items() if mask & bit)

    def _slow_values(self, at_s: float) -> Mapping[str, Any]:
        """Values that are read about once a second; the energy only with the sample it was read for."""
        if self._slow is not None:
            read_at_s, values = self._slow
            if 0 <= at_s - read_at_s < _SLOW_S:
                return values
        memory = self._query("memory", "nvmlDeviceGetMemoryInfo")
        rates = self._query("utilisation", "nvmlDeviceGetUtilizationRates")
        limit_mw = self._query("power limit", "nvmlDeviceGetEnforcedPowerLimit")
        values = {
            "memory_used_bytes": None if memory is None else int(memory.used),
            "gpu_utilisation": None if rates is None else rates.gpu / 100,
            "power_limit_w": _times(limit_mw, 1e-3),
            "processes": self._processes(),
        }
        self._slow = at_s, values
        if not self._energy:
            return values
        energy_mj = self._query("energy", "nvmlDeviceGetTotalEnergyConsumption")
        return {**values, "energy_j": _times(energy_mj, 1e-3)}

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        found = self._query("processes", "nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        # A name is queried once in the life of a process; an id that reappears is another process.
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
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return None  # another user's, ended by now, or truncated inside a character
        return PurePath(words[0]).name if words else None

    def _query(self, what: str, function: str, *arguments: Any) -> Any:
        """What NVML returns for this GPU; None without a value. An unsupported query is not repeated."""
        if what in self._unsupported:
            return None
        try:
            found = getattr(self._nvml, function)(self._handle, *arguments)
            return found.decode() if isinstance(found, bytes) else found  # names, in older modules
        except AttributeError:  # the Python module is older than the call
            self._unsupported.add(what)
        except self._nvml.NVMLError as problem:
            if problem.value in NEVER:
                self._unsupported.add(what)
            elif problem.value not in _NOT_NOW:
                raise self._failed(what, problem) from None
        return None

    def _failed(self, what: str, problem: Any) -> CounterError:
        return CounterError(f"GPU {self._index} ({self._info.name}): {what}: {problem}")


def _module() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlMissing(
            "reading a GPU's counters needs nvidia-ml-py: pip install 'truemfu[nvidia]'"
        ) from None
    return pynvml


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor
