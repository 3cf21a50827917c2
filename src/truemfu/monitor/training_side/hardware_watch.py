"""The GPU's counters beside a run: cut into windows of whole steps, at one launch a window.

    training thread   log_step ─► every ten seconds a Cut: a stamp of the SMs' cycles, in the step's note
    sampler's thread  NVML once a second, and at each cut ─► intervals
    resolver          Cut … Cut, read past both ─► Measured: activity, true clock, energy between them

The host is ahead of the device: a cut lies in the device's queue, and happens when the device gets there. Its
time is the GPU's own, in the stamp; the least difference to the host's clock ever seen (an empty queue)
brings it onto the clock of the sampler.
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
"""Counters lag by a tenth of a second, and at its ends a window is cut out of whole seconds."""
_PERIOD_S = 1.0
SETTLE_S = 2.0
"""How long steps must have followed each other before a window begins: a read at its beginning tells of up to
a second before, and when the device got to a cut is known to a few steps."""
_MARGIN_S = 0.01
_LAGS_KEPT = 64
_INTERVALS_KEPT = 600
_ENOUGH = 0.7
"""Of a window, what the counters must tell of."""
_LONGEST_WAIT_S = 3.0
"""For a read after the end of a window; they come every second, unless the driver is in trouble."""


class Cut(NamedTuple):
    """The end of a step at which a window begins, and ends unless steps before it are not to be measured."""

    at_s: float
    stamp: Stamp | None
    ends_window: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the counters say of the time between two cuts."""

    window: CounterWindow
    clock_hz: float | None
    clock_source: str


class HardwareWatch:
    """Reads one GPU while a run lasts. `open_watch` makes one where there are counters."""

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
        self._sampler = Sampler(source, indices=[index], period_s=period_s, keep=_INTERVALS_KEPT)
        self._due_s: float | None = None
        self._is_open = False
        self._lags_s: deque[float] = deque(maxlen=_LAGS_KEPT)
        self._awaited: tuple[Cut, float] | None = None
        self._sampler.start()

    def cut(self, now_s: float) -> Cut | None:
        """On the training thread, at the end of a step: a cut if one is due. `now_s` is any steady clock."""
        if self._due_s is None:
            self._due_s = now_s + SETTLE_S
        if now_s < self._due_s:
            return None
        self._due_s = now_s + WINDOW_S
        stamp = None if self._stamps is None else self._stamps.take()
        cut = Cut(time.monotonic(), stamp, self._is_open)
        self._is_open = True
        # Where the host is the limit its pace changes, and the device is here by now: with a read that tells
        # of this moment, activity within a second need not be shared out between two windows.
        self._sampler.read_soon(GPM_LAG_S / 2 + _MARGIN_S)
        return cut

    @property
    def due_s(self) -> float:
        """From when on `cut` has something to do."""
        return 0.0 if self._due_s is None else self._due_s

    def restart(self) -> None:
        """What ran since the last cut is not to be measured: the next, in a while, begins a window."""
        self._is_open, self._due_s = False, None

    def has_read_past(self, cut: Cut) -> bool:
        """Whether the reads tell of all the time up to a cut that the device is past, or never will."""
        now_s = time.monotonic()
        if self._awaited is None or self._awaited[0] is not cut:
            self._awaited = cut, now_s
            self._note_lag(cut)
        if self.fault is not None or now_s - self._awaited[1] > _LONGEST_WAIT_S:
            return True
        intervals = self._sampler.intervals(self._index)
        return bool(intervals) and intervals[-1].end_s >= self._time_of(cut) + GPM_LAG_S / 2

    def measured(self, begin: Cut, end: Cut) -> Measured | None:
        """On another thread, when the device is past both cuts; None where too little was read in between."""
        for cut in (begin, end):
            self._note_lag(cut)
        begin_s, end_s = self._time_of(begin), self._time_of(end)
        active = [part for part in self._sampler.intervals(self._index) if part.hmma_active is not None]
        window = between(active, begin_s, end_s)
        if window is None or window.seconds < _ENOUGH * (end_s - begin_s):
            return None
        clock_hz = None
        if begin.stamp is not None and end.stamp is not None:
            clock_hz = mean_clock_hz(begin.stamp, end.stamp)
        clock_hz = clock_hz or counted_clock_hz(window, self._sm_count)
        if clock_hz is None:
            return Measured(window=window, clock_hz=window.sm_clock_hz, clock_source=DRIVER)
        return Measured(window=window, clock_hz=clock_hz, clock_source=CYCLE_COUNTERS)

    @property
    def fault(self) -> str | None:
        """Why the counters cannot be read just now."""
        health = self._sampler.health(self._index)
        return health.stopped or health.fault

    def close(self) -> None:
        """Stop reading, and let go of the driver."""
        self._sampler.stop()
        self._source.close()

    def _note_lag(self, cut: Cut) -> None:
        gpu_s = None if cut.stamp is None else cut.stamp.time_s()
        if gpu_s is not None:
            self._lags_s.append(gpu_s - cut.at_s)

    def _time_of(self, cut: Cut) -> float:
        """When the device got to a cut, by the host's monotonic clock."""
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
        notice(
            f"hybrid mode: executed FLOPs rest on the clock the driver reports, which is too high: {stamps}"
        )
    return HardwareWatch(
        source,
        index,
        stamps if isinstance(stamps, CycleStamps) else None,
        sm_count=torch.cuda.get_device_properties(device).multi_processor_count,
    )


def counters_of(device: torch.device) -> tuple[CounterSource, int] | str:
    """Where to read the activity counters of this device and its number there, or why they cannot be read."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they are read on NVIDIA GPUs, and this run is on {device.type}"
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
