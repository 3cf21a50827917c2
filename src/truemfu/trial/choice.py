"""Which remedies go together, and which are recommended: only what was shown to gain."""

from __future__ import annotations

from collections.abc import Sequence

from ..remedies.table import BY_NAME
from .record import GAINS, TrialCase


def best_of_each(cases: Sequence[TrialCase]) -> list[str]:
    """The remedies that gain; of those that exclude each other the better one."""
    best: dict[str, TrialCase] = {}
    for case in cases:
        if case.verdict != GAINS:
            continue
        key = BY_NAME[case.name].one_of or case.name
        if key not in best or (case.gain or 0) > (best[key].gain or 0):
            best[key] = case
    return [case.name for case in best.values()]


def recommended_of(cases: Sequence[TrialCase], together: TrialCase | None) -> list[str]:
    """All that gained, if together they gain most; else the best one alone."""
    gaining = [case for case in cases if case.verdict == GAINS]
    if not gaining:
        return []
    best = max(gaining, key=lambda case: case.gain or 0)
    if together is None or together.verdict != GAINS or (together.gain or 0) < (best.gain or 0):
        return [best.name]
    return together.remedies


def why_not_together(cases: Sequence[TrialCase]) -> str:
    gaining = len(best_of_each(cases))
    return (
        "nothing gained" if not gaining else "only one remedy gained" if gaining == 1 else "the trial ended"
    )
