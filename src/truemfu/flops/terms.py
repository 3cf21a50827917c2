"""The vocabulary of closed forms: functions of a batch's sizes that FLOPs are sums of.

A dense layer is a constant times samples × length, attention a constant times samples × length², a
convolution a constant times samples × height × width after so many strides. Each such function is a `Term`.
A count's parts are matched against terms, exactly: a constant that fits every calibration, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .pairs import Band
from .sizes import SizeStep

Sizes = Mapping[str, Any]
"""What is known of a batch: sizes by name, and the lists "documents" and "grids" where it has them."""


@dataclass(frozen=True)
class Term:
    """A named function of a batch's sizes."""

    name: str
    of: Callable[[Sizes], int]

    def times(self, other: Term) -> Term:
        """The product of two terms."""
        if self.name == "1":
            return other
        if other.name == "1":
            return self
        f, g = self.of, other.of
        return Term(f"{self.name}·{other.name}", lambda s: f(s) * g(s))


ONE = Term("1", lambda s: 1)


def size(name: str) -> Term:
    """One of the batch's sizes."""
    return Term(name, lambda s: s[name])


def chunks(name: str, chunk: int) -> Term:
    """How many chunks of this many positions a size fills, the last one padded."""
    return Term(f"⌈{name}/{chunk}⌉", lambda s: -(-s[name] // chunk))


def band_pairs(name: str, band: Band) -> Term:
    """Pairs of one sequence under a band."""
    return Term(f"pairs[{band.behind},{band.ahead}]({name})", lambda s: band.pairs(s[name]))


def document_pairs(band: Band) -> Term:
    """Pairs of all packed documents under a band."""
    return Term(
        f"Σ pairs[{band.behind},{band.ahead}](document)",
        lambda s: sum(band.pairs(n) for row in s["documents"] for n in row),
    )


def documents() -> Term:
    """How many documents are packed in the batch."""
    return Term("documents", lambda s: sum(len(row) for row in s["documents"]))


def _squares_of_parts(n: int, window: int) -> int:
    """Σ p² over the parts of n cut into windows."""
    return n // window * window * window + (n % window) ** 2


def grid_terms(windows: Iterable[int]) -> list[Term]:
    """Functions of image grids: patches, frames' pairs, videos' pairs, windows' pairs."""
    terms = [
        Term("Σ t·h·w", lambda s: sum(t * h * w for t, h, w in s["grids"])),
        Term("Σ t·(h·w)²", lambda s: sum(t * (h * w) ** 2 for t, h, w in s["grids"])),
        Term("Σ (t·h·w)²", lambda s: sum((t * h * w) ** 2 for t, h, w in s["grids"])),
        Term("grids", lambda s: len(s["grids"])),
        Term("frames", lambda s: sum(t for t, _, _ in s["grids"])),
    ]
    for window in sorted(set(windows)):
        terms.append(
            Term(
                f"Σ t·pairs in {window}×{window} windows",
                lambda s, k=window: sum(  # type: ignore[misc]
                    t * _squares_of_parts(h, k) * _squares_of_parts(w, k) for t, h, w in s["grids"]
                ),
            )
        )
    return terms


def size_chains(
    names: Sequence[str],
    runs: Sequence[Sizes],
    calls: Sequence[Sequence[Sequence[tuple[int, int, SizeStep]]]],
) -> tuple[list[Term], list[Term]]:
    """The sizes, and the areas, that convolutions and poolings make of these sizes, as terms.

    `calls` are the recorded calls of each run, in order. A step whose input is a known size in every run
    makes its output a known size too; the sizes of one call multiply to its area.
    """
    known: dict[tuple[int, ...], Term] = {}
    areas: dict[str, Term] = {}
    for name in names:
        known.setdefault(tuple(run[name] for run in runs), size(name))
    if len({len(run) for run in calls}) != 1:
        return [], []
    for aligned in zip(*calls, strict=True):
        sources, results = [], []
        for steps in zip(*aligned, strict=True):
            step = steps[0][2]
            before, after = tuple(n for n, _, _ in steps), tuple(n for _, n, _ in steps)
            source = known.get(before)
            if source is not None and after not in known and all(s == step for _, _, s in steps):
                known[after] = Term(
                    f"conv(k{step.kernel} s{step.stride} p{step.padding})({source.name})",
                    lambda s, f=source.of, step=step: step(f(s)),  # type: ignore[misc]
                )
            sources.append(source)
            results.append(known.get(after))
        for side in (results, sources):
            if len(side) > 1 and all(t is not None for t in side):
                area = ONE
                for t in side:
                    area = area.times(t)  # type: ignore[arg-type]
                areas[area.name] = area
    return list(known.values()), list(areas.values())


Fit = tuple[tuple[Fraction, Term], ...]


class Matcher:
    """Finds terms for the parts of a count: first one term alone, then sums from the given families."""

    def __init__(
        self, runs: Sequence[Sizes], terms: Iterable[Term], families: Iterable[Sequence[Term]]
    ) -> None:
        self._runs = runs
        self._by_value: dict[tuple[int, ...], Term] = {}
        self._values: dict[str, tuple[int, ...]] = {}
        for term in terms:
            values = self._value(term)
            if all(values):
                self._by_value.setdefault(_direction(values), term)
        self._families = list(families)
        self._found: dict[tuple[int, ...], Fit | None] = {}

    def _value(self, term: Term) -> tuple[int, ...]:
        if term.name not in self._values:
            self._values[term.name] = tuple(term.of(run) for run in self._runs)
        return self._values[term.name]

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
    import math

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
