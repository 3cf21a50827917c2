"""What a rank did in each of its steps, exactly, in the form in which it reaches rank 0.

    resolver ── add(step, amounts) ──► OwnAmounts ── message ──► store or file ──► rank 0's JobSums

Amounts are integers or fractions: a rank's share of a job's FLOPs (`RankRole`) need not be whole. Consecutive
steps with equal amounts are one segment, so a run of equal steps is a few bytes whatever its length. A
message repeats the segments of the last half minute, since rank 0 sees a rank's latest message only; the sums
since the start are in every message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from .rank_row import RankRow

Exact = int | Fraction
Amounts = Mapping[str, Exact]
"""By name: "tokens", "model_flops", …; unknown ones are omitted."""

PEAK = "peak_flops_per_s"
TOTALS = ("model_flops", "tokens", "useful_tokens", "samples")
"""The amounts that a summary has for the whole run."""
_REPEATED_S = 30.0
_MOST_SEGMENTS = 512


def plus(total: float | None, amount: float | Exact | None) -> float | None:
    """The sum; unknown if one of the two is."""
    return None if total is None or amount is None else total + float(amount)


def exact(value: float, shared_by: int = 1) -> Exact:
    """The value divided by the number of ranks that report it, without rounding."""
    if shared_by == 1 and value == int(value):
        return int(value)  # the usual case
    found = Fraction(value) / shared_by
    return found.numerator if found.denominator == 1 else found


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Steps with equal amounts: `first`, `first + stride`, …, `count` of them."""

    era: int
    """How often the step numbers of the rank have begun again."""
    first: int
    stride: int
    count: int
    values: list[str | None]
    """In the order of the message's names; None where unknown."""

    @property
    def last(self) -> int:
        return self.first + (self.count - 1) * self.stride


class Sum(msgspec.Struct, frozen=True, array_like=True):
    """The sum of an amount over steps, and over how many it is known."""

    steps: int
    value: str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank writes for rank 0: its latest row, its last steps, and its sums since the start."""

    row: RankRow
    at_s: float
    """Unix time at which it was made; the row may be some seconds older."""
    names: list[str] = []
    segments: list[Segment] = []
    steps: int = 0
    """Steps since the start, by `log_step` calls."""
    sums: dict[str, Sum] = {}

    @property
    def step(self) -> int | None:
        """The last step that it tells of."""
        return self.segments[-1].last if self.segments else self.row.step


@dataclass
class _Run:
    """Steps with equal amounts so far."""

    era: int
    first: int
    stride: int
    count: int
    amounts: Amounts
    at_s: float

    def continues(self, era: int, step: int, stride: int, amounts: Amounts) -> bool:
        is_next = era == self.era and stride == self.stride and step == self.first + self.count * stride
        return is_next and (amounts is self.amounts or amounts == self.amounts)


class OwnAmounts:
    """The amounts of this rank; added on the resolver's thread, read on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[_Run] = deque(maxlen=_MOST_SEGMENTS)
        self._sums: dict[str, tuple[int, Exact]] = {}
        self._last_step: int | None = None
        self._era = 0
        self.steps = 0

    def add(self, step: int, stride: int, amounts: Amounts) -> int:
        """Add a step that stands for `stride` ones; returns its era."""
        now_s = time.monotonic()
        with self._lock:
            if self._last_step is not None and step <= self._last_step:
                self._era += 1
            self._last_step = step
            run = self._runs[-1] if self._runs else None
            if run is not None and run.continues(self._era, step, stride, amounts):
                run.count, run.at_s = run.count + 1, now_s
            else:
                self._runs.append(_Run(self._era, step, stride, 1, amounts, now_s))
            self.steps += 1
            for name, value in amounts.items():
                steps, total = self._sums.get(name, (0, 0))
                self._sums[name] = steps + 1, total + value
            return self._era

    def sums(self) -> tuple[int, dict[str, tuple[int, Exact]]]:
        """Steps since the start, and of each amount its sum and over how many steps that is."""
        with self._lock:
            return self.steps, dict(self._sums)

    def message(self, row: RankRow) -> Message:
        """The next message."""
        now_s = time.monotonic()
        with self._lock:
            while len(self._runs) > 1 and self._runs[0].at_s < now_s - _REPEATED_S:
                self._runs.popleft()
            names = list(dict.fromkeys(name for run in self._runs for name in run.amounts))
            segments = [
                Segment(run.era, run.first, run.stride, run.count, _texts(names, run.amounts))
                for run in self._runs
            ]
            return Message(
                row=row,
                at_s=time.time(),
                names=names,
                segments=segments,
                steps=self.steps,
                sums={name: Sum(steps, str(total)) for name, (steps, total) in self._sums.items()},
            )


def amounts_of(names: list[str], values: list[str | None]) -> dict[str, Exact]:
    """The known amounts of a segment."""
    return {name: number(value) for name, value in zip(names, values, strict=True) if value is not None}


def number(text: str) -> Exact:
    """A number as a message writes it: "12" or "1/3"."""
    return Fraction(text) if "/" in text else int(text)


def _texts(names: list[str], amounts: Amounts) -> list[str | None]:
    return [None if (value := amounts.get(name)) is None else str(value) for name in names]
