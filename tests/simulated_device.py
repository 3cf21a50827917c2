"""A GPU and the host that drives it, on one simulated time line: nothing sleeps, and every time is exact.

    host    ──launch─launch──── blocked: the queue is full ───launch──── item() waits ────►
    stream  ────────█████████████████████████████████████████████████████ idle ───────────►

The host works in parts (a step, a gap, a pause, a wait for data), which the driver of a program names. What
the device does with its time is logged without any event: a stretch in which it worked belongs to the part
that launched the work, a stretch in which it was idle to the part the host was in at that time. `spent` adds
these up, independently of every mark.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence

Part = Hashable
LAUNCH_S = 2e-6
"""What a launch takes the host at least."""


class SimulatedDevice:
    """Streams of kernels; a launch blocks the host while `depth` launches are unfinished."""

    def __init__(self, *, depth: int = 1000, is_synchronous: bool = False) -> None:
        self.now_s = 0.0
        """The host's clock."""
        self.stream = "main"
        """The current stream."""
        self.is_capturing = False
        self._depth, self._is_synchronous = depth, is_synchronous
        self._done_s: dict[str, float] = defaultdict(float)
        self._unfinished: deque[float] = deque()
        self._busy: list[tuple[float, float, Part]] = []
        self._parts: list[tuple[float, Part]] = []

    def part(self, part: Part) -> None:
        """The host begins this part of the program."""
        self._parts.append((self.now_s, part))

    def host(self, seconds: float) -> None:
        """The host works or waits for something other than the device."""
        self.now_s += seconds

    def launch(self, *kernels_s: float, stream: str | None = None) -> None:
        """Queue kernels, as one launch: several are the replay of a graph."""
        self.now_s += LAUNCH_S
        if self.is_capturing:
            return
        if self._is_synchronous:
            self.now_s += sum(kernels_s)
            return
        while self._unfinished and self._unfinished[0] <= self.now_s:
            self._unfinished.popleft()
        if len(self._unfinished) >= self._depth:
            self.now_s = max(self.now_s, self._unfinished.popleft())
        name = self.stream if stream is None else stream
        begin_s = max(self.now_s, self._done_s[name])
        self._done(name, begin_s, begin_s + sum(kernels_s))
        self._unfinished.append(self._done_s[name])

    def join(self, waiting: str, other: str) -> None:
        """What is queued on one stream from now on waits for what is queued on another."""
        begin_s = max(self.now_s, self._done_s[waiting])
        self._done(waiting, begin_s, max(begin_s, self._done_s[other]))

    def switch(self, stream: str) -> None:
        """Make another stream the current one, which waits for the one before."""
        begin_s, self.stream = self.front_s(), stream
        if not self._is_synchronous:
            self._done(stream, begin_s, max(begin_s, self._done_s[stream]))

    def item(self) -> None:
        """The host waits for the current stream."""
        self.now_s = max(self.now_s, self._done_s[self.stream])

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.now_s = max([self.now_s, *self._done_s.values()])

    def front_s(self) -> float:
        """When the device gets to what is queued next on the current stream."""
        return max(self.now_s, self._done_s[self.stream])

    def spent(self, begin_s: float, end_s: float) -> dict[Part, float]:
        """What the current streams spent on each part, between two moments of the device."""
        found: dict[Part, float] = defaultdict(float)
        at_s, starts = begin_s, [start_s for start_s, _ in self._parts]
        for busy_begin_s, busy_end_s, part in sorted(self._busy, key=lambda busy: busy[:2]):
            first_s, last_s = max(busy_begin_s, at_s), min(busy_end_s, end_s)
            if last_s > first_s:
                self._add_idle(found, starts, at_s, first_s)
                found[part] += last_s - first_s
                at_s = last_s
        self._add_idle(found, starts, at_s, end_s)
        return found

    def _done(self, stream: str, begin_s: float, end_s: float) -> None:
        self._done_s[stream] = end_s
        if stream == self.stream:
            self._busy.append((begin_s, end_s, self._parts[-1][1]))

    def _add_idle(
        self, found: dict[Part, float], starts: Sequence[float], begin_s: float, end_s: float
    ) -> None:
        number = bisect_right(starts, begin_s) - 1
        while begin_s < end_s:
            until_s = min(end_s, starts[number + 1]) if number + 1 < len(starts) else end_s
            found[self._parts[number][1]] += until_s - begin_s
            begin_s, number = until_s, number + 1


class SimulatedEvent:
    """A CUDA event: queued, passed when the device gets there."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._at_s = device, float("inf")

    def record(self) -> None:
        self._at_s = self._device.front_s()

    def query(self) -> bool:
        return self._device.now_s >= self._at_s

    def elapsed_time(self, later: SimulatedEvent) -> float:
        if not (self.query() and later.query()):
            raise RuntimeError("an event has not passed: reading its time would wait")
        return 1e3 * (later._at_s - self._at_s)


class SimulatedQueue:
    """Where a CudaClock places its events."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.events: list[SimulatedEvent] = []

    def record(self, event: SimulatedEvent | None) -> SimulatedEvent | None:
        if self._device.is_capturing:
            return None
        if event is None:
            event = SimulatedEvent(self._device)
            self.events.append(event)
        event.record()
        return event

    @contextlib.contextmanager
    def on_other_thread(self) -> Iterator[bool]:
        yield not self._device.is_capturing
