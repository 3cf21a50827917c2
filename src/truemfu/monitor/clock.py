"""Step time without synchronising: marks on the device's own timeline, read when they have passed.

    log_step n-1 ──► step n: forward, backward, optimizer ──► log_step n
        mark ────────────── pause ⟨mark … mark⟩ ──────────────► mark

On CUDA a mark is a timing event: recording one costs a few microseconds, and nobody waits for it. Its time is
asked for later, by another thread, once it has passed. Elsewhere work ends when its call returns, and a mark
is the host's clock. A step lasts from the mark before it to its own, less the pauses in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any, NamedTuple

import torch

from ..hardware.cycle_stamps import CUDA_DRIVER

_CAPTURE_MODE_RELAXED = 2

Mark = Any
"""A moment: a CUDA event, or seconds of `time.perf_counter`."""


class HostClock:
    """Marks of the host's clock, for devices whose work is done when the call returns."""

    source = "host clock"

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        """Whether the device has got as far as this mark."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """The time between two marks that have passed."""
        return end - begin

    def recycle(self, mark: float) -> None:
        """Nobody will ask for this mark again."""


class CudaClock:
    """Marks on a CUDA device's timeline; events are used again, so their number stays small."""

    source = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        self._stream_data: tuple[int, int, int] | None = None

    def mark(self) -> torch.cuda.Event:
        """A moment in the work that is queued on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        last = self._stream_data
        if self._stream is None or last is None or torch._C._cuda_getCurrentStream(last[1]) != last:
            # Making an object for the stream each time would cost more than the mark.
            self._stream = torch.cuda.current_stream(self._device)
            self._stream_data = torch._C._cuda_getCurrentStream(self._stream.device_index)
        event.record(self._stream)
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has got as far as this mark."""
        return bool(mark.query())

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two marks that have passed."""
        return float(begin.elapsed_time(end)) / 1e3

    def recycle(self, mark: torch.cuda.Event) -> None:
        """Nobody will ask for this mark again."""
        self._free.append(mark)


def leave_captures_alone() -> None:
    """Let this thread ask for marks while another captures a CUDA graph.

    By default a capture fails when any thread of the process asks whether an event has passed.
    """
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver: nothing to tell it
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL(CUDA_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def clock_for(device: torch.device) -> HostClock | CudaClock:
    """The clock that tells when this device has done its work."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Span(NamedTuple):
    """The marks of one step: `begin` is None for a first step whose beginning nobody saw."""

    begin: Mark | None
    end: Mark
    pauses: list[tuple[Mark, Mark]]


class StepClock:
    """Marks where steps begin, pause and end; lives on the training thread."""

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self.clock = clock
        self._begin: Mark | None = None
        self._pauses: list[tuple[Mark, Mark]] = []

    def begin(self) -> None:
        """A first forward pass starts: the first step begins here, later ones where the last one ended."""
        if self._begin is None:
            self._begin = self.clock.mark()

    def pause(self, begin: Mark) -> None:
        """What ran from `begin` until now is no part of a step."""
        self._pauses.append((begin, self.clock.mark()))

    def end(self) -> Span:
        """A step ends here, and the next one begins."""
        end = self.clock.mark()
        span = Span(self._begin, end, self._pauses)
        self._begin = end
        self._pauses = []
        return span


def duration_s(clock: HostClock | CudaClock, span: Span) -> float | None:
    """How long a step took once its end has passed; its marks but the last are free afterwards."""
    if span.begin is None:
        return None
    seconds = clock.seconds(span.begin, span.end)
    for begin, end in span.pauses:
        seconds -= clock.seconds(begin, end)
        clock.recycle(begin)
        clock.recycle(end)
    clock.recycle(span.begin)
    return seconds
