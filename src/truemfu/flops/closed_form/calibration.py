"""A few counts at other sizes, and the terms that fit them all.

example ──► counts at small sizes without common factors, one long ──► terms for every part ──► Form
                                                                          └─ none fit, or not the example's
                                                                             FLOPs ──► NoClosedForm
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from torch import nn

from ...errors import TruemfuError, one_line
from ..attention.pairs import FULL
from ..batch import CUMULATIVE
from ..count.count import warn_uncounted
from ..count.counting_mode import CountingMode
from ..count.tally import Entry
from . import terms as vocabulary
from .calibration_batch import BatchMaker
from .config_numbers import chunk_sizes, limits, merge_size, window_sizes
from .example_check import ExampleCheck
from .form import CLOSED_FORM, Form, Part
from .layout import Layout
from .matcher import Fit, Matcher, polynomial_families, products
from .terms import ONE, Sizes, Term

Run = Callable[[Any], tuple[CountingMode, str, tuple[str, ...]]]
"""Counts one step on a batch: returns the tally, the method and the notes."""

_SMALL = {
    "samples": (2, 3, 5, 4, 7, 6, 3),
    "length": (37, 61, 23, 97, 53, 79, 43),
    "decoder_length": (29, 17, 41, 59, 19, 47, 31),
    "images": (2, 3, 5, 4, 7, 6, 3),
}
_GRIDS = (
    ((1, 2, 3), (1, 5, 4)),
    ((1, 7, 2),),
    ((2, 3, 4), (1, 9, 5), (1, 6, 6)),
    ((1, 5, 11), (3, 2, 2)),
    ((1, 10, 7), (1, 4, 3)),
    ((1, 13, 3),),
    ((4, 5, 5), (1, 8, 9)),
)
_SHORT, _LONG = 5, 1031
_EXTREMES = {1: _SHORT, 2: _LONG}
"""Calibrations with a length far from the others: no term fits if the work changes in kind."""
_SLOW_S = 5.0


class NoClosedForm(Exception):
    """No sum of known terms describes this model's work."""


class Calibration:
    """Finds the closed form for batches like an example, on sequences of these `lengths` if given."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        batch: Any,
        run: Run,
        *,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._lengths = lengths
        self.layout = layout
        """The layout of the batch; sizes that turn out not to vary become fixed during calibration."""
        self._model, self._batch, self._count = model, batch, run
        self._maker = BatchMaker(model, batch)
        self._own = layout.sizes(batch)
        self._limits = limits(model)
        self._runs: list[tuple[Sizes, CountingMode]] = []
        self._notes: tuple[str, ...] = ()
        self._unmatched: set[str] = set()

    def form(self) -> Form:
        """The closed form; raises NoClosedForm if there is none."""
        if self.layout.clash is not None:
            raise NoClosedForm(self.layout.clash)
        try:
            return self._form()
        except (TruemfuError, IndexError) as error:  # of a generated batch: the example may work
            raise NoClosedForm(one_line(error)) from None

    def _form(self) -> Form:
        first_s = self._first_run()
        for index in range(1, 7):
            can_vary = "length" in self.layout.names and self._lengths is None
            extreme = _EXTREMES.get(index) if can_vary else None
            if extreme == _LONG and self._is_slow(_LONG, first_s):
                extreme = None
            if extreme is None or not self._try(self._plan(index, extreme)):
                self._run(self._plan(index))
            if len(self._runs) < 3:
                continue
            fits = self._match()
            if fits is not None and (len(self._runs) > 4 or (_is_simple(fits) and not self._is_spatial)):
                counted = self._runs[0][1].result(method=CLOSED_FORM)
                warn_uncounted(counted)
                notes = (*counted.notes, *self._notes)
                return self._compared(Form(fits, uncounted=counted.uncounted, notes=notes), first_s)
        raise NoClosedForm(f"no term fits {', '.join(sorted(self._unmatched)[:3])}")

    def values_matter(self) -> bool:
        """Whether the work depends on the values in a batch like the example; True if in doubt."""
        return self._example_check.values_matter() or self.layout.clash is not None

    @cached_property
    def _example_check(self) -> ExampleCheck:
        """Created only when the layout is final."""
        return ExampleCheck(self._maker, self.layout, self._own, lambda batch: self._count(batch)[0])

    def _compared(self, form: Form, first_s: float) -> Form:
        """The form if it holds for the example itself; else raises NoClosedForm."""
        if "length" in self._own and self._is_slow(self._own["length"], first_s):
            return form.with_note(
                "the closed form was not compared with the example, which would take too long to count"
            )
        try:
            reason = self._example_check.contradiction(form)
        except TruemfuError as error:
            return form.with_note(f"the closed form was not compared with the example ({one_line(error)})")
        if reason is not None:
            raise NoClosedForm(reason)
        return form

    @property
    def _is_spatial(self) -> bool:
        """Whether strides shrink the sizes: small sizes take more calibrations to distinguish terms."""
        return bool({"height", "width", "frames"} & set(self.layout.names))

    def _first_run(self) -> float:
        """Find out which sizes can vary; returns the seconds taken by the first run that succeeded."""
        began = time.perf_counter()
        if self._try(self._plan(0)):
            return time.perf_counter() - began
        if not self._try(self._own, keep=False):
            raise NoClosedForm("batches of other sizes cannot be generated from the example")
        changed = self._plan(0)
        for name in self.layout.names:
            if not self._try({**self._own, name: changed[name]}, keep=False):
                self.layout = self.layout.with_fixed(name, self._own.pop(name))
        began = time.perf_counter()
        self._run(self._plan(0))
        return time.perf_counter() - began

    def _is_slow(self, length: int, first_s: float) -> bool:
        """Whether the model loops over positions in Python, so that this length would take minutes."""
        (first, first_tally), (second, second_tally) = self._runs[:2]
        calls = [len(tally.entries) + tally.operators for tally in (first_tally, second_tally)]
        growth = (calls[1] - calls[0]) / ((second["length"] - first["length"]) or 1)
        return growth * length * first_s / max(calls[0], 1) > _SLOW_S * 4

    def _try(self, sizes: Sizes, *, keep: bool = True) -> bool:
        try:
            self._run(sizes, keep=keep)
        except (TruemfuError, IndexError):
            return False
        return True

    def _run(self, sizes: Sizes, *, keep: bool = True) -> None:
        tally, _, notes = self._count(self._maker.make(self.layout, sizes))
        if keep:
            self._notes = notes
            self._runs.append((sizes, tally))

    def _plan(self, index: int, extreme: int | None = None) -> dict[str, Any]:
        """Sizes for a calibration: small and without common factors, except for an `extreme` length."""
        sizes: dict[str, Any] = {}
        for name in self.layout.names:
            if name == "length" and self._lengths is not None:
                sizes[name] = self._lengths[index]
            elif name in _SMALL:
                sizes[name] = _SMALL[name][index]
            else:
                sizes[name] = _uneven(name, self._own[name])[index]
        if self.layout.grids:
            merge = merge_size(self._model)
            sizes["grids"] = [(t, h * merge, w * merge) for t, h, w in _GRIDS[index]]
        has_ends = any(key in CUMULATIVE for key in self.layout.tensors)
        if has_ends and self._own.get("samples") == 1:
            sizes["samples"] = 1  # cumulative lengths have no rows
        if "length" in sizes:
            longest, long = self._limits["length"], extreme == _LONG
            if extreme == _SHORT:
                sizes["length"] = _SHORT
            elif long:
                sizes["samples"] = min(sizes.get("samples", 1), 2)
                sizes["length"] = max(_LONG, self._own["length"] + 3, self._limits["window"] + 37)
            if self._maker.visuals:
                sizes["length"] = max(sizes["length"], self._maker.tokens_for(sizes) + index)
            if sizes["length"] > longest:
                sizes["length"] = longest - index if long or longest - index > 8 else longest
        if self.layout.is_packed:
            sizes["documents"] = [
                _cut(sizes["length"], row + index) for row in range(sizes.get("samples", 1))
            ]
        return sizes

    def _match(self) -> dict[Part, tuple[Fit, Fit]] | None:
        runs = [sizes for sizes, _ in self._runs]
        matcher = Matcher(runs, *self._terms(runs))
        fits, left = _match_parts(matcher, self._parts(lambda e: (e.phase, e.module, e.operator, e.dtype)))
        if left:  # which of two equivalent operators runs may depend on the sizes: match them together
            again = {(phase, module) for phase, module, _, _ in left}
            fits = {part: fit for part, fit in fits.items() if part[:2] not in again}
            together = self._parts(
                lambda e: (e.phase, e.module, "several", e.dtype) if (e.phase, e.module) in again else None
            )
            more, left = _match_parts(matcher, together)
            fits |= more
        self._unmatched = {f"{operator} in {module or 'the model'}" for _, module, operator, _ in left}
        return None if left else fits

    def _parts(self, key: Callable[[Entry], Part | None]) -> dict[Part, tuple[list[int], list[int]]]:
        """The FLOPs that each part needs and executes in each run."""
        count = len(self._runs)
        parts: defaultdict[Part, tuple[list[int], list[int]]] = defaultdict(
            lambda: ([0] * count, [0] * count)
        )
        for index, (_, tally) in enumerate(self._runs):
            for entry in tally.entries:
                if (part := key(entry)) is not None:
                    parts[part][0][index] += entry.needed
                    parts[part][1][index] += entry.executed
        return parts

    def _terms(self, runs: Sequence[Sizes]) -> tuple[list[Term], list[list[Term]]]:
        """Every term that batches of this kind may need, and the families of sums to try."""
        names = self.layout.names
        outer = [ONE]
        for name in ("samples", "images"):
            if name in names:
                outer.append(vocabulary.size(name))
        if "samples" in names and "images" in names:
            outer.append(outer[1].times(outer[2]))
        if "samples" in names:
            outer.append(vocabulary.size("samples").times(vocabulary.size("samples")))
        spatial = [n for n in ("height", "width", "frames", "length") if n in names]
        chains, areas = vocabulary.size_chains(spatial, runs, [tally.size_steps for _, tally in self._runs])
        quantities = [vocabulary.size(n) for n in ("length", "decoder_length", "frames") if n in names]
        quantities += [t for t in chains if t not in quantities]
        if "length" in names:
            quantities += [vocabulary.chunks("length", c) for c in chunk_sizes(self._model)]
        bands = sorted(
            {b for _, tally in self._runs for b in tally.pairs.bands} | {FULL}, key=lambda b: str(b)
        )
        pairs = [
            vocabulary.band_pairs(n, b) for b in bands if b != FULL for n in names if n.endswith("length")
        ]
        terms = products(outer, quantities)
        terms += [o.times(p) for o in outer for p in pairs]
        terms += [o.times(a) for o in outer for a in areas]
        terms += [o.times(a).times(a) for o in outer for a in areas]
        families = polynomial_families(outer, quantities)
        families += polynomial_families(outer[:2], areas)
        if self.layout.is_packed:
            terms += [*map(vocabulary.document_pairs, bands), vocabulary.documents()]
        if self.layout.grids:
            grid = vocabulary.grid_terms(window_sizes(self._model))
            terms += grid
            families += [[a, b] for i, a in enumerate(grid) for b in grid[i + 1 :]]
            tokens = [o.times(q) for o in outer[:2] for q in quantities[:1]]
            families += [[t, g] for t in tokens for g in grid]
        return terms, families


def _match_parts(
    matcher: Matcher, parts: Mapping[Part, tuple[list[int], list[int]]]
) -> tuple[dict[Part, tuple[Fit, Fit]], list[Part]]:
    """The fits of the parts that have one, and the parts without."""
    fits: dict[Part, tuple[Fit, Fit]] = {}
    left: list[Part] = []
    for part, (needed, executed) in parts.items():
        fit_needed, fit_executed = matcher.match(tuple(needed)), matcher.match(tuple(executed))
        if fit_needed is None or fit_executed is None:
            left.append(part)
        else:
            fits[part] = (fit_needed, fit_executed)
    return fits, left


def _is_simple(fits: Mapping[Part, tuple[Fit, Fit]]) -> bool:
    """Whether one term was enough for each part."""
    return all(len(fit) <= 1 for pair in fits.values() for fit in pair)


def _cut(length: int, seed: int) -> list[int]:
    """Cut a row into a few documents of unequal lengths."""
    first = max(1, length * (3 + seed % 4) // 11)
    second = max(1, (length - first) * (2 + seed % 3) // 7)
    rest = length - first - second
    return [n for n in (first, second, rest) if n > 0]


@lru_cache(maxsize=64)
def _uneven(name: str, own: int) -> list[int]:
    """Sizes of images or audio whose halves, quarters … are odd as often as even.

    Strides halve a size and round. If all calibrations were even at some depth, a layer before the stride
    could not be distinguished from one after it.
    """
    draw = random.Random(f"{name} {own}")
    while True:
        sizes = [2 * own + draw.randrange(20, 500) for _ in range(7)]
        depths = [[n >> k for n in sizes[:5]] for k in range(7)] + [
            [-(-n >> k) for n in sizes[:5]] for k in range(7)
        ]
        if all(1 <= sum(n % 2 for n in depth) <= 4 for depth in depths):
            return sizes
