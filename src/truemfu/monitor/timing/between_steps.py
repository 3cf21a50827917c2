"""The time from the end of a step to the next training forward pass, and what is known of it.

    log_step ─ evaluation, checkpoint ─ ⟨next batch⟩ ─► forward pass ─ ⟨next batch⟩ ─► forward pass …
               not waiting for data     data wait                      data wait

Data wait is the time in a loader's `next` on the training thread, for loaders passed to `monitor.data` and
for torch's DataLoaders. The wait for a DataLoader belongs to an evaluation if gradients are disabled or a
forward pass without gradients follows. Everything else is "between steps, not waiting for data": a slow
generator of batches cannot be distinguished from writing a checkpoint.

A long gap that occurs now and then (an evaluation, a checkpoint) is excluded from the step; one of which most
steps have the like (generation in reinforcement learning, a slow generator) belongs to it. How long a gap is
the device decides: marks are placed at its ends and around the data waits in it, and what lies between them
is read once the device has passed them. A host that waits for the device has no gap: `loss.item()` after
`log_step` takes the time of the step's own kernels.

    log_step ──────────── ⟨next batch⟩ ───────────► forward pass
      mark ═══ part ═══ mark        mark ═══ part ═══ mark
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .clock import Pause, Span, StepClock, TimeMark, seconds_between

LONG_GAP_S = 0.005
"""Shorter gaps are never excluded; without a forward pass in it, a gap that is not `_CLEARLY_LONG_GAP_S`
long may be a delay by the operating system."""
_CLEARLY_LONG_GAP_S = 0.02
_SHORT_WAIT_S = 0.001
"""A shorter wait for data is not told apart from the gap around it: that would cost marks in every step."""
_RECENT_STEPS = 20
_FEWEST_STEPS = 4
"""Before that it is not known which gaps are usual."""
_MOST_WAITS = 64
"""Waits stored separately per step; further ones are added to the last."""
_thread = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled


class WaitListener(Protocol):
    """Is told of each wait for data on the training thread, also of those inside a step."""

    def wait_begins(self) -> None:
        """A batch is requested from a loader."""

    def wait_ends(self, *, has_batch: bool) -> None:
        """The loader has returned."""


class Wait(NamedTuple):
    """A wait for data that is over."""

    ended_s: float
    seconds: float
    is_given: bool
    """Whether the loader was passed to `monitor.data`."""
    marks: tuple[TimeMark, TimeMark] | None = None
    """Its ends; None for a short one, and for one after the step's first forward pass."""


class Between(NamedTuple):
    """The time before and between a step's forward passes; None where unknown."""

    data_wait_s: float | None = None
    other_s: float | None = None
    forwards: int = 0
    """Forward passes without gradients before the step's first one with gradients."""


class Gap(NamedTuple):
    """What is known of the time before a step's first forward pass, by the host's clock and by a mark."""

    end_s: float | None
    first_s: float | None
    waits: Sequence[Wait]
    forwards: int
    mark: TimeMark | None = None
    """Where the first forward pass began; None if the gap before it is short."""

    def parts(self, span: Span) -> list[tuple[TimeMark, TimeMark]]:
        """The gap without the data waits and pauses in it."""
        if self.mark is None or span.begin is None:
            return []
        known = [(pause.begin, pause.end) for pause in span.pauses if pause.end.host_s <= self.mark.host_s]
        known += [wait.marks for wait in self.waits if wait.marks is not None]
        parts, begin = [], span.begin
        for known_begin, known_end in sorted(known, key=lambda marks: marks[0].host_s):
            if known_begin.host_s > begin.host_s:
                parts.append((begin, known_begin))
            if known_end.host_s > begin.host_s:
                begin = known_end
        return [*parts, (begin, self.mark)]

    def between(self) -> Between:
        """By the host's clock."""
        data_wait_s = sum(wait.seconds for wait in self.waits) if self.waits else None
        if self.end_s is None or self.first_s is None:
            return Between(data_wait_s)
        known_s = sum(wait.seconds for wait in self.waits if wait.ended_s <= self.first_s)
        return Between(data_wait_s, max(0.0, self.first_s - self.end_s - known_s), self.forwards)


class UsualGaps:
    """Which gaps are unusual; called for each step in order, once the device has passed its end."""

    def __init__(self) -> None:
        self._steps = 0
        self._gaps: deque[tuple[int, float, int]] = deque(maxlen=_RECENT_STEPS)
        """Steps that followed a gap that was long or had forward passes: its seconds, and how many."""

    def excluded(self, gap: Gap, span: Span) -> list[Pause]:
        """The gap before a step if it is long and one of few, as pauses; else nothing.

        Alike are gaps of at least half its length, and those with at least half as many forward passes: an
        evaluation in each step takes longer now and then. A gap of unknown length is excluded, so that the
        step's time is unknown.
        """
        step, forwards = self._steps, gap.forwards
        self._steps += 1
        parts = gap.parts(span)
        if not parts:
            return []
        pauses = [Pause(begin, end, "evaluation" if forwards else "other") for begin, end in parts]
        gap_s = gap_seconds(parts)
        if gap_s is None:
            return pauses
        recent = min(step, _RECENT_STEPS)
        alike = sum(
            s > step - recent and (seconds >= gap_s / 2 or 2 * others >= forwards > 0)
            for s, seconds, others in self._gaps
        )
        is_long = gap_s >= (LONG_GAP_S if forwards else _CLEARLY_LONG_GAP_S)
        if is_long or forwards:
            self._gaps.append((step, gap_s, forwards))
        return pauses if is_long and recent >= _FEWEST_STEPS and alike < recent / 2 else []


def gap_seconds(parts: Sequence[tuple[TimeMark, TimeMark]]) -> float | None:
    """Device seconds in the parts of a gap; None if one is unknown."""
    found = [seconds_between(begin, end) for begin, end in parts]
    known = [seconds for seconds in found if seconds is not None]
    return sum(known) if len(known) == len(found) else None


class BetweenSteps:
    """Lives on the training thread; waits and forward passes of other threads are ignored."""

    __slots__ = (
        "_began",
        "_began_s",
        "_clock",
        "_depth",
        "_evaluated_after",
        "_first",
        "_listener",
        "_now_s",
        "_workers",
        "end_s",
        "first_s",
        "forwards",
        "last_s",
        "pauses",
        "thread",
        "waits",
        "workers",
    )

    def __init__(self, *, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.thread = _thread()
        self.pauses = 0
        """Pauses that have begun, one inside the other."""
        self.end_s: float | None = None
        """When the last `log_step` returned, plus the pauses since."""
        self.first_s: float | None = None
        """When the first forward pass of the current step began, if known."""
        self.last_s: float | None = None
        self.waits: list[Wait] = []
        self.workers: int | None = None
        """Of the DataLoader of the last batch; None if it came from elsewhere."""
        self._workers: int | None = None
        self.forwards = 0
        self._depth = 0
        self._began_s = 0.0
        self._clock: StepClock | None = None
        self._listener: WaitListener | None = None
        self._first: TimeMark | None = None
        self._began: TimeMark | None = None
        self._evaluated_after: TimeMark | None = None
        """The last mark before the last forward pass without gradients."""

    @property
    def is_paused(self) -> bool:
        """Whether what runs now belongs to no step."""
        return self.pauses > 0

    def mark_with(self, clock: StepClock) -> None:
        """Place marks at the ends of gaps and waits from now on."""
        self._clock = clock

    def tell(self, listener: WaitListener | None) -> None:
        """Tell this one of waits from now on."""
        self._listener = listener

    def shift(self, seconds: float) -> None:
        """Exclude time since the last step that is reported elsewhere."""
        if self.end_s is not None:
            self.end_s += seconds

    def wait_begins(self, workers: int | None = None) -> None:
        """The `next` of a loader with so many workers begins; a loader inside another is counted once."""
        if _thread() != self.thread:
            return
        self._depth += 1
        self._workers = workers
        if self._depth > 1:
            return
        self._began_s, self._began = self._now_s(), None
        if self.end_s is not None and self.first_s is None and not self.is_paused and _is_grad_enabled():
            last = None if self._clock is None else self._clock.last
            is_near = last is not None and self._began_s - last.host_s < _SHORT_WAIT_S
            self._began = last if is_near and last is not self._evaluated_after else self._mark()
        if self._listener is not None:
            self._listener.wait_begins()

    def wait_ends(self, *, has_batch: bool, is_given: bool = False) -> None:
        """It has returned; without a batch (exhausted, an error) that was not a wait for data."""
        if _thread() != self.thread or not self._depth:
            return
        self._depth -= 1
        if self._listener is not None and not self._depth:
            self._listener.wait_ends(has_batch=has_batch)
        if self._depth or self.is_paused or not has_batch or not (is_given or _is_grad_enabled()):
            return
        self.workers = self._workers
        waits, ended_s, marks = self.waits, self._now_s(), None
        seconds = ended_s - self._began_s
        if self._began is not None and seconds >= _SHORT_WAIT_S and (end := self._mark()) is not None:
            marks = self._began, end
        if len(waits) == _MOST_WAITS:
            last = waits.pop()
            seconds, is_given, marks = seconds + last.seconds, is_given or last.is_given, last.marks
        waits.append(Wait(ended_s, seconds, is_given, marks))

    def _mark(self) -> TimeMark | None:
        """A mark around a wait; a device that fails does so in the training's next operation, not here."""
        try:
            return None if self._clock is None else self._clock.moment()
        except Exception:
            return None

    def begun(self, first_s: float) -> None:
        """The first training forward pass of a step began: a gap that may be long ends with a mark."""
        if self.first_s is None:
            self.first_s = first_s
            is_long = self.end_s is not None and (first_s - self.end_s > LONG_GAP_S or self.forwards > 0)
            if is_long and self._clock is not None:
                self._first = self._clock.moment()
        self.last_s = first_s

    def evaluated(self) -> None:
        """A forward pass without gradients began."""
        if self.is_paused or _thread() != self.thread:
            return
        last_s = self.last_s
        if self._clock is not None:
            self._evaluated_after = self._clock.last
        if last_s is None:
            self.forwards += 1
        if self.waits:
            self.waits = [
                wait
                for wait in self.waits
                if wait.is_given or (last_s is not None and wait.ended_s <= last_s)
            ]

    def take(self) -> Gap:
        """The gap of the step that ends now; the next one begins."""
        gap = Gap(self.end_s, self.first_s, self.waits or (), self.forwards, self._first)
        self.first_s = self.last_s = self._first = None
        self.forwards = self._depth = 0
        if self.waits:
            self.waits = []
        self.thread = _thread()
        return gap
