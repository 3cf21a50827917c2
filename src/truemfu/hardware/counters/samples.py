"""The values of a GPU's activity over an interval, from the chip's own counters.

    CounterSource.read ─► CounterSample ─┬─► CounterWindow (one interval) ─► combine, between ─► CounterWindow
    (NVML, or Replay)     CounterSample ─┘              windows.py

The driver is in `nvml.py`, the thread in `sampler.py`, recorded traces in `trace.py`, so that a trace takes
the same code path as a real chip.

A share is a number from 0 to 1. A value is None if the chip, the driver or missing permission prevents
reading it. Times are seconds of the monotonic clock of the reading process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory on the GPU; its name where this user may read it."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The constant properties of a GPU. `no_gpm_reason` is None if its activity counters can be read."""

    index: int
    name: str
    uuid: str | None = None
    memory_total_bytes: int | None = None
    max_sm_clock_hz: float | None = None
    driver: str | None = None
    no_gpm_reason: str | None = None


class Activities(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the GPU's time (of its SM cycles, but for the memory) that each part of it was active.

    `hmma_active` is the tensor pipe for fp16, bf16, tf32 and fp8, **and** some kernels without a product.
    `imma` is for integers, `dfma` and `dmma` for fp64 (an H200's products appear in the first);
    `tensor_active` is any of them. fp16, fp32, fp64 and integer are the plain units. `graphics_active` is the
    share of time with any kernel on the GPU.
    """

    tensor_active: float | None = None
    hmma_active: float | None = None
    imma_active: float | None = None
    dmma_active: float | None = None
    dfma_active: float | None = None
    fp16_active: float | None = None
    fp32_active: float | None = None
    fp64_active: float | None = None
    integer_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    dram_active: float | None = None
    graphics_active: float | None = None


ACTIVITIES: tuple[str, ...] = Activities.__struct_fields__

FASTEST_CLOCK_HZ = 1e10
"""No chip is this fast: a higher reading is invalid."""


class Cycles(msgspec.Struct, frozen=True, kw_only=True):
    """Raw cycles of newer drivers: since the machine started in a sample, over the time in a window."""

    elapsed: float


class Readings(Activities, frozen=True, kw_only=True):
    """What a sample and a window both have; their docstrings say how it is meant there."""

    index: int
    cycles: Cycles | None = None
    sm_clock_hz: float | None = None
    power_w: float | None = None
    """The driver's mean of about the last second."""
    power_limit_w: float | None = None
    energy_j: float | None = None
    memory_used_bytes: int | None = None
    gpu_utilisation: float | None = None
    processes: tuple[GpuProcess, ...] | None = None


class CounterSample(Readings, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="sample"):
    """One read of one GPU. Activities are those since the fresh read before; the first read has none.

    `fresh` is False if the driver had no update since then: such a read has no other values, and the next
    fresh one covers all the time since the last. `energy_j` is that since the driver was loaded; None in most
    reads in quick succession.
    """

    at_s: float
    fresh: bool = True
    throttle_reasons: tuple[str, ...] | None = None


class CounterWindow(Readings, frozen=True, kw_only=True):
    """The activity of one GPU from `begin_s` to `end_s`.

    `seconds` is the time its intervals cover: less than the span if one was dropped. `energy_j` is for these
    seconds, from readings of the energy counter about a second apart, interpolated by time; None if they
    cover less than half. `sm_clock_hz` is the clock the driver requested; the actual one is lower under load
    (`cycle_stamps` reads it). `gpu_utilisation` is the driver's own: the share of time
    with at least one kernel running, 1 for a single elementwise add. `throttle` is the share of time each
    reason throttled the clock; memory, processes and limits are the last known.
    """

    begin_s: float
    end_s: float
    seconds: float
    intervals: int = 1
    max_sm_clock_hz: float | None = None
    memory_total_bytes: int | None = None
    throttle: dict[str, float] | None = None


class CounterSource(Protocol):
    """Where samples come from: NVML, a replay, or a fake."""

    def gpus(self) -> Sequence[GpuInfo]:
        """The available GPUs."""

    def read(self, index: int) -> CounterSample:
        """One sample of a GPU; a `CounterError` if that fails this time."""

    def close(self) -> None:
        """Release the driver or the file; nothing is read afterwards."""


def find_gpu(gpus: Sequence[GpuInfo], uuid: str) -> GpuInfo | None:
    """The GPU with this UUID, as NVML or torch (without the word GPU in front) writes it.

    The driver's indices differ from those of a process that sees only some GPUs, so an index is not enough.
    """
    wanted = uuid.removeprefix("GPU-").casefold()
    return next(
        (gpu for gpu in gpus if gpu.uuid and gpu.uuid.removeprefix("GPU-").casefold() == wanted), None
    )
