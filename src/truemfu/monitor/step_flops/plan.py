"""When a step is observed: often enough to know the work, seldom enough to cost next to nothing.

Steps 1 and 2 are always observed. Then a step is observed if there is a reason (an unknown kind of step that
keeps appearing, a change, a regular check, some early checks) and the share of the run's time allows it: a
quarter of the first minute, a thousandth of the run afterwards.

The ranks of a job observe the same steps without exchanging anything, because one rank that observes makes
all wait. Each takes multiples of a power of two that its own figures allow: the choices of two ranks are
equal, or one is contained in the other.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable

_FIRST_MINUTE_S, _SHARE_AT_FIRST, _SHARE = 60.0, 0.25, 0.001
_FREE = 8
"""Observations of the first minute that happen whatever they take."""
_REGULAR_SHARE = _SHARE / 2
"""What observations on a grid of steps may take; the rest pays for costs that vary and for periodic kinds."""
_SHIFT, _SHIFT_STEPS = 0.15, 32
_RECENT_COSTS, _MOST_KINDS = 8, 64
_NEVER = 1 << 62
_CHECKS = (10, 24, 60, 100, 240, 400)
"""Steps that show whether equal batches mean equal work: ever fewer, and multiples of the usual periods of
work that does not come with every step (a penalty, an auxiliary loss, a measurement of gradients)."""


class ObservationPlan:
    """Decides which steps of a run are observed; times are given by the caller."""

    def __init__(self, frequency: int, start_s: float) -> None:
        self._frequency, self._start_s = frequency, start_s
        self._next_step = 1
        """No step before this one needs a decision."""
        self._has_news = False
        """Whether a decision is needed before that step; set last by whoever has news, on any thread."""
        self._reason: str | None = None
        self._kinds: dict[Hashable, _Appearances] = {}
        self._count, self._last_cost_s = 0, 0.0
        self.spent_s = self._spent_at_first_s = self._spent_later_s = 0.0
        """How much longer all observed steps took than plain ones; those that count in each share."""
        self._costs_s: deque[float] = deque(maxlen=_RECENT_COSTS)
        self._regular, self._grid = _Stride(max(1, frequency)), _Stride(1)
        self.pace = _Pace()

    def set_frequency(self, steps: int) -> None:
        """Observe regularly after so many steps; 0: never."""
        if steps != self._frequency:
            self._frequency, self._regular, self._has_news = steps, _Stride(max(1, steps)), True

    def is_due(self, step: int, now_s: float) -> bool:
        """Whether the step with this number (from 1, in logged steps) is to be observed."""
        if step < self._next_step and not self._has_news:
            return False
        if step <= 2:
            return True
        self._has_news = False
        if self.pace.step_s:
            cost_s = statistics.median(self._recent_costs_s())
            for stride in (self._regular, self._grid):
                stride.adapt(cost_s / self.pace.step_s / _REGULAR_SHARE)
        is_due = self._has_reason(step, now_s) and self.wants_unknown(now_s)
        if is_due:
            self._reason = None
        self._next_step = self._next_decision(step, now_s)
        return is_due

    def observed(self, step: int, extra_s: float, now_s: float) -> None:
        """A step was observed and took so much longer than a plain one; all of it while that is unknown."""
        self._count += 1
        self.spent_s += extra_s
        self._last_cost_s = extra_s
        if self.pace.steps >= 2:
            self._costs_s.append(extra_s)
        if now_s - self._start_s <= _FIRST_MINUTE_S:
            self._spent_at_first_s += extra_s * (self._count > _FREE)
        elif step > 2:
            self._spent_later_s += extra_s
        self.pace.compare_from_now()
        self._has_news = True

    def unknown_kind(self, step: int, kind: Hashable) -> None:
        """A step with micro-batches of this kind has unknown FLOPs."""
        known = self._kinds.pop(kind, None)
        self._kinds[kind] = known or _Appearances(step)
        if known is not None:
            known.again(step)
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._has_news = True

    def known_kind(self, kind: Hashable) -> None:
        """The FLOPs of this kind are known now."""
        self._kinds.pop(kind, None)

    def ask(self, reason: str) -> None:
        """Ask for an observation as soon as the share allows it; the first reason stays until then."""
        self._reason = self._reason or reason
        self._has_news = True

    def shifted(self, step_time_s: float) -> bool:
        """Take the time of a plain step; True, once, if step times have changed for good: then asks too."""
        is_shifted = self.pace.add(step_time_s)
        if is_shifted:
            self.ask("step times have changed")
        return is_shifted

    def _has_reason(self, step: int, now_s: float) -> bool:
        is_regular = self._count and step % self._regular.steps == 0
        if self._frequency and (is_regular or step in _CHECKS):
            return True
        on_grid = step % self._grid_now(now_s) == 0
        if on_grid and self._wants_any():
            return True
        return any(each.expected(step) == step for each in list(self._kinds.values()))

    def _next_decision(self, step: int, now_s: float) -> int:
        following = [each.expected(step + 1) for each in list(self._kinds.values())]
        if self._frequency:
            following.append(_multiple_after(step, self._regular.steps))
            following.append(next((check for check in _CHECKS if check > step), _NEVER))
        if self._wants_any():
            following.append(_multiple_after(step, self._grid_now(now_s)))
        return min(following, default=_NEVER)

    def _wants_any(self) -> bool:
        return self._reason is not None or any(each.is_anywhere for each in list(self._kinds.values()))

    def _grid_now(self, now_s: float) -> int:
        return 1 if now_s - self._start_s <= _FIRST_MINUTE_S else self._grid.steps

    def _recent_costs_s(self) -> list[float]:
        return list(self._costs_s) or [max(0.0, self._last_cost_s - self.pace.step_s)]

    def wants_unknown(self, now_s: float) -> bool:
        """Whether the share allows an observation at this moment, as of a batch of a new shape."""
        elapsed_s = now_s - self._start_s
        cost_s = 2 * max(self._recent_costs_s())  # the next may take longer than those before it
        if elapsed_s + self.pace.step_s + cost_s > _FIRST_MINUTE_S:
            return self._spent_later_s + cost_s <= _SHARE * elapsed_s
        return self._count < _FREE or self._spent_at_first_s + cost_s <= _SHARE_AT_FIRST * elapsed_s


class _Pace:
    """The times of the last plain steps, and whether they have changed for good."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_SHIFT_STEPS)
        self.step_s = self._reference_s = 0.0
        """Their median, 0 before the first; the one that it is compared with."""

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self._times_s)

    def add(self, step_time_s: float) -> bool:
        """The time of one more; True, once, after a change."""
        self._times_s.append(step_time_s)
        self.step_s = statistics.median(self._times_s)
        if self.steps < _SHIFT_STEPS:
            return False
        reference_s = self._reference_s = self._reference_s or self.step_s
        if abs(self.step_s - reference_s) <= _SHIFT * reference_s:
            return False
        self._times_s.clear()  # what comes next is compared with times after the shift alone
        self._reference_s = 0.0
        return True

    def compare_from_now(self) -> None:
        """A step was observed: later ones are compared with those before it."""
        self._reference_s = self.step_s if self.steps == _SHIFT_STEPS else 0.0


class _Stride:
    """A number of steps, a base times a power of two, in which one observation stays within its share."""

    def __init__(self, base: int) -> None:
        self._base = self.steps = base

    def adapt(self, fewest_steps: float) -> None:
        """Grow if the share needs more steps; shrink if half as many would leave a third of it unused."""
        while self.steps < fewest_steps:
            self.steps *= 2
        while self.steps > self._base and self.steps / 2 > 1.5 * fewest_steps:
            self.steps //= 2


class _Appearances:
    """The last steps in which a kind of unknown FLOPs appeared, and when it is expected again."""

    def __init__(self, step: int) -> None:
        self._last, self._gap, self._is_periodic = step, 0, True

    def again(self, step: int) -> None:
        gap = step - self._last
        if gap > 0:
            self._is_periodic = self._gap in (0, gap)
            self._last, self._gap = step, gap

    @property
    def is_anywhere(self) -> bool:
        """Whether it may appear in any step: it comes in every step, or without a period."""
        return self._gap == 1 or not self._is_periodic

    def expected(self, from_step: int) -> int:
        """The first step from this one on in which it should appear; never while no period is known."""
        if not self._gap or self.is_anywhere:
            return _NEVER
        periods = max(1, -(-(from_step - self._last) // self._gap))
        return self._last + periods * self._gap


def _multiple_after(step: int, stride: int) -> int:
    return (step // stride + 1) * stride
