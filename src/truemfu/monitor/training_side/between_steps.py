"""The time from the end of a step to the next training forward pass, and what is known of it.

    log_step ─ evaluation, checkpoint ─ ⟨next batch⟩ ─► forward pass ─ ⟨next batch⟩ ─► forward pass …
               other, between steps     data wait                      data wait

Known to be data wait is the time in a loader's `next` on the training thread: of a loader that was given to
`monitor.data`, or of any DataLoader of torch's. The latter is an evaluation's own where gradients are
disabled or a forward pass without gradients follows. Everything else is "other, between steps": a slow
generator of batches looks the same from here as a checkpoint that is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

_MOST_WAITS = 64
"""That are kept apart in one step; more than that are added up."""
_now_s = time.perf_counter
_thread = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled


class Wait(NamedTuple):
    """A wait for data that is over."""

    ended_s: float
    seconds: float
    is_given: bool
    """Whether the loader was given to the monitor as the training's."""


class Between(NamedTuple):
    """What is known of the time before and between a step's forward passes; None for what is not."""

    data_wait_s: float | None = None
    other_s: float | None = None
    forwards: int = 0
    """Forward passes without gradients before the step's first with them."""


def between(end_s: float | None, first_s: float | None, waits: Sequence[Wait], forwards: int) -> Between:
    """Of a step that follows one that ended at `end_s`, and whose first forward pass began at `first_s`."""
    data_wait_s = sum(wait.seconds for wait in waits) if waits else None
    if end_s is None or first_s is None:
        return Between(data_wait_s)
    known_s = sum(wait.seconds for wait in waits if wait.ended_s <= first_s)
    return Between(data_wait_s, max(0.0, first_s - end_s - known_s), forwards)


Gap = tuple[float | None, float | None, Sequence[Wait], int]
"""What was seen of a step, as `between` takes it."""


class BetweenSteps:
    """Lives on the training thread; what other threads wait for or run is not the step's."""

    __slots__ = (
        "_began_s",
        "_depth",
        "end_s",
        "first_s",
        "forwards",
        "is_paused",
        "last_s",
        "thread",
        "waits",
    )

    def __init__(self) -> None:
        self.thread = _thread()
        self.is_paused = False
        self.end_s: float | None = None
        """When the last `log_step` was over, of whatever step, less the pauses since."""
        self.first_s: float | None = None
        """When the first forward pass of the step under way began, where that is known."""
        self.last_s: float | None = None
        self.waits: list[Wait] = []
        self.forwards = 0
        self._depth = 0
        self._began_s = 0.0

    def wait_begins(self) -> None:
        """A loader is asked for its next batch; one inside another counts once."""
        if _thread() != self.thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._began_s = _now_s()

    def wait_ends(self, *, has_batch: bool, is_given: bool = False) -> None:
        """It has answered; without a batch (its end, an error) that was no wait for data."""
        if _thread() != self.thread or not self._depth:
            return
        self._depth -= 1
        if self._depth or self.is_paused or not has_batch or not (is_given or _is_grad_enabled()):
            return
        waits, ended_s = self.waits, _now_s()
        seconds = ended_s - self._began_s
        if len(waits) == _MOST_WAITS:
            last = waits.pop()
            seconds, is_given = seconds + last.seconds, is_given or last.is_given
        waits.append(Wait(ended_s, seconds, is_given))

    def begun(self, first_s: float) -> None:
        """A training forward pass began."""
        if self.first_s is None:
            self.first_s = first_s
        self.last_s = first_s

    def evaluated(self) -> None:
        """A forward pass without gradients began."""
        if self.is_paused or _thread() != self.thread:
            return
        last_s = self.last_s
        if last_s is None:
            self.forwards += 1
        if self.waits:
            self.waits = [
                wait
                for wait in self.waits
                if wait.is_given or (last_s is not None and wait.ended_s <= last_s)
            ]

    def take(self) -> Gap:
        """What was seen of the step that ends now; the next one begins."""
        gap = self.end_s, self.first_s, self.waits, self.forwards
        self.first_s = self.last_s = None
        self.forwards = self._depth = 0
        if self.waits:
            self.waits = []
        self.thread = _thread()
        return gap
