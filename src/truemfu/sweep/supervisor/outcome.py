"""What a sweep reports while it runs, and what it returns at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...records import CaseResult, Phase


@dataclass(frozen=True, kw_only=True)
class CaseState:
    """A running experiment."""

    slot: str
    """Where it runs: gpu0, gpu1, …, or cpu."""
    phase: Phase
    elapsed_s: float
    time_limit_s: float


class SweepListener(Protocol):
    """Receives the events of a sweep; called by one thread at a time."""

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        """All experiments in order, and the results that are reused."""

    def changed(self, name: str, state: CaseState) -> None:
        """Called several times a second for each running experiment."""

    def ended(self, result: CaseResult) -> None:
        """An experiment has its result, which is on disk."""

    def message(self, text: str) -> None:
        """One line of text for the user."""


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """The results and times of a sweep."""

    results: list[CaseResult]
    """In the order of the matrix; without those that an interruption left unfinished."""
    interrupted: bool
    by_ctrl_c: bool = False
    """Whether it was Ctrl-C that interrupted it."""
    on_cluster: int = 0
    """Experiments that are left on a cluster."""
    wall_s: float
    harness_s: float
    """The part of `wall_s` in which no experiment did its own work.

    Own work lasts from the order to phase done, or to the end of a process that did not reach it: imports
    that were not hidden, gradient check, build, steps, count, trace; the same for probes. The rest is the
    start of the supervisor, ending processes, completing results, and gaps between experiments.
    """


def covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """The length of time that at least one of the stretches (begin, end) covers."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(stretches):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
