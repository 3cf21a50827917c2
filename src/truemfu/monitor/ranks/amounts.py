"""What a rank did in each of its steps, exactly, in the form in which it reaches rank 0.

    rows ── add(step, amounts) ──► OwnAmounts ── message ──► store or file ──► rank 0's JobSums

Amounts are integers or fractions: a rank's share of a job's FLOPs (`RankRole`) need not be whole. Consecutive
steps with equal amounts are one run, which is a few bytes whatever its length. A message repeats the runs of
the last half minute, since rank 0 sees a rank's latest message only; the sums since the start are in every
message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, NamedTuple

import msgspec

from .rank_row import RankRow

Exact = int | Fraction
Amounts = Mapping[str, Exact]
"""By name: "tokens", "model_flops", …; unknown ones are omitted."""

PEAK = "peak_flops_per_s"
TOTALS = ("model_flops", "tokens", "useful_tokens", "samples")
"""The amounts that a summary has for the whole run."""
_REPEATED_S = 30.0
_MOST_RUNS = 512


def plus(total: float | None, amount: float | Exact | None) -> float | None:
    """The sum; unknown if one of the two is."""
    return None if total is None or amount is None else total + float(amount)


def exact(value: float, shared_by: int = 1) -> Exact:
    """The value divided by the number of ranks that report it, without rounding."""
    if shared_by == 1 and value == int(value):
        return int(value)  # the usual case
    found = Fraction(value) / shared_by
    return found.numerator if found.denominator == 1 else found


class StepKey(NamedTuple):
    """Which step of a rank this is; steps of several ranks with equal keys are added up."""

    numbering: int
    """How often the step numbers of the rank have begun again."""
    step: int
    stride: int
    """How many steps it stands for: those just before it were not logged."""


class StepRun(msgspec.Struct, frozen=True, array_like=True):
    """Steps with equal amounts: `first`, `first + stride`, …, `count` of them."""

    numbering: int
    first: int
    stride: Annotated[int, msgspec.Meta(ge=1)]
    count: int
    values: list[str | None]
    """In the order of the message's names; None where unknown."""

    @property
    def end(self) -> tuple[int, int]:
        """Numbering and number of the last step."""
        return self.numbering, self.first + (self.count - 1) * self.stride

    def after(self, covered: tuple[int, int]) -> StepRun | None:
        """The part that comes after a numbering and step; None if there is none."""
        if self.end <= covered:
            return None
        numbering, step = covered
        passed = max(0, (step - self.first) // self.stride + 1) if numbering == self.numbering else 0
        return StepRun(
            self.numbering, self.first + passed * self.stride, self.stride, self.count - passed, self.values
        )


class Sum(msgspec.Struct, frozen=True, array_like=True):
    """The sum of an amount over steps, and over how many it is known."""

    steps: int
    value: str


class TimedSteps(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The time of a rank's steps since the start, without warm-up."""

    steps: int = 0
    seconds: float = 0.0
    data_wait_s: float | None = None

    def add(self, steps: int, seconds: float | None, data_wait_s: float | None) -> None:
        """Add a step that stands for `steps`."""
        if seconds is not None:
            self.steps += steps
            self.seconds += seconds
            if data_wait_s is not None:
                self.data_wait_s = (self.data_wait_s or 0.0) + data_wait_s


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank writes for rank 0: its latest row, its last steps, and its sums since the start."""

    row: RankRow
    at_s: float
    """Unix time at which it was made; the row may be some seconds older."""
    names: list[str] = []
    runs: list[StepRun] = []
    steps: int = 0
    """Steps since the start, by `log_step` calls."""
    sums: dict[str, Sum] = {}
    timed: TimedSteps = msgspec.field(default_factory=TimedSteps)
    """Since the start: rank 0 reads only the latest message, and may miss the rows before it."""

    @property
    def step(self) -> int | None:
        """The last step that it tells of."""
        return self.runs[-1].end[1] if self.runs else self.row.step

    def amounts_of(self, run: StepRun) -> dict[str, Exact]:
        """The known amounts of one of its runs."""
        values = zip(self.names, run.values, strict=True)
        return {name: number(value) for name, value in values if value is not None}


@dataclass
class _OwnRun:
    """Steps with equal amounts so far."""

    first: StepKey
    count: int
    amounts: Amounts
    at_s: float

    def continues_with(self, key: StepKey, amounts: Amounts) -> bool:
        numbering, step, stride = self.first
        return key == (numbering, step + self.count * stride, stride) and amounts == self.amounts


class OwnAmounts:
    """The amounts of this rank; added on the row thread, read on any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: deque[_OwnRun] = deque(maxlen=_MOST_RUNS)
        self._sums: dict[str, tuple[int, Exact]] = {}
        self._last_step: int | None = None
        self._numbering = 0
        self.steps = 0

    def add(self, step: int, stride: int, amounts: Amounts) -> StepKey:
        """Add a step that stands for `stride` ones."""
        now_s = self._clock()
        with self._lock:
            if self._last_step is not None and step <= self._last_step:
                self._numbering += 1
            self._last_step = step
            key = StepKey(self._numbering, step, stride)
            run = self._runs[-1] if self._runs else None
            if run is not None and run.continues_with(key, amounts):
                run.count, run.at_s = run.count + 1, now_s
            else:
                self._runs.append(_OwnRun(key, 1, amounts, now_s))
            self.steps += 1
            for name, value in amounts.items():
                steps, total = self._sums.get(name, (0, 0))
                self._sums[name] = steps + 1, total + value
            return key

    def sums(self) -> tuple[int, dict[str, tuple[int, Exact]]]:
        """Steps since the start, and of each amount its sum and over how many steps that is."""
        with self._lock:
            return self.steps, dict(self._sums)

    def message(self, row: RankRow, timed: TimedSteps | None = None) -> Message:
        """The next message."""
        now_s = self._clock()
        with self._lock:
            while len(self._runs) > 1 and self._runs[0].at_s < now_s - _REPEATED_S:
                self._runs.popleft()
            names = list(dict.fromkeys(name for run in self._runs for name in run.amounts))
            return Message(
                row=row,
                at_s=time.time(),
                names=names,
                runs=[_sent(run, names) for run in self._runs],
                steps=self.steps,
                sums={name: Sum(steps, str(total)) for name, (steps, total) in self._sums.items()},
                timed=timed or TimedSteps(),
            )


def number(text: str) -> Exact:
    """A number as a message writes it: "12" or "1/3"."""
    return Fraction(text) if "/" in text else int(text)


def _sent(run: _OwnRun, names: list[str]) -> StepRun:
    amounts = [run.amounts.get(name) for name in names]
    texts = [None if amount is None else str(amount) for amount in amounts]
    return StepRun(run.first.numbering, run.first.step, run.first.stride, run.count, texts)
