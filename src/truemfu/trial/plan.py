"""What a trial will measure, in which order, and how long that takes.

evidence ─► the remedies that apply ─► turns: unchanged, A, B, unchanged, C, D, unchanged; then backwards
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..remedies.facts import UNCHANGED, Evidence
from ..remedies.table import REMEDIES, Judgement, Remedy
from ..text import counted
from .record import NOT_APPLICABLE, NOT_FROM_OUTSIDE, NOT_MEASURED

FEWEST_ROUNDS = 2
"""One run of a remedy cannot show how much runs differ."""
_BETWEEN_UNCHANGED = 2
"""Remedies from one unchanged run to the next: each has one beside it."""
_COMPILE_FACTOR = 2.0
"""How much longer a process that compiles takes, for a plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The remedies to measure, by name with their options, and the others with their reasons."""

    options: dict[str, str]
    reasons: dict[str, str]
    """Why each of them is tried."""
    others: dict[str, tuple[str, str]]
    """Verdict and reason of those that are not measured."""
    rounds: int
    notes: list[str]

    def process_count(self) -> int:
        """How many processes follow the first unchanged one, those of the combination included."""
        return sum(1 for turn in range(self.rounds) for _ in turns(list(self.options), turn)) + (
            2 * self.rounds if len(self.options) > 1 else 0
        )

    def seconds(self, process_s: float) -> float:
        """About how long they take."""
        compiling = sum(_compiles(name) for name in self.options) * self.rounds
        return process_s * (self.process_count() + (_COMPILE_FACTOR - 1) * compiling)


def _compiles(name: str) -> bool:
    return any(remedy.name == name and remedy.one_of == "compile" for remedy in REMEDIES)


def turns(names: Sequence[str], turn: int) -> Iterator[str]:
    """The processes of a round after an unchanged one; every second round backwards, against slow changes."""
    ordered = list(names) if turn % 2 == 0 else list(reversed(names))
    for start in range(0, len(ordered), _BETWEEN_UNCHANGED):
        yield from ordered[start : start + _BETWEEN_UNCHANGED]
        yield UNCHANGED


def make_plan(
    evidence: Evidence, *, only: Collection[str], rounds: int, process_s: float, time_left_s: float | None
) -> Plan:
    """All that applies and was asked for, or as much of it as there is time for."""
    judged: list[tuple[Remedy, Judgement]] = [(remedy, remedy.judge(evidence)) for remedy in REMEDIES]
    others: dict[str, tuple[str, str]] = {}
    chosen: dict[str, Judgement] = {}
    for remedy, judgement in judged:
        if not judgement.applies:
            others[remedy.name] = NOT_APPLICABLE, judgement.reason
        elif not remedy.from_outside:
            others[remedy.name] = NOT_FROM_OUTSIDE, judgement.reason
        elif only and remedy.name not in only:
            others[remedy.name] = NOT_MEASURED, "not among --only"
        else:
            chosen[remedy.name] = judgement
    plan = _plan_of(chosen, others, rounds, [])
    if time_left_s is None or plan.seconds(process_s) <= time_left_s:
        return plan
    left_out: list[str] = []
    for fewer in range(rounds - 1, FEWEST_ROUNDS - 1, -1):
        plan = _plan_of(chosen, others, fewer, [])
        if plan.seconds(process_s) <= time_left_s:
            break
    while plan.seconds(process_s) > time_left_s and len(chosen) > 1:
        name = list(chosen)[-1]
        del chosen[name]
        left_out.append(name)
        others[name] = NOT_MEASURED, "--time is too short"
        plan = _plan_of(chosen, others, plan.rounds, [])
    notes = ["--time is too short for all:"]
    notes.append(
        f"{plan.rounds} of {rounds} rounds" if plan.rounds < rounds else counted(plan.rounds, "round")
    )
    if left_out:
        notes.append(f"without {', '.join(reversed(left_out))}")
    return _plan_of(chosen, others, plan.rounds, [f"{notes[0]} {', '.join(notes[1:])}"])


def _plan_of(
    chosen: dict[str, Judgement], others: dict[str, tuple[str, str]], rounds: int, notes: list[str]
) -> Plan:
    return Plan(
        options={name: judgement.option for name, judgement in chosen.items()},
        reasons={name: judgement.reason for name, judgement in chosen.items()},
        others=dict(others),
        rounds=rounds,
        notes=notes,
    )
