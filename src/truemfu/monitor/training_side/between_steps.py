"""The time from the end of a step to the next training forward pass, and what is known of it.

    log_step ─ evaluation, checkpoint ─ ⟨next batch⟩ ─► forward pass ─ ⟨next batch⟩ ─► forward pass …
               other, between steps     data wait                      data wait

Data wait is the time in a loader's `next` on the training thread, for loaders passed to `monitor.data` and
for torch's DataLoaders. The wait for a DataLoader belongs to an evaluation if gradients are disabled or a
forward pass without gradients follows. Everything else is "other, between steps": a slow generator of batches
cannot be distinguished from writing a checkpoint.

A long gap that occurs now and then (an evaluation, a checkpoint) is excluded from the step; one of which most
steps have the like (generation in reinforcement learning, a slow generator) belongs to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

LONG_GAP_S = 0.005
"""Shorter gaps are never excluded; without a forward pass in it, a gap that is not `_CLEARLY_LONG_GAP_S`
long may be a delay by the operating system."""
_CLEARLY_LONG_GAP_S = 0.02
_RECENT_STEPS = 20
_FEWEST_STEPS = 4
"""Before that it is not known which gaps are usual."""
_MOST_WAITS = 64
"""Waits stored separately per step; further ones are added to the last."""
_now_s = time.perf_counter
_thread = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled


class Wait(NamedTuple):
    """A wait for data that is over."""

    ended_s: float
    seconds: float
    is_given: bool
    """Whether the loader was passed to `monitor.data`."""


class Between(NamedTuple):
    """The time before and between a step's forward passes; None where unknown."""

    data_wait_s: float | None = None
    other_s: float | None = None
    forwards: int = 0
    """Forward passes without gradients before the step's first one with gradients."""


def between(end_s: float | None, first_s: float | None, waits: Sequence[Wait], forwards: int) -> Between:
    """For a step after one that ended at `end_s`, with its first forward pass at `first_s`."""
    data_wait_s = sum(wait.seconds for wait in waits) if waits else None
    if end_s is None or first_s is None:
        return Between(data_wait_s)
    known_s = sum(wait.seconds for wait in waits if wait.ended_s <= first_s)
    return Between(data_wait_s, max(0.0, first_s - end_s - known_s), forwards)


Gap = tuple[float | None, float | None, Sequence[Wait], int]
"""The arguments of `between` for one step."""


class BetweenSteps:
    """Lives on the training thread; waits and forward passes of other threads are ignored."""

    __slots__ = (
        "_began_s",
        "_depth",
        "_gaps",
        "end_s",
        "first_s",
        "forwards",
        "last_s",
        "pauses",
        "thread",
        "waits",
    )

    def __init__(self) -> None:
        self.thread = _thread()
        self.pauses = 0
        """Pauses that have begun, one inside the other."""
        self.end_s: float | None = None
        """When the last `log_step` returned, plus the pauses since."""
        self.first_s: float | None = None
        """When the first forward pass of the current step began, if known."""
        self.last_s: float | None = None
        self.waits: list[Wait] = []
        self.forwards = 0
        self._depth = 0
        self._began_s = 0.0
        self._gaps: deque[tuple[int, float, int]] = deque(maxlen=_RECENT_STEPS)
        """Steps that followed a gap that was long or had forward passes: its seconds, and how many."""

    @property
    def is_paused(self) -> bool:
        """Whether what runs now belongs to no step."""
        return self.pauses > 0

    def shift(self, seconds: float) -> None:
        """Exclude time since the last step that is reported elsewhere."""
        if self.end_s is not None:
            self.end_s += seconds

    def unusual_gap(self, step: int) -> tuple[str, float] | None:
        """Whether the gap before this step is long and one of few: what ran in it, and the data wait in it.

        Alike are gaps of at least half its length, and those with at least half as many forward passes: an
        evaluation in each step takes longer now and then. `step` counts the steps of this run. The gap is
        then excluded; `first_s` must be known.
        """
        assert self.end_s is not None
        assert self.first_s is not None
        waited_s = sum(wait.seconds for wait in self.waits)
        gap_s = self.first_s - self.end_s - waited_s
        recent = min(step, _RECENT_STEPS)
        alike = sum(
            s > step - recent and (seconds >= gap_s / 2 or 2 * forwards >= self.forwards > 0)
            for s, seconds, forwards in self._gaps
        )
        is_long = gap_s >= (LONG_GAP_S if self.forwards else _CLEARLY_LONG_GAP_S)
        if is_long or self.forwards:
            self._gaps.append((step, gap_s, self.forwards))
        if not is_long or recent < _FEWEST_STEPS or alike >= recent / 2:
            return None
        kind = "evaluation" if self.forwards else "other"
        self.end_s, self.forwards = self.first_s - waited_s, 0
        return kind, waited_s

    def wait_begins(self) -> None:
        """A loader's `next` begins; a loader inside another is counted once."""
        if _thread() != self.thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._began_s = _now_s()

    def wait_ends(self, *, has_batch: bool, is_given: bool = False) -> None:
        """It has returned; without a batch (exhausted, an error) that was not a wait for data."""
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
        """The gap of the step that ends now; the next one begins."""
        gap = self.end_s, self.first_s, self.waits, self.forwards
        self.first_s = self.last_s = None
        self.forwards = self._depth = 0
        if self.waits:
            self.waits = []
        self.thread = _thread()
        return gap
