"""How the FLOPs of a step depend on the sizes of its inputs, fitted exactly from observed steps.

    observed steps ─► sizes that vary ─► sets of monomials, smallest first ─► exact solution ─► other sizes
                       (`sizes.py`)              (`terms.py`)                  (`linear.py`)

FLOPs are a polynomial of the sizes as long as nothing is rounded or limited: a strided convolution rounds, a
sliding window is a limit. So a form is accepted only if it reproduces every observed step exactly and some of
them were not needed to determine it, and it answers only where rounding and limits would have shown: between
the observed minimum and maximum of every size, on the grid that the observed values share (multiples of 64,
say), and where sizes depend on each other as they did. Everything else is left to the next observation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from .linear import Linear, solve
from .sizes import Varying
from .terms import Terms, candidates, values

_MOST_OBSERVATIONS = 64
_MOST_CANDIDATES = 400
_FEWEST, _FEWEST_AT_MOST = 4, 12
"""Observed steps with different sizes that a form needs: at first, and after many wrong ones."""


class MicroBatch(NamedTuple):
    """One forward pass of a step: what kind of inputs the model got, and their sizes by name."""

    kind: Hashable
    sizes: tuple[tuple[str, int], ...]


_Kind = tuple[Hashable, tuple[str, ...]]
_Step = tuple[tuple[_Kind, tuple[tuple[int, ...], ...]], ...]
"""A step as a key: for each kind the sizes of its micro-batches, in ascending order."""
_Integers = Mapping[str, int]


class ObservedForm:
    """The integers of observed steps, and those of further steps that follow from them."""

    def __init__(self) -> None:
        self._observed: dict[_Step, dict[str, int]] = {}
        self._fits: dict[tuple[_Kind, ...], _Fit] = {}
        self._fewest = _FEWEST

    def add(self, batches: Sequence[MicroBatch], integers: _Integers) -> bool:
        """Add an observed step. False if it contradicts what was known, which is then forgotten.

        Either the work of a step has changed, or the form was wrong. In case of the latter the next form
        needs more observations.
        """
        key = _key(batches)
        known = self._answer(key)
        agrees = known is None or _equal(known, integers)
        if not agrees:
            self._observed.clear()
            self._fits.clear()
            self._fewest = min(self._fewest + 2, _FEWEST_AT_MOST)
        is_full = len(self._observed) >= _MOST_OBSERVATIONS
        if known is not None and agrees and (is_full or key in self._observed):
            return True  # a check passed, and nothing new to remember
        if is_full:
            oldest = next(iter(self._observed))
            del self._observed[oldest]
            self._fit(_kinds(oldest))
        self._observed[key] = dict(integers)
        if known is None or not agrees:
            self._fit(_kinds(key))
        return agrees

    def predict(self, batches: Sequence[MicroBatch]) -> dict[str, int] | None:
        """The integers of a step with these micro-batches; None if the observed steps do not tell."""
        return self._answer(_key(batches))

    @property
    def is_fitted(self) -> bool:
        """Whether there is a form, for whatever sizes."""
        return bool(self._fits)

    def written(self, names: Sequence[str]) -> dict[str, str]:
        """The form of these integers as text; empty if there is none."""
        fit = next(iter(self._fits.values()), None)
        return {} if fit is None else {name: fit.written(name) for name in names}

    def _answer(self, key: _Step) -> dict[str, int] | None:
        known = self._observed.get(key)
        if known is not None:
            return dict(known)
        fit = self._fits.get(_kinds(key))
        return None if fit is None else fit.answer(key)

    def _fit(self, kinds: tuple[_Kind, ...]) -> None:
        steps = {key: integers for key, integers in self._observed.items() if _kinds(key) == kinds}
        self._fits.pop(kinds, None)
        fit = _fitted(steps, self._fewest) if steps else None
        if fit is not None:
            self._fits[kinds] = fit


class _Fit:
    """A form of the steps whose micro-batches are of certain kinds."""

    def __init__(
        self, varying: list[Varying], terms: Sequence[Terms], outputs: dict[str, int], solution: Linear
    ) -> None:
        self._varying, self._terms, self._outputs, self._solution = varying, terms, outputs, solution
        # A size without an effect so far may have one where other sizes are large too.
        self._ignores_a_size = [
            {at for term in chosen for at in term} != set(range(len(each.basis)))
            for each, chosen in zip(varying, terms, strict=True)
        ]

    def answer(self, key: _Step) -> dict[str, int] | None:
        """The integers of a step; None if the form does not speak for its sizes."""
        for varying, ignores, (_, points) in zip(self._varying, self._ignores_a_size, key, strict=True):
            if not varying.covers(points):
                return None
            if ignores and not all(varying.is_below_an_observed(point) for point in points):
                return None
        amounts = self._solution.integers(_row(key, self._varying, self._terms))
        if amounts is None or any(amount < 0 for amount in amounts):
            return None
        return {name: amounts[at] for name, at in self._outputs.items()}

    def written(self, name: str) -> str:
        """One of the integers as a sum of products of sizes."""
        products = [
            "·".join(each.names[each.basis[at]] for at in term) or "1"
            for each, chosen in zip(self._varying, self._terms, strict=True)
            for term in chosen
        ]
        factors = self._solution.factors(self._outputs[name])
        return " + ".join(f"{factor}·{products[at]}" for at, factor in factors if factor) or "0"


def _fitted(steps: Mapping[_Step, _Integers], fewest: int) -> _Fit | None:
    names = sorted({name for integers in steps.values() for name in integers})
    columns = {name: tuple(integers.get(name, 0) for integers in steps.values()) for name in names}
    distinct = {column: at for at, column in enumerate(dict.fromkeys(columns.values()))}
    outputs = {name: distinct[column] for name, column in columns.items()}
    targets = [tuple(column[at] for column in distinct) for at in range(len(steps))]  # () without any work
    kinds = _kinds(next(iter(steps)))
    varying = [Varying(kind[1], [key[index][1] for key in steps]) for index, kind in enumerate(kinds)]
    of_a_kind = int(_MOST_CANDIDATES ** (1 / len(varying)))
    combined = product(*(candidates(len(each.basis))[:of_a_kind] for each in varying))
    for terms in sorted(combined, key=lambda sets: sum(map(len, sets))):
        width = sum(map(len, terms))
        if len(steps) < max(fewest, 2 * width):
            return None
        rows = (_row(key, varying, terms) for key in steps)
        solution = solve(width, zip(rows, targets, strict=True))
        if solution is None:
            continue
        if _is_confirmed(solution, [_row(key, varying, terms) for key in steps], fewest):
            return _Fit(varying, terms, outputs, solution)
    return None


def _is_confirmed(solution: Linear, rows: Sequence[Sequence[int]], fewest: int) -> bool:
    """Whether the observations that did not determine a solution would determine the same one.

    Then none of its coefficients rests on a single observation, as it does where one step alone was large.
    """
    others = {tuple(row): () for number, row in enumerate(rows) if number not in solution.used}
    different = len(others.keys() | {tuple(rows[number]) for number in solution.used})
    again = solve(len(rows[0]), ((list(row), nothing) for row, nothing in others.items()))
    return different >= fewest and again is not None and again.rank == solution.rank


def _row(key: _Step, varying: Sequence[Varying], terms: Sequence[Terms]) -> list[int]:
    row: list[int] = []
    for each, chosen, (_, points) in zip(varying, terms, key, strict=True):
        sums = [0] * len(chosen)
        for point in points:
            for index, value in enumerate(values(chosen, [point[at] for at in each.basis])):
                sums[index] += value
        row += sums
    return row


def _key(batches: Sequence[MicroBatch]) -> _Step:
    by_kind: dict[_Kind, list[tuple[int, ...]]] = {}
    for kind, sizes in batches:
        names, point = zip(*sizes, strict=True) if sizes else ((), ())
        by_kind.setdefault((kind, names), []).append(point)
    if len(by_kind) == 1:
        return tuple((kind, tuple(sorted(points))) for kind, points in by_kind.items())
    ordered = sorted(by_kind, key=repr)
    return tuple((kind, tuple(sorted(by_kind[kind]))) for kind in ordered)


def _kinds(key: _Step) -> tuple[_Kind, ...]:
    return tuple([kind for kind, _ in key])


def _equal(first: _Integers, second: _Integers) -> bool:
    return all(first.get(name, 0) == second.get(name, 0) for name in {*first, *second})
