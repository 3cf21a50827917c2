"""The time of a step, divided among its kernels so that every moment belongs to one of them or to a gap.

kernels, memory copies, communication: in this order, and of each by their start
─► each gets the time in which none before it in this order ran ─► what is left are the gaps
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .classes import COMMUNICATION, MEMORY
from .record import Lane
from .trace import Kernel, StepTrace

Interval = tuple[int, int]
_PICTURE = 1000
_MOST_LANES = 12
_LATER = {MEMORY: 1, COMMUNICATION: 2}
"""Classes that only get the time that others leave."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time without kernels, before one of them."""

    start: int
    end: int
    before: Kernel
    data_wait: int
    """So much of it the host waited for a batch."""
    is_host: bool
    """Whether the host launched the next kernel only after it had begun."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Nanoseconds; `own` and the gaps add up to the step."""

    own: Mapping[int, int]
    """By the identity of the kernel."""
    gaps: Sequence[Gap]
    busy: int


def timeline(step: StepTrace, kinds: Mapping[int, str]) -> Timeline:
    """The timeline of a step; `kinds` are the classes of its kernels."""
    own: dict[int, int] = {}
    taken: list[Interval] = []
    for place in range(3):
        kernels = [k for k in step.kernels if _LATER.get(kinds[id(k)], 0) == place]
        cursor, added = step.start, []
        for kernel in kernels:
            start = max(kernel.start, cursor)
            free = list(_without(start, kernel.end, taken)) if kernel.end > start else []
            own[id(kernel)] = sum(end - begin for begin, end in free)
            added += free
            cursor = max(cursor, kernel.end)
        taken = _merged([*taken, *added])
    busy = sum(end - start for start, end in taken)
    return Timeline(own=own, gaps=_gaps(step, taken), busy=busy)


def _without(start: int, end: int, taken: Sequence[Interval]) -> Iterable[Interval]:
    """The parts of an interval that are in none of `taken`, which are ordered and apart."""
    index = max(0, bisect_right(taken, (start, start)) - 1)
    for begin, until in taken[index:]:
        if begin >= end:
            break
        if until <= start:
            continue
        if begin > start:
            yield start, begin
        start = max(start, until)
        if start >= end:
            return
    if start < end:
        yield start, end


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _gaps(step: StepTrace, taken: Sequence[Interval]) -> list[Gap]:
    starts = [kernel.start for kernel in step.kernels]
    waits = _merged(step.waits)
    found = []
    for start, end in _without(step.start, step.end, taken):
        after = step.kernels[min(bisect_right(starts, end - 1), len(starts) - 1)]
        is_host = after.launched is None or after.launched > start
        waited = end - start - sum(b - a for a, b in _without(start, end, waits)) if is_host else 0
        found.append(Gap(start=start, end=end, before=after, data_wait=waited, is_host=is_host))
    return found


def lanes(step: StepTrace, kinds: Mapping[int, str]) -> list[Lane]:
    """The picture of a step: a lane for each stream, the busiest first."""
    length = max(1, step.end - step.start)
    buckets: defaultdict[str, defaultdict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for kernel in step.kernels:
        own = buckets[str(kernel.stream)]
        first = (kernel.start - step.start) * _PICTURE // length
        last = min(_PICTURE - 1, max(first, (kernel.end - step.start - 1) * _PICTURE // length))
        for place in range(first, last + 1):
            begin = step.start + place * length // _PICTURE
            end = step.start + (place + 1) * length // _PICTURE
            own[place][kinds[id(kernel)]] += max(0, min(kernel.end, end) - max(kernel.start, begin))
    half = length / _PICTURE / 2
    drawn = []
    for stream, places in buckets.items():
        segments: list[tuple[int, int, str]] = []
        for place, kinds_here in sorted(places.items()):
            if kinds_here.total() < half:
                continue
            kind = max(kinds_here, key=lambda one: kinds_here[one])
            if segments and segments[-1][1] == place and segments[-1][2] == kind:
                segments[-1] = segments[-1][0], place + 1, kind
            else:
                segments.append((place, place + 1, kind))
        drawn.append(Lane(stream=stream, segments=segments))
    drawn.sort(key=lambda lane: -sum(end - start for start, end, _ in lane.segments))
    return [lane for lane in drawn if lane.segments][:_MOST_LANES]
