"""The closed form of one kind of batch: for each part of the work two short sums of terms.

A part is the work of one operator in one module and phase. One sum gives the FLOPs it needs, the other those
it executes. The totals are added up once; the splits by module, operator and dtype are computed on access.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property

from ...convention import Convention
from ..flop_count import FlopCount
from ..splits import LazySplit, with_ancestors
from .matcher import Fit
from .terms import Sizes, Term, TermData

CLOSED_FORM = "closed form"

Part = tuple[str, str, str, str]  # phase, module, operator, dtype


class Form:
    """FLOPs as sums of terms, with the uncounted operators and notes of the counts they were fitted to."""

    def __init__(
        self,
        fits: Mapping[Part, tuple[Fit, Fit]],
        *,
        uncounted: Mapping[str, int],
        notes: tuple[str, ...],
    ) -> None:
        self._fits, self._uncounted, self._notes = fits, uncounted, notes
        self._terms: list[Term] = []
        index: dict[TermData, int] = {}
        totals: dict[str, defaultdict[int, Fraction]] = {
            phase: defaultdict(Fraction) for phase in ("forward", "backward", "recompute")
        }
        dtypes: dict[str, defaultdict[int, Fraction]] = {}
        for (phase, _, _, dtype), (needed, executed) in fits.items():
            if phase != "recompute":
                dtypes.setdefault(dtype, defaultdict(Fraction))
            for fit, is_needed in ((needed, True), (executed, False)):
                for constant, term in fit:
                    if term.data not in index:
                        index[term.data] = len(self._terms)
                        self._terms.append(term)
                    i = index[term.data]
                    if not is_needed:
                        totals["recompute"][i] += constant
                    elif phase != "recompute":
                        totals[phase][i] += constant
                        totals["recompute"][i] -= constant
                        dtypes[dtype][i] += constant
        self._index = index
        self._dtypes = {name: [(i, _whole(c)) for i, c in sums.items() if c] for name, sums in dtypes.items()}
        self._functions = [term.of for term in self._terms]
        self._totals = {
            phase: [(i, _whole(c)) for i, c in sorted(sums.items()) if c] for phase, sums in totals.items()
        }

    def count(self, sizes: Sizes, convention: Convention) -> FlopCount:
        """The count for a batch of these sizes."""
        values = [of(sizes) for of in self._functions]
        totals = self._totals
        splits = _Splits(self, values)
        return FlopCount(
            forward=int(sum([c * values[i] for i, c in totals["forward"]])),
            backward=int(sum([c * values[i] for i, c in totals["backward"]])),
            recompute=int(sum([c * values[i] for i, c in totals["recompute"]])),
            by_module=LazySplit(splits, "by_module"),
            by_operator=LazySplit(splits, "by_operator"),
            by_dtype=LazySplit(splits, "by_dtype"),
            uncounted=self._uncounted,
            method=CLOSED_FORM,
            convention=convention,
            notes=self._notes,
        )

    def with_note(self, note: str) -> Form:
        """The same form with one more note."""
        return Form(self._fits, uncounted=self._uncounted, notes=(*self._notes, note))

    def is_same(self, other: Form) -> bool:
        """Whether another form has the same sums, uncounted operators and notes."""
        ours, theirs = ((f._fits, f._uncounted, f._notes) for f in (self, other))
        return ours == theirs

    def by_dtype(self, values: list[int]) -> dict[str, int]:
        """The model's FLOPs by dtype, from sums prepared in advance: every step's peak needs them."""
        return {name: int(sum([c * values[i] for i, c in sums])) for name, sums in self._dtypes.items()}

    def split(self, values: list[int]) -> Iterator[tuple[Part, int]]:
        """Each part of the model's FLOPs."""
        for part, (needed, _) in self._fits.items():
            if part[0] != "recompute":
                yield part, int(sum(c * values[self._index[t.data]] for c, t in needed))

    def written(self) -> dict[str, str]:
        """The sums as text."""
        return {
            phase: " + ".join(f"{c}·{self._terms[i].name}" for i, c in sums) or "0"
            for phase, sums in self._totals.items()
        }


class _Splits:
    """The splits of a count, computed on first access."""

    def __init__(self, form: Form, values: list[int]) -> None:
        self._form, self._values = form, values

    def _summed(self, field: int) -> dict[str, int]:
        sums: defaultdict[str, int] = defaultdict(int)
        for part, flops in self._form.split(self._values):
            sums[part[field]] += flops
        return dict(sums)

    @cached_property
    def by_module(self) -> dict[str, int]:
        return with_ancestors(self._summed(1))

    @cached_property
    def by_operator(self) -> dict[str, int]:
        return self._summed(2)

    @cached_property
    def by_dtype(self) -> dict[str, int]:
        return self._form.by_dtype(self._values)


def _whole(constant: Fraction) -> int | Fraction:
    return constant.numerator if constant.denominator == 1 else constant
