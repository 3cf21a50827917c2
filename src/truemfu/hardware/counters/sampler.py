"""Reads the counters of some GPUs periodically, and stores the last intervals of each.

    source ─► poll ─► intervals of each GPU, the last `keep` of them ─► latest, intervals

`poll` reads every GPU once. A thread calls it every `period_s` between `start` and `stop`, and once more
after `read_soon`; a caller with its own loop (`truemfu top`) calls it directly. The thread is a daemon, so it
ends with the process; it never uses CUDA, and the driver's calls release the GIL.

An error only loses its own interval: a read that fails or returns invalid values is counted, and the next two
good reads form an interval again. A stale read is not an error: the interval continues to the next read. A
read that hangs in the driver is a fault as long as it lasts. Memory does not grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ...errors import CounterError, ReplayEnded, UsageError, one_line
from .samples import CounterSample, CounterSource, CounterWindow, GpuInfo
from .windows import interval_of, with_energy

_JOIN_S = 2.0
# A read takes milliseconds; after this long it is reported as hanging.
_HANG_TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """The state of reading one GPU: completed and dropped intervals, and the current fault.

    `fault` is None again after the next interval. `stopped` is the reason why nothing is read any more.
    """

    intervals: int = 0
    dropped: int = 0
    fault: str | None = None
    stopped: str | None = None


class Sampler:
    """The recent intervals of some GPUs of a source (None: all of them)."""

    def __init__(
        self,
        source: CounterSource,
        *,
        indices: Sequence[int] | None = None,
        period_s: float = 1.0,
        keep: int = 600,
    ) -> None:
        known = {gpu.index for gpu in source.gpus()}
        wanted = sorted(known) if indices is None else list(dict.fromkeys(indices))
        if not set(wanted) <= known:
            missing = sorted(set(wanted) - known)
            raise UsageError(f"no GPU {missing[0]}: this machine has {sorted(known)}")
        self._source = source
        self._period_s = period_s
        self._tracks = {index: _Track(keep) for index in wanted}
        self._lock = threading.Lock()
        self._is_stopped = False
        self._extra_s: float | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked_at_s: float | None = None

    def start(self) -> None:
        """Start reading in a separate thread."""
        assert self._thread is None, "the sampler is running already"
        self._thread = threading.Thread(target=self._run, name="truemfu-counters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. One that hangs in the driver is abandoned: it only reads."""
        self._is_stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def read_soon(self, delay_s: float) -> None:
        """Make the thread read once more after this long, besides its usual reads; the last call counts."""
        self._extra_s = time.monotonic() + delay_s
        self._wake.set()

    def poll(self) -> bool:
        """Read every GPU once; False if none can be read any more."""
        gpus = {gpu.index: gpu for gpu in self._source.gpus()}
        for index, track in self._tracks.items():
            if track.health.stopped is None:
                self._read(track, gpus[index])
        return any(track.health.stopped is None for track in self._tracks.values())

    def gpus(self) -> list[GpuInfo]:
        """The GPUs that are read."""
        return [gpu for gpu in self._source.gpus() if gpu.index in self._tracks]

    def latest(self, index: int) -> CounterWindow | None:
        """The last interval; None before there is one, and while the GPU cannot be read."""
        with self._lock:
            track = self._tracks[index]
            fault = self.hanging() or track.health.fault
            return track.intervals[-1] if track.intervals and fault is None else None

    def intervals(self, index: int) -> list[CounterWindow]:
        """The stored intervals, oldest first."""
        with self._lock:
            return list(self._tracks[index].intervals)

    def health(self, index: int) -> Health:
        with self._lock:
            health = self._tracks[index].health
        return replace(health, fault=self.hanging() or health.fault)

    def hanging(self) -> str | None:
        """A message about a read that hangs in the driver; it blocks the reads of all GPUs."""
        asked_at_s = self._asked_at_s
        waited_s = 0.0 if asked_at_s is None else time.monotonic() - asked_at_s
        return None if waited_s < _HANG_TIMEOUT_S else f"the driver has not answered for {waited_s:.0f} s"

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._is_stopped and self.poll():
            now_s = time.monotonic()
            if due_s <= now_s:
                due_s += self._period_s
                if due_s <= now_s:
                    # A slow read is followed by a normal pause, not by a burst to catch up.
                    due_s = now_s + self._period_s
            self._wait_until(due_s)

    def _wait_until(self, due_s: float) -> None:
        """Wait for the next usual read, or for one requested earlier."""
        while not self._is_stopped:
            extra_s, now_s = self._extra_s, time.monotonic()
            if extra_s is not None and extra_s <= now_s:
                self._extra_s = None
                return
            if due_s <= now_s:
                return
            self._wake.wait(min(due_s, due_s if extra_s is None else extra_s) - now_s)
            self._wake.clear()

    def _read(self, track: _Track, gpu: GpuInfo) -> None:
        before, after = track.last, None
        new: list[CounterWindow] = []
        fault = stopped = None
        try:
            self._asked_at_s = time.monotonic()
            after = self._source.read(gpu.index)
            if not after.fresh:
                return
            if before is not None:
                new = track.with_energy_of(after, interval_of(before, after, gpu))
        except ReplayEnded as end:
            stopped, after = str(end), before
        except CounterError as problem:
            fault = str(problem)
        except Exception as problem:
            # No exception of the driver's library may end the thread: the run continues.
            fault = f"unexpected {one_line(problem)}"
        finally:
            self._asked_at_s = None
        with self._lock:
            track.take(after, new, fault, stopped)


class _Track:
    """One GPU: its last sample, the last one with an energy reading, its intervals and health."""

    def __init__(self, keep: int) -> None:
        self.last: CounterSample | None = None
        self.intervals: deque[CounterWindow] = deque(maxlen=keep)
        self.health = Health()
        self._metered: CounterSample | None = None
        self._waiting = 0

    def with_energy_of(self, sample: CounterSample, interval: CounterWindow) -> list[CounterWindow]:
        """The new interval; if the sample has an energy reading, after all intervals since the last one."""
        if self._metered is None or sample.energy_j is None:
            return [interval]
        waiting = list(islice(reversed(self.intervals), self._waiting))[::-1]
        return with_energy([*waiting, interval], self._metered, sample)

    def take(
        self,
        sample: CounterSample | None,
        new: list[CounterWindow],
        fault: str | None,
        stopped: str | None,
    ) -> None:
        """`new` is empty, or replaces the last intervals and adds one.

        A fault lasts until the next interval: a first good read alone gives none.
        """
        was = self.health
        self.last = sample
        for _ in new[1:]:
            self.intervals.pop()
        self.intervals.extend(new)
        self._waiting += bool(new)
        if fault is not None or (sample is not None and sample.energy_j is not None):
            self._metered = None if sample is None or sample.energy_j is None else sample
            self._waiting = 0
        self.health = Health(
            intervals=was.intervals + bool(new),
            dropped=was.dropped + (fault is not None),
            fault=fault or (None if new else was.fault),
            stopped=stopped,
        )
