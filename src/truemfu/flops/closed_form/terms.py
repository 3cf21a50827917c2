"""The vocabulary of closed forms: functions of a batch's sizes whose weighted sums are FLOPs.

A dense layer is a constant times samples × length, attention a constant times samples × length², a
convolution a constant times samples × height × width after its strides. Each such function is a `Term`.

A term's data tell it from others; names may be equal, as those of poolings that round up or down are:

    ("size", "length")                                  one of the batch's sizes
    ("chunks", "length", 64)                            how many chunks of 64 a size fills
    ("pairs", "length", behind, ahead)                  pairs of a sequence under a band
    ("document pairs", behind, ahead), ("documents",)   of packed documents
    ("patches",), ("window pairs", 8) …                 of image grids
    ("conv", kernel, stride, …, source)                 a size after a convolution or pooling
    ("product", term, term, …), ("one",)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import reduce
from typing import Any

from ..attention.pairs import Band
from ..operators.conv_sizes import SizeStep

Sizes = Mapping[str, Any]
"""The sizes of a batch by name, and the lists "documents" and "grids" if it has them."""

TermData = tuple[Any, ...]
"""What a term is: its type and its arguments."""


@dataclass(frozen=True)
class Term:
    """A named function of a batch's sizes. Two terms are the same if their data are."""

    data: TermData
    name: str = field(compare=False)
    of: Callable[[Sizes], int] = field(compare=False, repr=False)

    def times(self, other: Term) -> Term:
        """The product of two terms."""
        if self == ONE:
            return other
        if other == ONE:
            return self
        f, g = self.of, other.of
        return Term(
            ("product", *self._factors, *other._factors),
            f"{self.name}·{other.name}",
            lambda s: f(s) * g(s),
        )

    @property
    def _factors(self) -> TermData:
        return self.data[1:] if self.data[0] == "product" else (self.data,)


ONE = Term(("one",), "1", lambda s: 1)


def size(name: str) -> Term:
    """One of the batch's sizes."""
    return Term(("size", name), name, lambda s: s[name])


def chunks(name: str, chunk: int) -> Term:
    """How many chunks of this many positions a size fills, the last one padded."""
    return Term(("chunks", name, chunk), f"⌈{name}/{chunk}⌉", lambda s: -(-s[name] // chunk))


def band_pairs(name: str, band: Band) -> Term:
    """Pairs of one sequence under a band."""
    return Term(
        ("pairs", name, band.behind, band.ahead),
        f"pairs[{band.behind},{band.ahead}]({name})",
        lambda s: band.pairs(s[name]),
    )


def document_pairs(band: Band) -> Term:
    """Pairs of all packed documents under a band."""
    return Term(
        ("document pairs", band.behind, band.ahead),
        f"Σ pairs[{band.behind},{band.ahead}](document)",
        lambda s: sum(band.pairs(n) for row in s["documents"] for n in row),
    )


def documents() -> Term:
    """How many documents are packed in the batch."""
    return Term(("documents",), "documents", lambda s: sum(len(row) for row in s["documents"]))


_OF_GRIDS = (
    Term(("patches",), "Σ t·h·w", lambda s: sum(t * h * w for t, h, w in s["grids"])),
    Term(("frame pairs",), "Σ t·(h·w)²", lambda s: sum(t * (h * w) ** 2 for t, h, w in s["grids"])),
    Term(("video pairs",), "Σ (t·h·w)²", lambda s: sum((t * h * w) ** 2 for t, h, w in s["grids"])),
    Term(("grids",), "grids", lambda s: len(s["grids"])),
    Term(("grid frames",), "Σ t", lambda s: sum(t for t, _, _ in s["grids"])),
)


def _squares_of_parts(n: int, window: int) -> int:
    """Σ p² over the parts of n cut into windows."""
    return n // window * window * window + (n % window) ** 2


def window_pairs(window: int) -> Term:
    """Pairs of all frames cut into square windows."""
    return Term(
        ("window pairs", window),
        f"Σ t·pairs in {window}×{window} windows",
        lambda s: sum(
            t * _squares_of_parts(h, window) * _squares_of_parts(w, window) for t, h, w in s["grids"]
        ),
    )


def grid_terms(windows: Iterable[int]) -> list[Term]:
    """Functions of image grids: patches, frames' pairs, videos' pairs, windows' pairs."""
    return [*_OF_GRIDS, *map(window_pairs, sorted(set(windows)))]


def after_step(step: SizeStep, source: Term) -> Term:
    """The output size of a convolution or pooling with this input size."""
    of = source.of
    return Term(
        ("conv", *astuple(step), source.data),
        f"conv(k{step.kernel} s{step.stride} p{step.padding})({source.name})",
        lambda s: step(of(s)),
    )


def size_chains(
    names: Sequence[str],
    runs: Sequence[Sizes],
    calls: Sequence[Sequence[Sequence[tuple[int, int, SizeStep]]]],
) -> tuple[list[Term], list[Term]]:
    """The sizes and areas that convolutions and poolings produce from these sizes, as terms.

    `calls` are the recorded calls of each run, in order. If a step's input is a known size in every run, so
    is its output; the sizes of one call multiply to its area.
    """
    known: dict[tuple[int, ...], Term] = {}
    areas: dict[TermData, Term] = {}
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
                known[after] = after_step(step, source)
            sources.append(source)
            results.append(known.get(after))
        for side in (results, sources):
            factors = [term for term in side if term is not None]
            if len(side) > 1 and len(factors) == len(side):
                area = reduce(Term.times, factors)
                areas[area.data] = area
    return list(known.values()), list(areas.values())
