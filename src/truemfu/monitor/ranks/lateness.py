"""By how much each rank of a role is later than the others in one window, and why.

Step times say nothing: collectives make them equal on all ranks. What differs is how a rank spends its step.

    input   data wait − that of the others
    work    own time × (1 − the others' FLOPs ÷ its own); tokens where FLOPs are not known
    gpu     own time × (1 − its clock ÷ that of the others)
    host    CPU: host time − that of the others, less input and work
            GPU: idle time − that of the others, less input; a GPU that waits in a collective is busy
    blocked CPU: time outside of collectives − that of the others, less input, work and host: the rank sleeps,
            or waits for something else than the other ranks
    link    the others' time in collectives − its own, less the largest of the above

all in seconds per step. Own time: the host time on a CPU, else the time in which the GPU was busy. "The
others" is the lower median over the role: with an even number of ranks the faster one of the middle two, so
that with two ranks each is compared with the other one. work and gpu are upper bounds: not all of a step
scales with FLOPs or with the clock.

How much is too much (`Limits`) follows from how much the ranks of a role differ: three standard deviations
by the median absolute deviation, the median over the last nine windows. It is at least 6 % of the step and
1 ms, with n ranks n ÷ (n − 1) times that: few ranks say little about how much healthy ones differ.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

from .rank_row import RankRow

SlowCause = Literal["input", "work", "gpu", "host", "blocked", "link"]

_SHORTEST_SHARE = 0.06
_SHORTEST_S = 0.001
_DEVIATIONS = 3.0
_WINDOWS = 9

Seconds = list[float | None]
"""One value per rank; None: not known."""


def lateness(rows: list[RankRow]) -> dict[SlowCause, Seconds]:
    """Seconds per step by cause, for one row of each rank of a role; all of them with a step time."""
    own = [_own_s(row) for row in rows]
    waits = _above([row.data_wait_s for row in rows])
    work = _slower(own, _amounts(rows))
    gpu = _slower(own, [1.0 / row.clock_mhz if row.clock_mhz else None for row in rows])
    on_host = [extra if row.host_s is not None else None for row, extra in zip(rows, work, strict=True)]
    host = _less(_less(_above([_host_s(row) for row in rows]), waits), on_host)
    late = _above([None if row.collective_s is None else -sum(row.collective_s.values()) for row in rows])
    blocked = _above([row.outside_s for row in rows])
    for explained in (waits, on_host, host):
        blocked = _less(blocked, explained)
    others = zip(waits, work, gpu, host, blocked, strict=True)
    link = _less(late, [max(part or 0.0 for part in parts) for parts in others])
    return {"input": waits, "work": work, "gpu": gpu, "host": host, "blocked": blocked, "link": link}


class Limits:
    """From how many seconds on a rank of one role is late, by cause."""

    def __init__(self) -> None:
        self._spreads: defaultdict[SlowCause, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOWS))

    def add(self, seconds: dict[SlowCause, Seconds], step_times_s: list[float]) -> dict[SlowCause, float]:
        """The limits for this window, which the next ones remember."""
        count = len(step_times_s)
        few = count / max(1, count - 1)
        floor_s = few * max(_SHORTEST_S, _SHORTEST_SHARE * median_low(step_times_s))
        limits: dict[SlowCause, float] = {}
        for cause, values in seconds.items():
            known = [abs(value) for value in values if value is not None]
            if known:
                self._spreads[cause].append(_sigma(len(known)) * median_low(known))
                limits[cause] = max(floor_s, _DEVIATIONS * median(self._spreads[cause]))
        return limits


def median_low(values: Iterable[float]) -> float:
    """The middle value, the lower one of two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _sigma(count: int) -> float:
    """Standard deviation ÷ lower median of the deviations from the lower median, for normal values.

    1.4826 for many values. For few, a fit to simulated ones, which it meets within 10 % from 3 values on.
    """
    return 1.4826 * count / max(1.0, count - (1.3 if count % 2 else 2.4))


def _own_s(row: RankRow) -> float:
    assert row.step_time_s is not None
    if row.host_s is not None:
        return row.host_s
    if row.busy_share is not None:
        return row.step_time_s * row.busy_share
    return max(0.0, row.step_time_s - (row.data_wait_s or 0.0))


def _host_s(row: RankRow) -> float | None:
    """What a late host makes longer."""
    assert row.step_time_s is not None
    if row.host_s is not None:
        return row.host_s
    return None if row.busy_share is None else row.step_time_s * (1.0 - row.busy_share)


def _amounts(rows: list[RankRow]) -> Seconds:
    """The work per step, by the same measure on all ranks."""
    flops = [row.model_flops for row in rows]
    if None not in flops:
        return [value or None for value in flops]
    return [row.tokens or None for row in rows]


def _above(values: Seconds) -> Seconds:
    """Each value less that of the others; None where only one rank knows its own."""
    return _against(values, lambda base, value, _: value - base)


def _slower(own: list[float], values: Seconds) -> Seconds:
    """The part of the own time that would not be there with the others' value."""
    return _against(values, lambda base, value, place: own[place] * (1.0 - base / value))


def _against(values: Seconds, seconds: Callable[[float, float, int], float]) -> Seconds:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return [None] * len(values)
    base = median_low(known)
    return [None if value is None else seconds(base, value, i) for i, value in enumerate(values)]


def _less(values: Seconds, explained: Seconds) -> Seconds:
    pairs = zip(values, explained, strict=True)
    return [None if value is None else value - max(0.0, part or 0.0) for value, part in pairs]
