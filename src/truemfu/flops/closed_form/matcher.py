"""Matches the parts of a count to terms, exactly: with a constant that fits every calibration, or not at all.

Single terms come first, then short sums; in integers and fractions, with more calibrations than unknowns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from .terms import Sizes, Term, TermData

Fit = tuple[tuple[Fraction, Term], ...]


class Matcher:
    """Finds terms for the parts of a count: single terms first, then sums from the given families."""

    def __init__(
        self, runs: Sequence[Sizes], terms: Iterable[Term], families: Iterable[Sequence[Term]]
    ) -> None:
        self._runs = runs
        self._by_value: dict[tuple[int, ...], Term] = {}
        self._values: dict[TermData, tuple[int, ...]] = {}
        for term in terms:
            values = self._value(term)
            if all(values):
                self._by_value.setdefault(_direction(values), term)
        self._families = list(families)
        self._found: dict[tuple[int, ...], Fit | None] = {}

    def _value(self, term: Term) -> tuple[int, ...]:
        if term.data not in self._values:
            self._values[term.data] = tuple(term.of(run) for run in self._runs)
        return self._values[term.data]

    def match(self, flops: tuple[int, ...]) -> Fit | None:
        """Terms and constants that give these FLOPs in every run, or None."""
        if flops not in self._found:
            self._found[flops] = self._one(flops) or self._several(flops)
        return self._found[flops]

    def _one(self, flops: tuple[int, ...]) -> Fit | None:
        if not any(flops):
            return ()
        if not all(flops):
            return None
        term = self._by_value.get(_direction(flops))
        return None if term is None else ((Fraction(flops[0], self._value(term)[0]), term),)

    def _several(self, flops: tuple[int, ...]) -> Fit | None:
        for family in self._families:
            if len(self._runs) < len(family) + 1:
                continue
            columns = [self._value(term) for term in family]
            solution = _solve(columns, flops)
            if solution is not None:
                return tuple((c, t) for c, t in zip(solution, family, strict=True) if c)
        return None


def _direction(values: tuple[int, ...]) -> tuple[int, ...]:
    """Values up to a common factor: two terms that are multiples of each other have the same direction."""
    divisor = math.gcd(*values)
    return tuple(v // divisor for v in values)


def _solve(columns: Sequence[tuple[int, ...]], target: tuple[int, ...]) -> list[Fraction] | None:
    """Exact constants with Σ constant·column = target in every row, or None if there are none or many."""
    unknowns = len(columns)
    rows = [[Fraction(c[i]) for c in columns] + [Fraction(target[i])] for i in range(len(target))]
    for column in range(unknowns):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [v / scale for v in rows[column]]
        for r in range(len(rows)):
            if r != column and rows[r][column]:
                factor = rows[r][column]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column], strict=True)]
    if any(row[-1] for row in rows[unknowns:]):
        return None
    return [rows[i][-1] for i in range(unknowns)]


def products(outer: Sequence[Term], quantities: Sequence[Term]) -> list[Term]:
    """Every outer term alone, times one quantity, and times two."""
    made = []
    for o in outer:
        made.append(o)
        made.extend(o.times(q) for q in quantities)
        made.extend(o.times(a).times(b) for a, b in itertools.combinations_with_replacement(quantities, 2))
    return made


def polynomial_families(outer: Sequence[Term], quantities: Sequence[Term]) -> list[list[Term]]:
    """Sums such as o·q² + o·q + o, and the same in two quantities."""
    families: list[list[Term]] = []
    for o in outer:
        families.extend([o.times(q), o] for q in quantities)
        families.extend([o.times(q).times(q), o.times(q)] for q in quantities)
        families.extend([o.times(q).times(q), o.times(q), o] for q in quantities)
        families.extend(
            [o.times(a).times(b), o.times(a), o.times(b), o] for a, b in itertools.combinations(quantities, 2)
        )
    return families
