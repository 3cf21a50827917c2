"""A rank's own GPU as its driver counts it: clock, activity, throttle reasons, by a read every two seconds.

The driver is opened and read on a thread of its own and never by CUDA: a driver that hangs delays nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from ...hardware.counters.executed import counted_clock_hz
from ...hardware.counters.sampler import Sampler
from ...hardware.counters.samples import CounterSource, CounterWindow, find_gpu
from ...hardware.counters.windows import combine

_PERIOD_S = 2.0
_KEPT = 32
_NO_LIMIT = frozenset({"gpu_idle", "application_clocks", "display_clocks"})
_LEAST_SHARE = 0.1
"""Of a window's time: a reason that was active for less did not limit it."""


class RankGpu:
    """Reads one GPU until `close`. `source` replaces the driver in a test."""

    def __init__(self, uuid: str, sm_count: int, *, source: CounterSource | None = None) -> None:
        self._uuid, self._sm_count, self._source = uuid, sm_count, source
        self._sampler: Sampler | None = None
        self._index = 0
        self._until_s = 0.0
        self._is_closed = False
        self._opening = threading.Thread(target=self._open, name="truemfu-rank-gpu", daemon=True)
        self._opening.start()

    def window(self) -> dict[str, Any]:
        """What the driver has counted since the last call, as fields of a `RankRow`."""
        if self._sampler is None:
            return {}
        parts = [part for part in self._sampler.intervals(self._index) if part.end_s > self._until_s]
        window = combine(parts)
        if window is None:
            return {}
        self._until_s = window.end_s
        return figures_of(window, self._sm_count)

    def close(self) -> None:
        """Stop reading; does not wait."""
        self._is_closed = True
        sampler, source = self._sampler, self._source
        if sampler is not None and source is not None:
            threading.Thread(target=_closed, args=(sampler, source), daemon=True).start()

    def _open(self) -> None:
        with contextlib.suppress(Exception):  # no driver, no permission: the figures stay unknown
            if self._source is None:
                from ...hardware.counters.nvml import NvmlSource

                self._source = NvmlSource(energy=False)
            gpu = find_gpu(self._source.gpus(), self._uuid)
            if gpu is None or self._is_closed:
                self._source.close()
                return
            self._index = gpu.index
            sampler = Sampler(self._source, indices=[gpu.index], period_s=_PERIOD_S, keep=_KEPT)
            sampler.start()
            self._sampler = sampler


def figures_of(window: CounterWindow, sm_count: int) -> dict[str, Any]:
    """The figures of a window of counters; None where unknown."""
    clock_hz = counted_clock_hz(window, sm_count)
    reasons = {
        name: share
        for name, share in (window.throttle or {}).items()
        if share >= _LEAST_SHARE and name not in _NO_LIMIT
    }
    busy = window.graphics_active
    return {
        "busy_share": window.gpu_utilisation if busy is None else busy,
        "clock_mhz": None if clock_hz is None else clock_hz / 1e6,
        "tensor_activity": window.tensor_active,
        "throttle": max(reasons, key=lambda name: reasons[name], default=None),
    }


def _closed(sampler: Sampler, source: CounterSource) -> None:
    sampler.stop()
    source.close()
