"""The clock a GPU actually ran at: the cycle counter of every SM, read on the training's stream.

    take ─► a tiny kernel in the stream: each SM writes (its cycles, the time) ─► pinned memory
    take ─► … later, again                                                     ─► pinned memory
                            mean_clock_hz(before, after) = Δcycles / Δtime, mean of the SMs

Why: the driver reports the clock it requested. Under load the chip stretches its cycles and runs slower: on
an H200 4 to 11 % in steady tensor work (1,447 MHz reported, 1,318 counted, in products at the power limit).
A rate computed from the reported clock is too high by as much. The counters of the SMs give the actual clock.

A stamp is one short launch between the training's own kernels; nothing waits for it, and it is
read once the stream has passed it. It only needs the CUDA driver (`libcuda`, PTX for any NVIDIA GPU since
Volta), so there is nothing to compile or install.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .samples import FASTEST_CLOCK_HZ

if TYPE_CHECKING:
    import torch

CUDA_DRIVER = "nvcuda" if sys.platform == "win32" else "libcuda.so.1"
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry truemfu_cycle_stamp(.param .u64 where, .param .u32 places)
{
    .reg .pred %outside;
    .reg .b32 %sm, %places;
    .reg .b64 %where, %offset, %cycles, %nanoseconds;
    mov.u32 %sm, %smid;
    ld.param.u32 %places, [places];
    setp.ge.u32 %outside, %sm, %places;
    @%outside ret;
    ld.param.u64 %where, [where];
    mul.wide.u32 %offset, %sm, 16;
    add.s64 %where, %where, %offset;
    mov.u64 %cycles, %clock64;
    mov.u64 %nanoseconds, %globaltimer;
    st.global.v2.u64 [%where], {%cycles, %nanoseconds};
    ret;
}
"""
_BLOCKS_PER_SM = 4
_SLOTS = 64


class Stamp(NamedTuple):
    """Cycles and nanoseconds of every SM at one moment of the stream; readable once the stream is past it.

    It uses one of `_SLOTS` slots in rotation; a stamp whose slot has been reused is empty.
    """

    stamps: CycleStamps
    number: int

    def by_sm(self) -> dict[int, tuple[int, int]]:
        """(cycles, nanoseconds of the GPU's timer) of each SM that was reached."""
        values = self.stamps.values_of(self.number)
        return {sm: (cycles, time_ns) for sm, (cycles, time_ns) in enumerate(values) if time_ns}

    def time_s(self) -> float | None:
        """When it was taken, in seconds of the GPU's own timer; None before the stream has reached it."""
        times_ns = [time_ns for _, time_ns in self.by_sm().values()]
        return statistics.median(times_ns) / 1e9 if times_ns else None


class CycleStamps:
    """Takes stamps on one device. Use `open`, which returns the reason if that is not possible."""

    def __init__(self, device: torch.device, driver: Any, function: Any, slots: torch.Tensor) -> None:
        self._device, self._driver, self._function = device, driver, function
        self._slots = slots
        self._sm_count = slots.shape[1]
        self._taken = 0

    @classmethod
    def open(cls, device: torch.device) -> CycleStamps | str:
        """Stamps for this device, or the reason why there are none. Loading the kernel takes about 1 ms.

        They are cached for the life of the process: a queued stamp may write after its result is no longer
        needed, so its memory must stay allocated.
        """
        import torch

        if device in _OPENED:
            return _OPENED[device]
        if device.type != "cuda" or torch.version.cuda is None:
            return "cycle counters are read on NVIDIA GPUs only"
        try:
            driver = ctypes.CDLL(CUDA_DRIVER)
        except OSError:
            return f"{CUDA_DRIVER} cannot be loaded"
        torch.zeros((), device=device)  # creates the context that the driver calls below use
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            failed = driver.cuModuleLoadData(ctypes.byref(module), _PTX) or driver.cuModuleGetFunction(
                ctypes.byref(function), module, b"truemfu_cycle_stamp"
            )
        if failed:
            return f"the driver rejects the kernel that reads cycle counters (error {failed})"
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        slots = torch.zeros(_SLOTS, sm_count, 2, dtype=torch.int64, device="cpu", pin_memory=True)
        _OPENED[device] = cls(device, driver, function, slots)
        return _OPENED[device]

    def take(self) -> Stamp | None:
        """A stamp in the work queued on the current stream; None during a graph capture or on an error."""
        import torch

        with torch.cuda.device(self._device):
            return None if torch.cuda.is_current_stream_capturing() else self._launch()

    def _launch(self) -> Stamp | None:
        import torch

        slot = self._slots[self._taken % _SLOTS]
        slot.zero_()
        where, sm_count = ctypes.c_uint64(slot.data_ptr()), ctypes.c_uint32(self._sm_count)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(sm_count))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        blocks = self._sm_count * _BLOCKS_PER_SM
        failed = self._driver.cuLaunchKernel(
            self._function, blocks, 1, 1, 32, 1, 1, 0, stream, arguments, None
        )
        if failed:
            return None
        self._taken += 1
        return Stamp(self, self._taken - 1)

    def values_of(self, number: int) -> list[tuple[int, int]]:
        """The values the SMs wrote for one stamp; empty if its slot has been reused."""
        if number < self._taken - _SLOTS:
            return []
        return [(cycles, time_ns) for cycles, time_ns in self._slots[number % _SLOTS].tolist()]


_OPENED: dict[torch.device, CycleStamps] = {}


def mean_clock_hz(before: Stamp, after: Stamp) -> float | None:
    """The mean SM clock between two stamps that the stream has passed; None if they are not valid."""
    begins, ends = before.by_sm(), after.by_sm()
    clocks_hz = []
    for sm in begins.keys() & ends.keys():
        cycles, time_ns = (end - begin for begin, end in zip(begins[sm], ends[sm], strict=True))
        if time_ns <= 0 or not 0 < cycles / time_ns * 1e9 < FASTEST_CLOCK_HZ:
            return None  # the counters were reset in between
        clocks_hz.append(cycles / time_ns * 1e9)
    return statistics.fmean(clocks_hz) if clocks_hz else None
