"""What a rank's row has besides its steps: how the training thread, the GPU and collectives spend their time.

HostTime, OutsideTime    of the training thread, on a CPU
RankGpu, CollectiveTimes on a GPU
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .collective_times import CollectiveTimes
from .outside_time import OutsideTime
from .rank_gpu import RankGpu


class RowSources:
    """Read once for each row with a timed step; None: this rank has no such source."""

    def __init__(
        self,
        *,
        gpu: RankGpu | None = None,
        clock_hz: Callable[[], float | None] = lambda: None,
        collectives: CollectiveTimes | None = None,
        host_time: HostTime | None = None,
        outside: OutsideTime | None = None,
    ) -> None:
        self._gpu, self._clock_hz, self._collectives = gpu, clock_hz, collectives
        self._host_time, self._outside = host_time, outside
        self.collective_share: float | None = None
        """When it was last read: the share of time in the collectives of the busiest group."""

    def read(self, step_time_s: float, *, is_paused: bool) -> dict[str, Any]:
        """Fields of a `RankRow` over the time since the last call.

        With much time in pauses, `is_paused`, shares of the time say nothing about steps.
        """
        busy = None if self._host_time is None else self._host_time.share()
        outside = None if self._outside is None else self._outside.share()
        found: dict[str, Any] = {} if self._gpu is None else self._gpu.window()
        if found.get("clock_mhz") is None and (clock_hz := self._clock_hz()) is not None:
            found["clock_mhz"] = (
                clock_hz / 1e6
            )  # as `hybrid` measures it; else as the driver counts its cycles
        collectives = self._shares_of_collectives()
        self.collective_share = None if collectives is None else max(collectives.values())
        if collectives is not None:
            found["collective_s"] = {group: share * step_time_s for group, share in collectives.items()}
        if is_paused:
            return found | {"busy_share": None, "tensor_activity": None}
        if busy is not None:
            found["host_s"] = busy * step_time_s
        if outside is not None:
            found["outside_s"] = max(outside, busy or 0.0) * step_time_s
        return found

    def close(self) -> None:
        """Stop reading; does not wait."""
        if self._gpu is not None:
            self._gpu.close()
        if self._outside is not None:
            self._outside.close()

    def _shares_of_collectives(self) -> dict[str, float] | None:
        if self._collectives is not None:
            with contextlib.suppress(Exception):  # another format of records: the time stays unknown
                return self._collectives.shares()
        return None


class HostTime:
    """How much of its time a thread has been on a processor or waiting for one, by Linux's account."""

    def __init__(self, thread: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`thread` is its native id."""
        self._path = Path(f"/proc/self/task/{thread}/schedstat")
        self._clock = clock
        self._last = self._read()

    def share(self) -> float | None:
        """Since the last call; None where the kernel does not say."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[0] <= before[0]:
            return None
        return (self._last[1] - before[1]) / (self._last[0] - before[0])

    def _read(self) -> tuple[float, float] | None:
        try:
            on_processor_ns, waiting_ns = self._path.read_bytes().split()[:2]
        except (OSError, ValueError):
            return None
        return self._clock(), 1e-9 * (int(on_processor_ns) + int(waiting_ns))
