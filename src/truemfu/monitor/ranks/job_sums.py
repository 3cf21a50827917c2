"""The amounts of all other ranks in each step, added up exactly as their messages arrive.

A segment of equal steps adds its amounts at its first step and takes them away after its last. Sums of a step
are then the running sums of all changes up to it: the cost depends on the number of segments, not on the
number of steps. Steps are asked for in order, and what lies behind the last one asked for is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from .amounts import Amounts, Exact, Message, Segment, amounts_of

_RANKS = ""
"""The name under which ranks themselves are counted."""
_NOTHING = -1, 0
_Change = dict[str, tuple[int, Exact]]
"""By amount: how many ranks more know it, and by how much its sum grows."""


@dataclass(frozen=True, eq=False)
class JobStep:
    """The sums of one step over all ranks; an amount that one rank does not know is missing."""

    sums: Mapping[str, Exact]


class JobSums:
    """Not safe for several threads at a time."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._lines: dict[tuple[int, int, int], _Line] = {}
        """By era, stride and phase: ranks whose steps fall on different numbers are not added up."""
        self._covered: dict[int, tuple[int, int]] = {}
        self._asked: tuple[int, int] | None = None

    def take(self, message: Message) -> None:
        """Add the steps of a message that earlier ones of the rank did not have."""
        rank = message.row.rank
        covered = self._covered.get(rank)
        for segment in message.segments:
            new = _after(segment, covered)
            if new is None:
                continue
            covered = new.era, new.last
            self._line(new).add(new, amounts_of(message.names, segment.values))
        if covered is not None:
            self._covered[rank] = covered

    def covered(self, rank: int) -> tuple[int, int]:
        """Era and step up to which a rank has reported."""
        return self._covered.get(rank, _NOTHING)

    def of(self, era: int, step: int, stride: int) -> JobStep | None:
        """The sums of a step over the other ranks; None if one of them has not reported this very step."""
        if self._asked is not None and era > self._asked[0]:
            self._lines = {key: line for key, line in self._lines.items() if key[0] >= era}
        self._asked = era, step
        passed = []
        for key, line in self._lines.items():
            if key[0] == era:
                line.advance(step)
                if line.is_over:
                    passed.append(key)
        for key in passed:
            del self._lines[key]
        found = self._lines.get((era, stride, step % stride))
        return None if found is None else found.step(self._others)

    def _line(self, segment: Segment) -> _Line:
        key = segment.era, segment.stride, segment.first % segment.stride
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
            if self._asked is not None and self._asked[0] == segment.era:
                line.advance(self._asked[1])
        return line


class _Line:
    """The changes of the sums along the steps of one stride."""

    def __init__(self) -> None:
        self._changes: dict[int, _Change] = {}
        self._steps: list[int] = []
        self._running: _Change = {}
        self._at: int | None = None
        self._step: JobStep | None = None
        self._is_new = True

    def add(self, segment: Segment, amounts: Amounts) -> None:
        at = self._at
        if at is not None and segment.last < at:
            return
        change: _Change = {name: (1, value) for name, value in amounts.items()}
        change[_RANKS] = 1, 0
        if at is not None and segment.first <= at:
            self._apply(change)
        else:
            self._change(segment.first, change)
        self._change(
            segment.last + segment.stride, {name: (-count, -value) for name, (count, value) in change.items()}
        )

    def advance(self, step: int) -> None:
        """Move on to a step; never back."""
        if self._at is not None and step <= self._at:
            return
        self._at = step
        while self._steps and self._steps[0] <= step:
            self._apply(self._changes.pop(heapq.heappop(self._steps)))

    @property
    def is_over(self) -> bool:
        """Whether no rank has a step here now, and none is known to have one later."""
        return not self._steps and not self._running.get(_RANKS, (0, 0))[0]

    def step(self, others: int) -> JobStep | None:
        """The sums at the current step; the same object while nothing changes."""
        if self._is_new:
            self._is_new = False
            is_complete = self._running.get(_RANKS, (0, 0))[0] == others
            self._step = (
                JobStep(
                    {
                        name: value
                        for name, (count, value) in self._running.items()
                        if count == others and name != _RANKS
                    }
                )
                if is_complete
                else None
            )
        return self._step

    def _change(self, step: int, change: _Change) -> None:
        there = self._changes.get(step)
        if there is None:
            heapq.heappush(self._steps, step)
            self._changes[step] = change
        else:
            _add(there, change)

    def _apply(self, change: _Change) -> None:
        _add(self._running, change)
        self._is_new = True


def _add(to: _Change, change: _Change) -> None:
    for name, (count, value) in change.items():
        has_count, has_value = to.get(name, (0, 0))
        to[name] = has_count + count, has_value + value


def _after(segment: Segment, covered: tuple[int, int] | None) -> Segment | None:
    """The part of a segment that comes after what is covered; None if there is none."""
    if covered is None or segment.era > covered[0]:
        return segment
    if segment.era < covered[0] or segment.last <= covered[1]:
        return None
    known = max(0, (covered[1] - segment.first) // segment.stride + 1)
    return Segment(
        segment.era,
        segment.first + known * segment.stride,
        segment.stride,
        segment.count - known,
        segment.values,
    )
