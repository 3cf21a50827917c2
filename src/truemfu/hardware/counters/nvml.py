"""The only module that opens NVML, NVIDIA's driver library: its calls turned into `CounterSample`.

    NvmlSource          every GPU, read again and again
    gpu_names           one question each; NVML is open for its length alone
    driver_version

No root, no daemon, no CUDA context: the library that nvidia-smi uses, which lets go of the interpreter's lock
for the length of each call. What a GPU or driver cannot tell is asked for once and None from then on; what
goes wrong otherwise (a GPU off the bus, a driver that is being replaced) fails that one read.

Activity comes from GPM (`gpm.py`): the driver compares two samples, so the first read has none, and renews
them ten times a second, so a read that comes too soon says `fresh=False` and nothing else.

nvidia-ml-py (module `pynvml`) is imported on opening; the extra is `nvidia`. torch is never imported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from ...errors import CounterError, NvmlMissing, warn_once
from .gpm import NEVER, Compared, Gpm
from .samples import CounterSample, GpuInfo, GpuProcess

T = TypeVar("T")

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
# Nothing to say this time: not found, no data, not ready.
_NOT_NOW = frozenset({6, 21, 27})

# Memory, processes and limits change slowly. The energy counter costs 3 ms of processor time a read on an
# H200, a thousand times as much as any other figure; it adds up, so nothing is lost between two reads of it.
_SLOW_S = 0.9
_CLOSE_S = 1.0


class NvmlSource:
    """Every GPU of this machine.

    `energy` is False for whoever has no use for it and many GPUs: it is what a read costs. `nvml` is the
    module `pynvml`, or what stands for it in a test.
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


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """What is asked for about once a second, as it was then."""

    at_s: float
    values: Mapping[str, Any]


class _Gpu:
    """One GPU: its handle, what it has been found not to support, and its two GPM samples."""

    def __init__(self, nvml: Any, index: int, driver: str, clock: Callable[[], float], energy: bool) -> None:
        self._nvml = nvml
        self._index = index
        self._driver = driver
        self._clock = clock
        self._energy = energy
        self._unsupported: set[str] = set()
        self._slow: _Slow | None = None
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
            # The other GPUs of the machine are as good as ever.
            self._lost = self._no_gpm_reason = f"GPU {index} cannot be opened: {problem}"

    def info(self) -> GpuInfo:
        reason, gpm = self._no_gpm_reason, self._gpm
        if reason is None and gpm is not None and gpm.standstill_s:
            reason = f"no activity counters: they have stood still for {gpm.standstill_s:.1f} s"
        return msgspec.structs.replace(self._info, no_gpm_reason=reason)

    def read(self) -> CounterSample:
        if self._lost is not None:
            raise CounterError(self._lost)
        nvml, handle = self._nvml, self._handle
        at_s = self._clock()
        try:
            activity = self._read_gpm(at_s)
            if activity is None:
                return CounterSample(index=self._index, at_s=at_s, fresh=False)
            clock_mhz = self._ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            power_mw = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
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

    def _open_gpm(self) -> Gpm | None:
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
            return Gpm(nvml, handle)
        except nvml.NVMLError as problem:
            self._no_gpm_reason = self._why_no_gpm(problem)
            return None

    def _why_no_gpm(self, problem: Any) -> str:
        if problem.value == _NO_PERMISSION:
            return "no activity counters: this user may not read GPM counters"
        return f"no activity counters: GPM of driver {self._driver}: {problem}"

    def _read_gpm(self, at_s: float) -> Compared | None:
        if self._gpm is None:
            return Compared()
        try:
            return self._gpm.read(at_s)
        except self._nvml.NVMLError as problem:
            # Samples it does not like to compare are an invalid argument as well, once it has compared some.
            passing = problem.value == _INVALID_ARGUMENT and self._gpm.has_worked
            if passing or problem.value not in NEVER:
                raise self._failed("the activity counters", problem) from None
            self._no_gpm_reason = self._why_no_gpm(problem)
            self._gpm = None  # its two samples are freed with the process
            return Compared()

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        nvml, handle = self._nvml, self._handle
        mask = self._ask("reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if mask is None:  # its name before driver 535
            mask = self._ask("reasons before", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return None if mask is None else tuple(name for bit, name in _THROTTLE_BITS.items() if mask & bit)

    def _slow_values(self, at_s: float) -> Mapping[str, Any]:
        """What is asked for about once a second; the energy with the sample it was read for alone."""
        if self._slow is not None and 0 <= at_s - self._slow.at_s < _SLOW_S:
            return self._slow.values
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
        if not self._energy:
            return values
        energy_mj = self._ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return {**values, "energy_j": _times(energy_mj, 1e-3)}

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
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return None  # unknown is None: another user's, gone by now, or cut in the middle of a letter
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
            if problem.value in NEVER:
                self._unsupported.add(what)
            elif problem.value not in _NOT_NOW:
                raise self._failed(what, problem) from None
        return None

    def _failed(self, what: str, problem: Any) -> CounterError:
        return CounterError(f"GPU {self._index} ({self._info.name}): {what}: {problem}")


def gpu_names() -> list[str]:
    """The name of each GPU in this machine, in the order of the PCI bus; a CounterError where NVML fails."""
    with _one_question() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    return [name.decode() if isinstance(name, bytes) else name for name in names]  # bytes: an old module's


def driver_version() -> str:
    """The version of the driver; a CounterError where NVML fails."""
    with _one_question() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


@contextmanager
def _one_question() -> Iterator[Any]:
    """NVML, opened and closed again. The library counts, so nobody else's is closed with it."""
    nvml = _module()
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            with suppress(nvml.NVMLError):  # the answer is there
                nvml.nvmlShutdown()
    except nvml.NVMLError as problem:
        raise CounterError(f"NVML does not answer: {problem}") from None


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
