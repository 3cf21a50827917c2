"""Step time without synchronising: marks on the device's own timeline, read when they have passed.

    log_step n-1 ──► step n: forward, backward, optimizer ──► log_step n
        mark ────────────── pause ⟨mark … mark⟩ ──────────────► mark

A step lasts from the mark before it to its own, less the pauses in between. On CUDA a mark is a timing event
without a wait: another thread reads its time later, once it has passed. Elsewhere work ends when its call
returns, and a mark is the host's clock.

Where the device waits for the host, an event on every step costs measurable time and adds nothing to the
host's clock. So while the device keeps up and both clocks agree on the length of steps, one mark in four
seconds has an event; those between are interpolated by the host's clock, scaled to the device's time between
the events:

    event ── · ── · ── · ── · ── event      while both differ by < 2 % over 32 steps, lag < a quarter step
    event ─ event ─ event ─ event ─ event   until that is known, and as soon as it is no longer true
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ...hardware.counters.cycle_stamps import CUDA_DRIVER
from ...torch_private import table
from ...torch_private.watching import current_stream_data

_CAPTURE_MODE_RELAXED = 2
_EVENT_EVERY_S = 4.0
"""Rows wait for the next event, and must be on disk ten seconds after their step."""
_STEPS_TO_AGREE = 32
_MAX_DIFFERENCE = 0.02
"""The largest mean difference between host and device in the length of a step."""
_LAG_IN_STEPS = 0.25
"""The largest lag of the device behind the host; beyond it times would go to the wrong steps."""
_LAG_CHANGE_IN_STEPS = 0.25
"""The largest change of the lag while not every step has an event."""
_EVENTS_AND_HOST_CLOCK = "CUDA events, the host's clock between them while both agree"
_MAX_EVENTS = 20_000
"""More than the number of pending steps, if marks are never read."""


class Mark:
    """A moment: its host time, and its device time once the event has passed."""

    __slots__ = ("device_s", "event", "host_s", "steps")

    def __init__(self, host_s: float, event: torch.cuda.Event | None, device_s: float | None = None) -> None:
        self.host_s, self.event, self.device_s = host_s, event, device_s
        self.steps: int | None = None
        """How many steps have ended by then, if one ends here; only on marks with an event."""


class HostClock:
    """Marks by the host's clock, for devices whose work is done when the call returns."""

    source = "host clock"
    due_s = 0.0

    def mark(self, now_s: float) -> Mark:
        """This moment; steps and other moments are the same here."""
        return Mark(now_s, None, now_s)

    moment = mark

    def on_other_thread(self) -> AbstractContextManager[bool]:
        """For a thread other than the training thread: whether it may create marks inside."""
        return contextlib.nullcontext(True)

    def skipped(self, steps: int) -> None:
        """This many steps ended without a mark."""

    def poll(self) -> None:
        """Nothing to do: every mark has passed."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has reached this mark."""
        return True


class CudaClock:
    """Marks on a CUDA device's timeline; events are reused, so their number stays small.

    `mark` is for the training thread, the rest for one other thread, which reads marks in their order.
    """

    source = "CUDA events"

    def __init__(self, device: torch.device, *, thins_out: bool = False) -> None:
        self._device, self._thins_out = device, thins_out
        self._free: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        self._stream_data: tuple[int, int, int] | None = None
        self._marked_s = self._every_s = 0.0
        self.due_s = 0.0
        """When a mark needs an event again; `mark` always gives it one."""
        self._steps = 0
        self._with_event: deque[Mark] = deque(maxlen=_MAX_EVENTS)
        self._next: Mark | None = None
        self._reached: deque[Mark] = deque(maxlen=_MAX_EVENTS)
        """Marks whose events have passed, from the last one before the next mark to be read."""
        self._differences: deque[float] = deque(maxlen=_STEPS_TO_AGREE)
        self._steps_s: deque[float] = deque(maxlen=_STEPS_TO_AGREE)
        self._step_s = self._behind_s = 0.0
        self._lag_s = math.inf
        """The smallest observed upper bound of the device's lag."""

    def mark(self, now_s: float) -> Mark:
        """The current position in the stream's queue, where a step ends."""
        self._steps += 1
        return self._marked(now_s, self._steps)

    def moment(self, now_s: float) -> Mark:
        """The current position in the stream's queue, where no step ends."""
        return self._marked(now_s, None)

    @contextlib.contextmanager
    def on_other_thread(self) -> Iterator[bool]:
        """For a thread other than the training thread: whether it may create marks inside.

        Its work is queued after the training's. A stream that is being captured is not touched.
        """
        if self._stream is None:
            yield False
            return
        with torch.cuda.stream(self._stream):
            yield not torch.cuda.is_current_stream_capturing()

    def skipped(self, steps: int) -> None:
        """This many steps ended without an event."""
        self._steps += steps

    def _marked(self, now_s: float, steps: int | None) -> Mark:
        self._marked_s, self.due_s = now_s, now_s + self._every_s
        mark = Mark(now_s, self._recorded())
        mark.steps = steps
        self._with_event.append(mark)
        return mark

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has reached this mark, and its time is known."""
        reached = self._reached
        if not reached or reached[-1].host_s < mark.host_s:
            self.poll()
            if not reached or reached[-1].host_s < mark.host_s:
                return False
        while len(reached) > 1 and reached[1].host_s <= mark.host_s:
            reached.popleft()
        if mark.device_s is None and reached[0].host_s <= mark.host_s:
            mark.device_s = _between(reached[0], reached[min(1, len(reached) - 1)], mark.host_s)
        return True

    def poll(self) -> None:
        """Read all events that have passed, which also measures the device's lag."""
        while self._reach_next():
            pass

    def _reach_next(self) -> bool:
        """Take the next event, if the device is past it."""
        if self._next is None:
            if not self._with_event:
                return False
            self._next = self._with_event.popleft()
        mark = self._next
        assert mark.event is not None
        if not mark.event.query():
            if _age_s(mark) > _LAG_IN_STEPS * self._step_s:
                self._mark_every_step()
            return False
        if not self._with_event and mark.steps is not None:
            # The newest event: the device lags by less than its age. Marks between steps do not count, since
            # the program may have synchronised there.
            self._lag_s = min(self._lag_s, _age_s(mark))
        last = self._reached[-1] if self._reached else None
        if last is None:
            mark.device_s = 0.0
        else:
            assert last.event is not None
            assert last.device_s is not None
            seconds = float(last.event.elapsed_time(mark.event)) / 1e3
            mark.device_s = last.device_s + seconds
            if self._thins_out and last.steps is not None and mark.steps is not None:
                self._compare(mark.host_s - last.host_s, seconds, mark.steps - last.steps)
            self._free.append(last.event)
            last.event = None
        self._reached.append(mark)
        self._next = None
        return True

    def _compare(self, host_s: float, device_s: float, steps: int) -> None:
        """Decide by the host's and the device's time between two events whether each step needs one."""
        if device_s <= 0 or not steps:
            return
        self._steps_s.append(device_s / steps)
        self._step_s = statistics.median(self._steps_s)
        if self._every_s:
            self._behind_s += device_s - host_s
            if abs(self._behind_s) > _LAG_CHANGE_IN_STEPS * self._step_s:
                self._mark_every_step()
            return
        self._differences.append(abs(device_s - host_s) / device_s)
        agree = (
            len(self._differences) == _STEPS_TO_AGREE
            and sum(self._differences) < _MAX_DIFFERENCE * _STEPS_TO_AGREE
        )
        if agree and self._lag_s < _LAG_IN_STEPS * self._step_s:
            self._every_s, self._behind_s = _EVENT_EVERY_S, 0.0
            self.due_s = self._marked_s + self._every_s
            self.source = _EVENTS_AND_HOST_CLOCK

    def _mark_every_step(self) -> None:
        self._every_s, self.due_s = 0.0, self._marked_s
        self._differences.clear()
        self._lag_s = math.inf

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        last = self._stream_data
        if current_stream_data is None:
            table.miss(table.CURRENT_STREAM)
            self._stream = torch.cuda.current_stream(self._device)
        elif self._stream is None or last is None or current_stream_data(last[1]) != last:
            # Creating a stream object each time would cost more than the mark.
            self._stream = torch.cuda.current_stream(self._device)
            self._stream_data = current_stream_data(self._stream.device_index)
        event.record(self._stream)
        return event


def _age_s(mark: Mark) -> float:
    return time.perf_counter() - mark.host_s


def _between(begin: Mark, end: Mark, host_s: float) -> float:
    """The device time of a host time between two marks with known times, interpolated."""
    assert begin.device_s is not None
    assert end.device_s is not None
    if end.host_s == begin.host_s:
        return end.device_s
    share = (host_s - begin.host_s) / (end.host_s - begin.host_s)
    return begin.device_s + share * (end.device_s - begin.device_s)


def allow_queries_during_capture() -> None:
    """Let this thread query events while another captures a CUDA graph.

    By default a capture fails when any thread of the process queries an event.
    """
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL(CUDA_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def clock_for(device: torch.device, *, thins_out: bool = False) -> HostClock | CudaClock:
    """The clock of this device; `thins_out`: not every step needs an event."""
    return CudaClock(device, thins_out=thins_out) if device.type == "cuda" else HostClock()


class Pause(NamedTuple):
    """A time that is excluded from a step."""

    begin: Mark
    end: Mark
    kind: str | None
    """What ran in it, a key of `PAUSES`; None for a count of the monitor, which is reported elsewhere."""
    kept_s: float = 0.0
    """Seconds in it that belong to the step: waits for its data."""


class Span(NamedTuple):
    """The marks of one step: `begin` is None for a first step whose beginning was not seen."""

    begin: Mark | None
    end: Mark
    pauses: Sequence[Pause]


class StepClock:
    """Marks where steps begin, pause and end; lives on the training thread."""

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self.clock = clock
        self._begin: Mark | None = None
        self._pauses: Sequence[Pause] = ()
        self.unmarked_s: float | None = None
        """The end of the oldest step without a later event; None if every step has one."""

    def begin(self) -> None:
        """The first forward pass starts: the first step begins here, later ones where the last one ended."""
        if self._begin is None:
            self._begin = self.moment()

    def moment(self) -> Mark:
        """A mark with an event now: earlier marks get their times once the device has reached it."""
        self.unmarked_s = None
        return self.clock.moment(time.perf_counter())

    def pause(self, begin: Mark, kind: str | None) -> None:
        """Exclude the time from `begin` until now from the step."""
        self._pauses = (*self._pauses, Pause(begin, self.moment(), kind))

    def pause_since_last_step(self, kind: str, kept_s: float) -> None:
        """Exclude the time since the last step or pause ended, except for `kept_s`."""
        begin = self._pauses[-1].end if self._pauses else self._begin
        if begin is not None:
            self._pauses = (*self._pauses, Pause(begin, self.moment(), kind, kept_s))

    def left_out_since_last_step(self) -> dict[str, float]:
        """Seconds excluded from the step that has begun, by the host's clock."""
        return _by_kind((pause, pause.end.host_s - pause.begin.host_s) for pause in self._pauses)

    def end(self, now_s: float, *, exact: bool = True) -> Span:
        """A step ends here, and the next one begins; if not `exact`, its mark may have no event."""
        begin, clock = self._begin, self.clock
        if exact or now_s >= clock.due_s:
            end = self._begin = clock.mark(now_s)
            self.unmarked_s = None
        else:
            clock.skipped(1)
            self.unmarked_s = self.unmarked_s or now_s
            end = self._begin = Mark(now_s, None)
        pauses, self._pauses = self._pauses, ()
        return Span(begin, end, pauses)


def duration_s(span: Span) -> float | None:
    """How long a step took, once its end has passed; None if its beginning was not seen or not read."""
    if span.begin is None:
        return None
    seconds = seconds_between(span.begin, span.end)
    for pause in span.pauses:
        paused_s = paused_seconds(pause)
        seconds = None if seconds is None or paused_s is None else seconds - paused_s
    return seconds


def paused_seconds(pause: Pause) -> float | None:
    """How long a pause was, once its end has passed; None if that is unknown."""
    seconds = seconds_between(pause.begin, pause.end)
    return None if seconds is None else max(0.0, seconds - pause.kept_s)


def left_out_s(span: Span) -> dict[str, float]:
    """Seconds excluded from a step by what ran in them; counts are not included."""
    return _by_kind((pause, paused_seconds(pause)) for pause in span.pauses)


def _by_kind(pauses: Iterable[tuple[Pause, float | None]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pause, seconds in pauses:
        if pause.kind is not None and seconds is not None:
            found[pause.kind] = found.get(pause.kind, 0.0) + seconds
    return found


def seconds_between(begin: Mark, end: Mark) -> float | None:
    """Device seconds from one mark to another; None if a mark's time is unknown."""
    return None if begin.device_s is None or end.device_s is None else end.device_s - begin.device_s
