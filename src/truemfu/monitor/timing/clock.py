"""Step time without synchronising: marks on the device's own time line, read when they have passed.

    log_step n-1 ──► step n: forward, backward, optimizer ──► log_step n
        mark ────────────── pause ⟨mark … mark⟩ ──────────────► mark

A step lasts from the mark before it to its own, less the pauses in between. On CUDA every mark is a timing
event in the queue of the current stream, without a wait: another thread reads its time once the device has
passed it. So time between two marks is what the device spent there, working or idle; how long the host
waited meanwhile does not matter. Elsewhere work ends when its call returns, and a mark is the host's clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from ...hardware.counters.cycle_stamps import CUDA_DRIVER
from ...torch_private import table
from ...torch_private.watching import current_stream_data

_CAPTURE_MODE_RELAXED = 2
_MAX_EVENTS = 40_000
"""The most events that have not been read: more than the number of pending steps. Changes of phase get one
only while half of them are free, so that they take none from the ends of steps."""
MOST_CHANGES = 2000
"""Changes of phase that are noted in one step."""
_MOST_NAMED = MOST_CHANGES // 4
"""After so many, which model runs is not noted: no step loses its phases by that."""


class Event(Protocol):
    """What is used of a CUDA event."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another; both have passed."""


class TimeMark(msgspec.Struct, eq=False, gc=False):
    """A moment: its host time, and its device time once that was read."""

    host_s: float
    event: Event | None
    """None once it was read, and for a mark that could not be placed: its device time stays unknown."""
    device_s: float | None = None


class HostClock:
    """Marks by the host's clock, for devices whose work is done when the call returns."""

    source = "host clock"

    def mark(self, now_s: float, *, is_change: bool = False) -> TimeMark:
        """This moment."""
        return TimeMark(now_s, None, now_s)

    def on_other_thread(self) -> AbstractContextManager[bool]:
        """For a thread other than the training thread: whether it may queue work inside."""
        return contextlib.nullcontext(True)

    def poll(self) -> None:
        """Nothing to do: every mark has passed."""

    def has_passed(self, mark: TimeMark) -> bool:
        """Whether the device has reached this mark."""
        return True


class Queue(Protocol):
    """Where a clock places its events."""

    def record(self, event: Event | None) -> Event | None:
        """Place this event, or a new one, at the end of the queue; None if that is not possible now."""

    def on_other_thread(self) -> AbstractContextManager[bool]:
        """For a thread other than the training thread: whether it may queue work inside."""


class CudaQueue:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._stream_data: tuple[int, int, int] | None = None

    def record(self, event: Event | None) -> Event | None:
        """As in `Queue`; a stream that is being captured gets none, since it could never be read."""
        if torch.cuda.is_current_stream_capturing():
            return None
        recorded: Any = torch.cuda.Event(enable_timing=True) if event is None else event
        last = self._stream_data
        if current_stream_data is None:
            table.miss(table.CURRENT_STREAM)
            self._stream = torch.cuda.current_stream(self._device)
        elif self._stream is None or last is None or current_stream_data(last[1]) != last:
            # Creating a stream object each time would cost more than the mark.
            self._stream = torch.cuda.current_stream(self._device)
            self._stream_data = current_stream_data(self._stream.device_index)
        recorded.record(self._stream)
        return recorded  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def on_other_thread(self) -> Iterator[bool]:
        """As in `Queue`: such work comes after the training's; a stream that is being captured gets none."""
        if self._stream is None:
            yield False
            return
        with torch.cuda.stream(self._stream):
            yield not torch.cuda.is_current_stream_capturing()


class CudaClock:
    """Marks on a CUDA device's time line; events are reused, so their number stays small.

    `mark` is for the training thread, `poll` and `has_passed` for one other thread. If the current stream
    changes to one that is less far, its marks have the time of the last mark: time never runs backwards.
    """

    source = "CUDA events"

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._free: list[Event] = []
        self._unread: deque[TimeMark] = deque()
        self._last: Event | None = None
        self._last_s = self._latest_s = 0.0
        """The time of the last event that was read, and the latest time so far."""

    def mark(self, now_s: float, *, is_change: bool = False) -> TimeMark:
        """The current position in the queue; its time is unknown if no event could be placed."""
        if len(self._unread) >= (_MAX_EVENTS // 2 if is_change else _MAX_EVENTS):
            return TimeMark(now_s, None)
        spare = self._free.pop() if self._free else None
        event = self._queue.record(spare)
        mark = TimeMark(now_s, event)
        if event is not None:
            self._unread.append(mark)
        elif spare is not None:
            self._free.append(spare)
        return mark

    def on_other_thread(self) -> AbstractContextManager[bool]:
        """For a thread other than the training thread: whether it may queue work inside."""
        return self._queue.on_other_thread()

    def has_passed(self, mark: TimeMark) -> bool:
        """Whether nothing more will be known of this mark: it was read, or has no event."""
        if mark.event is not None:
            self.poll()
        return mark.event is None

    def poll(self) -> None:
        """Read all events that have passed, in their order."""
        unread = self._unread
        while unread and (event := unread[0].event) is not None and event.query():
            last, mark = self._last, unread[0]
            if last is not None:
                self._last_s += float(last.elapsed_time(event)) / 1e3
                self._free.append(last)
            self._latest_s = max(self._latest_s, self._last_s)
            mark.device_s, mark.event, self._last = self._latest_s, None, event
            unread.popleft()


def allow_queries_during_capture() -> None:
    """Let this thread query events while another captures a CUDA graph.

    By default a capture fails when any thread of the process queries an event.
    """
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL(CUDA_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def clock_for(device: torch.device) -> HostClock | CudaClock:
    """The clock of this device."""
    return CudaClock(CudaQueue(device)) if device.type == "cuda" else HostClock()


class Pause(NamedTuple):
    """A time that is excluded from a step."""

    begin: TimeMark
    end: TimeMark
    kind: str | None
    """What ran in it, a key of `PAUSES`; None for what is reported elsewhere."""


class Span(NamedTuple):
    """The marks of one step: `begin` is None for a first step whose beginning was not seen.

    `changes` has the phase that begins at each mark; every step begins in the phase "other". `models` names
    the models that begin to run without gradients at some of them, by their place.
    """

    begin: TimeMark | None
    end: TimeMark
    pauses: Sequence[Pause]
    changes: Sequence[tuple[TimeMark, str]] = ()
    models: Mapping[int, str] = {}


class StepClock:
    """Marks where steps begin, pause and end; lives on the training thread."""

    def __init__(
        self, clock: HostClock | CudaClock, *, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        self._now_s = now_s
        self.begun: TimeMark | None = None
        """Where the step that goes on began; None before the first one."""
        self._pauses: Sequence[Pause] = ()
        self._changes: list[tuple[TimeMark, str]] = []
        self.last: TimeMark | None = None
        """The last mark that was placed at an end of a step, a gap or a pause."""
        self.phase = "other"
        """The phase of the step that goes on."""
        self.model: str | None = None
        """The model that runs in it without gradients, if it has a name."""
        self._models: dict[int, str] = {}

    def begin(self) -> None:
        """The first forward pass starts: the first step begins here, later ones where the last one ended."""
        if self.begun is None:
            self.begun = self.moment()

    def moment(self) -> TimeMark:
        """A mark now."""
        self.last = self.clock.mark(self._now_s())
        return self.last

    def enter(self, phase: str, model: str | None = None) -> None:
        """The step that has begun enters another phase; a device that fails does so elsewhere, not here.

        In a phase without gradients `model` is the one that begins to run, None after it has returned.
        """
        most = MOST_CHANGES if model is None else _MOST_NAMED
        is_same = phase == self.phase and model == self.model
        if is_same or self.begun is None or len(self._changes) >= most:
            return
        now_s = self._now_s()
        try:
            mark = self.clock.mark(now_s, is_change=True)
        except Exception:
            mark = TimeMark(now_s, None)
        if model is not None:
            self._models[len(self._changes)] = model
        self._changes.append((mark, phase))
        self.phase, self.model = phase, model

    def pause(self, begin: TimeMark, kind: str | None) -> None:
        """Exclude the time from `begin` until now from the step."""
        self._pauses = (*self._pauses, Pause(begin, self.moment(), kind))

    def left_out_since_last_step(self) -> dict[str, float]:
        """Seconds excluded from the step that has begun, as far as they are known."""
        return left_out_s(self._pauses)

    def end(self, now_s: float) -> Span:
        """A step ends here, and the next one begins."""
        begin, end = self.begun, self.clock.mark(now_s)
        pauses, self._pauses = self._pauses, ()
        changes, self._changes = self._changes or (), []
        models, self._models = self._models, {}
        self.begun, self.last, self.phase, self.model = end, end, "other", None
        return Span(begin, end, pauses, changes, models)


def duration_s(span: Span) -> float | None:
    """How long a step took, once its end has passed; None if one of its marks is missing or unknown."""
    if span.begin is None:
        return None
    seconds = seconds_between(span.begin, span.end)
    for pause in span.pauses:
        paused_s = seconds_between(pause.begin, pause.end)
        seconds = None if seconds is None or paused_s is None else seconds - paused_s
    return seconds


def left_out_s(pauses: Sequence[Pause]) -> dict[str, float]:
    """Seconds excluded from a step by what ran in them; counts and unknown times are not included."""
    found: dict[str, float] = {}
    for pause in pauses:
        seconds = seconds_between(pause.begin, pause.end)
        if pause.kind is not None and seconds is not None:
            found[pause.kind] = found.get(pause.kind, 0.0) + seconds
    return found


def seconds_between(begin: TimeMark, end: TimeMark) -> float | None:
    """Device seconds from one mark to another; None if a mark's time is unknown."""
    return None if begin.device_s is None or end.device_s is None else end.device_s - begin.device_s
