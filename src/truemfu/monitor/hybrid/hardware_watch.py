"""The GPU's counters during a run, cut into windows of whole steps, with one launch per window.

    training thread   log_step ─► every ten seconds a Cut: a stamp of the SMs' cycles, in the step's note
    sampler's thread  NVML once a second, and at each cut ─► intervals
    row thread        Cut … Cut, read past both ─► MeasuredWindow: activity, true clock, energy between them

The host is ahead of the device: a cut is queued, and happens when the device reaches it. Its time is the
GPU's, in the stamp; the smallest difference to the host's clock seen so far (an empty queue) converts it to
the sampler's clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import CounterError
from ...hardware.counters.cycle_stamps import CycleStamps, Stamp, mean_clock_hz
from ...hardware.counters.executed import CYCLE_COUNTERS, DRIVER, counted_clock_hz
from ...hardware.counters.sampler import Sampler
from ...hardware.counters.samples import CounterSource, CounterWindow, find_gpu
from ...hardware.counters.windows import GPM_LAG_S, between

WINDOW_S = 10.0
"""Long compared with the counters' lag of 0.1 s and their period of 1 s at both ends of a window."""
_PERIOD_S = 1.0
SETTLE_S = 2.0
"""How long steps must have run without interruption before a window begins: a read at its beginning covers up
to a second before, and the time at which the device reached a cut is known to a few steps."""
_MARGIN_S = 0.01
_MAX_LAGS = 64
_MAX_INTERVALS = 600
_MIN_COVERED_SHARE = 0.7
"""The share of a window that the counters must cover."""
_LONGEST_WAIT_S = 3.0
"""For a read after the end of a window; reads come every second, unless the driver fails."""


class Cut(NamedTuple):
    """The end of a step where a window begins, and the one before ends if it was not interrupted."""

    at_s: float
    stamp: Stamp | None
    ends_window: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredWindow:
    """The counters' values between two cuts."""

    window: CounterWindow
    clock_hz: float | None
    clock_source: str


class HardwareWatch:
    """Reads one GPU during a run; created by `open_watch`."""

    def __init__(
        self,
        source: CounterSource,
        index: int,
        stamps: CycleStamps | None,
        *,
        sm_count: int,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._source, self._index, self._stamps = source, index, stamps
        self._sm_count = sm_count
        self._sampler = Sampler(source, indices=[index], period_s=period_s, keep=_MAX_INTERVALS)
        self._due_s: float | None = None
        self._is_open = False
        self._lags_s: deque[float] = deque(maxlen=_MAX_LAGS)
        self._awaited: tuple[Cut, float] | None = None
        self._sampler.start()

    def cut(self, now_s: float) -> Cut | None:
        """On the training thread, at the end of a step: a cut if one is due, by any monotonic clock."""
        if self._due_s is None:
            self._due_s = now_s + SETTLE_S
        if now_s < self._due_s:
            return None
        self._due_s = now_s + WINDOW_S
        stamp = None if self._stamps is None else self._stamps.take()
        cut = Cut(time.monotonic(), stamp, self._is_open)
        self._is_open = True
        # In a host-bound run the device is at the cut already: a read at this moment separates the activity
        # of the two windows, which would otherwise be divided within one second.
        self._sampler.read_soon(GPM_LAG_S / 2 + _MARGIN_S)
        return cut

    def restart(self) -> None:
        """Discard the current window: the next cut, after `SETTLE_S`, begins a new one."""
        self._is_open, self._due_s = False, None

    def has_read_past(self, cut: Cut) -> bool:
        """Whether the reads cover the time up to a cut that the device is past, or never will."""
        now_s = time.monotonic()
        if self._awaited is None or self._awaited[0] is not cut:
            self._awaited = cut, now_s
            self._note_lag(cut)
        if self.fault is not None or now_s - self._awaited[1] > _LONGEST_WAIT_S:
            return True
        intervals = self._sampler.intervals(self._index)
        return bool(intervals) and intervals[-1].end_s >= self._time_of(cut) + GPM_LAG_S / 2

    def measured(self, begin: Cut, end: Cut) -> MeasuredWindow | None:
        """On another thread, when the device is past both cuts; None if too little was read in between."""
        for cut in (begin, end):
            self._note_lag(cut)
        begin_s, end_s = self._time_of(begin), self._time_of(end)
        active = [part for part in self._sampler.intervals(self._index) if part.hmma_active is not None]
        window = between(active, begin_s, end_s)
        if window is None or window.seconds < _MIN_COVERED_SHARE * (end_s - begin_s):
            return None
        clock_hz = None
        if begin.stamp is not None and end.stamp is not None:
            clock_hz = mean_clock_hz(begin.stamp, end.stamp)
        clock_hz = clock_hz or counted_clock_hz(window, self._sm_count)
        if clock_hz is None:
            return MeasuredWindow(window=window, clock_hz=window.sm_clock_hz, clock_source=DRIVER)
        return MeasuredWindow(window=window, clock_hz=clock_hz, clock_source=CYCLE_COUNTERS)

    @property
    def fault(self) -> str | None:
        """Why the counters cannot be read at present."""
        health = self._sampler.health(self._index)
        return health.stopped or health.fault

    def close(self) -> None:
        """Stop reading, and release the driver."""
        self._sampler.stop()
        self._source.close()

    def _note_lag(self, cut: Cut) -> None:
        gpu_s = None if cut.stamp is None else cut.stamp.time_s()
        if gpu_s is not None:
            self._lags_s.append(gpu_s - cut.at_s)

    def _time_of(self, cut: Cut) -> float:
        """When the device reached a cut, by the host's monotonic clock."""
        gpu_s = None if cut.stamp is None else cut.stamp.time_s()
        return cut.at_s if gpu_s is None else gpu_s - min(self._lags_s, default=gpu_s - cut.at_s)


def open_watch(device: torch.device, notice: Callable[[str], None]) -> HardwareWatch | str:
    """A watch of this device, or why there is none."""
    found = counters_of(device)
    if isinstance(found, str):
        return found
    source, index = found
    stamps = CycleStamps.open(device)
    if isinstance(stamps, str):
        notice(f"hybrid mode: executed FLOPs use the clock the driver reports, which is too high: {stamps}")
    return HardwareWatch(
        source,
        index,
        stamps if isinstance(stamps, CycleStamps) else None,
        sm_count=torch.cuda.get_device_properties(device).multi_processor_count,
    )


def counters_of(device: torch.device) -> tuple[CounterSource, int] | str:
    """The source of this device's activity counters and its index there, or why there are none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they need an NVIDIA GPU, and this run is on {device.type}"
    from ...hardware.counters.nvml import NvmlSource

    try:
        source: CounterSource = NvmlSource()
    except CounterError as error:
        return str(error)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    gpu = find_gpu(source.gpus(), uuid)
    if gpu is not None and gpu.no_gpm_reason is None:
        return source, gpu.index
    source.close()
    return f"NVML does not list the GPU {uuid}" if gpu is None else str(gpu.no_gpm_reason)
