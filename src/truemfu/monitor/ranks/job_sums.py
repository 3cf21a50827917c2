"""The amounts of all other ranks in each step, added up exactly as their messages arrive.

A run of equal steps adds its amounts at its first step and takes them away after its last. The sums of a step
are those of all changes up to it: cost and memory depend on the number of runs, not on the number of steps,
and messages are not kept. Steps are asked for in order.
"""

from __future__ import annotations

from .amounts import Amounts, Exact, Message, StepKey, StepRun

_RANKS = ""
"""The name under which ranks themselves are counted."""
_NOTHING = -1, 0
_Change = dict[str, tuple[int, Exact]]
"""By amount: how many ranks more know it, and by how much its sum grows."""


class JobSums:
    """Not safe for several threads at a time."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._series: dict[tuple[int, int, int], _Series] = {}
        """By numbering, stride and phase: ranks whose steps fall on different numbers are not added up."""
        self._covered: dict[int, tuple[int, int]] = {}

    def take(self, message: Message) -> None:
        """Add the steps of a message that earlier ones of the rank did not have."""
        rank = message.row.rank
        for run in message.runs:
            new = run.after(self.covered(rank))
            if new is not None:
                self._covered[rank] = new.end
                place = new.numbering, new.stride, new.first % new.stride
                self._series.setdefault(place, _Series()).add(new, message.amounts_of(run))

    def covered(self, rank: int) -> tuple[int, int]:
        """Numbering and step up to which a rank has reported."""
        return self._covered.get(rank, _NOTHING)

    def of(self, key: StepKey) -> Amounts | None:
        """The sums of a step over the other ranks; None if one of them has not reported this very step.

        An amount that one rank does not know is missing.
        """
        for place, series in list(self._series.items()):
            if place[0] == key.numbering:
                series.advance(key.step)
            if place[0] < key.numbering or series.is_over:
                del self._series[place]
        found = self._series.get((key.numbering, key.stride, key.step % key.stride))
        return None if found is None else found.sums(self._others)


class _Series:
    """The changes of the sums along steps of one stride."""

    def __init__(self) -> None:
        self._changes: dict[int, _Change] = {}
        """By step: what begins and ends there, until it is passed."""
        self._running: _Change = {_RANKS: (0, 0)}

    def add(self, run: StepRun, amounts: Amounts) -> None:
        begins: _Change = {_RANKS: (1, 0)} | {name: (1, value) for name, value in amounts.items()}
        ends = {name: (-count, -value) for name, (count, value) in begins.items()}
        _add(self._changes.setdefault(run.first, {}), begins)
        _add(self._changes.setdefault(run.end[1] + run.stride, {}), ends)

    def advance(self, step: int) -> None:
        """Apply the changes up to a step."""
        for at in [at for at in self._changes if at <= step]:
            _add(self._running, self._changes.pop(at))

    @property
    def is_over(self) -> bool:
        """Whether all runs have ended."""
        return not self._changes

    def sums(self, others: int) -> Amounts | None:
        """At the current step."""
        if self._running[_RANKS][0] != others:
            return None
        return {name: value for name, (count, value) in self._running.items() if name and count == others}


def _add(to: _Change, change: _Change) -> None:
    for name, (count, value) in change.items():
        has_count, has_value = to.get(name, (0, 0))
        to[name] = has_count + count, has_value + value
