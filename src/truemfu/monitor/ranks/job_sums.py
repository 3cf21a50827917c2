"""The amounts of all other ranks in each step, added up exactly.

The runs of equal steps that a rank has reported are kept until rank 0 has passed them. A sum is computed once
and holds up to the first step at which a run of some rank ends. Steps are asked for in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .amounts import Exact, Message, StepKey, StepRun

_NOTHING = -1, 0
_MOST_RUNS = 5_000
"""Of one rank, where rank 0 does not ask for its steps."""


@dataclass(frozen=True, eq=False)
class JobStep:
    """The sums of one step over all ranks; an amount that one rank does not know is missing."""

    sums: Mapping[str, Exact]


class _Reported(NamedTuple):
    run: StepRun
    amounts: dict[str, Exact]


class JobSums:
    """Not safe for several threads at a time."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._reported: defaultdict[int, deque[_Reported]] = defaultdict(lambda: deque(maxlen=_MOST_RUNS))
        self._covered: dict[int, tuple[int, int]] = {}
        self._step: JobStep | None = None
        self._holds_for: StepRun | None = None
        """The steps of which `_step` has the sums."""

    def take(self, message: Message) -> None:
        """Add the steps of a message that earlier ones of the rank did not have."""
        rank = message.row.rank
        runs = self._reported[rank]
        for run in message.runs:
            if run.end <= self.covered(rank):
                continue
            if runs and (runs[-1].run.numbering, runs[-1].run.first) == (run.numbering, run.first):
                runs.pop()  # it has become longer
            runs.append(_Reported(run, message.amounts_of(run)))
            self._covered[rank] = run.end

    def covered(self, rank: int) -> tuple[int, int]:
        """Numbering and step up to which a rank has reported."""
        return self._covered.get(rank, _NOTHING)

    def of(self, key: StepKey) -> JobStep | None:
        """The sums of a step over the other ranks; None if one of them has not reported this very step."""
        if self._holds_for is None or not self._holds_for.has(key):
            self._holds_for = self._add_up(key)
        return None if self._holds_for is None else self._step

    def _add_up(self, key: StepKey) -> StepRun | None:
        """Compute the sums at a step; returns the steps for which they hold."""
        found = []
        for runs in self._reported.values():
            while runs and runs[0].run.end < key[:2]:
                runs.popleft()
            if runs and runs[0].run.has(key):
                found.append(runs[0])
        if len(found) < self._others:
            return None
        amounts = [reported.amounts for reported in found]
        names = [name for name in amounts[0] if all(name in of_rank for of_rank in amounts)]
        sums = {name: sum(of_rank[name] for of_rank in amounts) for name in names}
        if self._step is None or self._step.sums != sums:  # else rows with equal sums share one object
            self._step = JobStep(sums)
        _, last = min(reported.run.end for reported in found)
        count = (last - key.step) // key.stride + 1
        return StepRun(key.numbering, key.step, key.stride, count, [])
