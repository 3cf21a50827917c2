"""What a sweep tells while it runs, and what it hands back when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...records import CaseResult, Phase


@dataclass(frozen=True, kw_only=True)
class CaseState:
    """An experiment in progress."""

    slot: str
    """Where it runs: gpu0, gpu1, …, or cpu."""
    phase: Phase
    elapsed_s: float
    time_limit_s: float


class Listener(Protocol):
    """Who wants to know how a sweep goes; called by one thread at a time."""

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        """All experiments in order, and the results that are there already."""

    def changed(self, name: str, state: CaseState) -> None:
        """Several times a second for each experiment in progress."""

    def ended(self, result: CaseResult) -> None:
        """An experiment has its result, which is on disk."""

    def said(self, text: str) -> None:
        """One line for people."""


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """What became of a sweep."""

    results: list[CaseResult]
    """In the order of the matrix; without those that an interruption left undone."""
    interrupted: bool
    wall_s: float
    harness_s: float
    """The part of `wall_s` in which no experiment did its own work.

    Own work is from the order to phase done, or to the end of a process that never came there: imports that
    were not hidden, gate, build, steps, count, trace; and the same of probes. What remains is the start of
    the supervisor, ending processes, completing results, and gaps between experiments.
    """


def covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """The length of time that at least one of the stretches (begin, end) covers."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(stretches):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
