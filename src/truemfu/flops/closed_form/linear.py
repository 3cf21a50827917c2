"""Linear equations in integers, solved exactly, with more equations than unknowns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import gcd, lcm


class Linear:
    """Exact linear functions of a row of integers, as far as the equations determine them."""

    def __init__(self, width: int, echelon: list[tuple[int, list[int]]], used: set[int]) -> None:
        pivots = [pivot for pivot, _ in echelon]
        self._divisor = lcm(*(line[pivot] for pivot, line in echelon))
        scaled = [[value * (self._divisor // line[pivot]) for value in line] for pivot, line in echelon]
        columns = [list(zip(pivots, column, strict=True)) for column in zip(*scaled, strict=True)]
        self._outputs = columns[width:]
        # A row that is no combination of the equations' rows has no determined value: its other columns must
        # follow from those of the pivots as they do in the equations.
        self._others = [(at, columns[at]) for at in range(width) if at not in pivots]
        self.rank = len(echelon)
        self.used = used
        """Which of the equations determine the functions; the others only confirm them."""

    def integers(self, row: Sequence[int]) -> list[int] | None:
        """The functions' values at a row; None where they are undetermined or no integers."""
        for column, weights in self._others:
            if row[column] * self._divisor != sum([row[at] * weight for at, weight in weights]):
                return None
        results = []
        for weights in self._outputs:
            value, rest = divmod(sum([row[at] * weight for at, weight in weights]), self._divisor)
            if rest:
                return None
            results.append(value)
        return results

    def factors(self, output: int) -> list[tuple[int, Fraction]]:
        """The columns of a row that a function adds up, with their factors."""
        return [(at, Fraction(weight, self._divisor)) for at, weight in self._outputs[output]]


def solve(width: int, equations: Iterable[tuple[list[int], Sequence[int]]]) -> Linear | None:
    """The linear functions that take each row of so many integers to its targets; None if there are none.

    Elimination without fractions, row by row: it ends at the first equation that contradicts those before it.
    """
    echelon: list[tuple[int, list[int]]] = []
    used: set[int] = set()
    for number, (row, target) in enumerate(equations):
        line = [*row, *target]
        for pivot, base in echelon:
            line = _eliminated(line, base, pivot)
        pivot = next((column for column in range(width) if line[column]), width)
        if pivot < width:
            divisor = gcd(*line)
            used.add(number)
            echelon.append((pivot, [value // divisor for value in line]))
        elif any(line[width:]):
            return None
    for index in range(len(echelon) - 1, 0, -1):
        pivot, base = echelon[index]
        for above in range(index):
            at, line = echelon[above]
            echelon[above] = (at, _eliminated(line, base, pivot))
    return Linear(width, echelon, used)


def _eliminated(line: list[int], base: list[int], pivot: int) -> list[int]:
    if not line[pivot]:
        return line
    scale, weight = base[pivot], line[pivot]
    return [value * scale - other * weight for value, other in zip(line, base, strict=True)]
