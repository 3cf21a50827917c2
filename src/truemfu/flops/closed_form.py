"""A count turned into a function of the batch: fitted once, exact for later shapes, in microseconds.

    example ──► a few counts at other sizes ──► each part matched to a term, exactly ──► FlopModel
                                                   └─ no term fits ──► counted once per shape, and says so

A part is what one operator does in one module and phase. Its FLOPs in every calibration must equal a constant
times a term of the batch's sizes (samples × length, samples × length², patches …), or a short sum of such;
integers, no rounding, with more calibrations than unknowns. See `terms.py` for the vocabulary.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from ..convention import Convention
from ..errors import TruemfuError, warn_once
from . import terms as vocabulary
from .count import check_call, count_flops, run_counted, warn_uncounted
from .flop_count import FlopCount
from .layout import Layout
from .pairs import FULL
from .shadow import unwrap
from .tally import Entry, Tally, with_ancestors
from .terms import ONE, Fit, Matcher, Sizes, Term

CLOSED_FORM, PER_SHAPE = "closed form", "counted once per shape"
_DEFAULT = Convention()
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
_LONG = 1031
_SLOW_S = 5.0
_MAX_SHAPES_KEPT = 1024

Part = tuple[str, str, str, str]  # phase, module, operator, dtype


class FlopModel:
    """FLOPs as a function of the batch. `FlopModel.fit(model, batch)`, then `f(other_batch)`.

    Exact for other numbers of samples, lengths, padding, packed documents, numbers and sizes of images. The
    first batch of another kind (other keys, packed instead of not) is calibrated when it comes. A model whose
    work is no function of these sizes is counted once for each shape; `closed` tells which.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self.convention = convention
        self._model = model
        self._backward, self._loss_fn = backward, loss_fn
        self._kinds: list[_Kind] = []

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any] | tuple[Any, ...],
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> FlopModel:
        """Calibrate on batches like this one, on no device; the model is not touched."""
        check_call(model, batch)
        fitted = cls(model, convention=convention, backward=backward, loss_fn=loss_fn)
        fitted._kinds.append(_Kind(fitted, batch))
        return fitted

    @property
    def closed(self) -> bool:
        """Whether every kind of batch seen so far has a closed form."""
        return all(kind.closed for kind in self._kinds)

    def __call__(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount:
        """The count for another batch."""
        for kind in self._kinds:
            sizes = kind.layout.quick_sizes(batch)
            if sizes is not None:
                return kind.count(sizes, batch)
        check_call(self._model, batch)
        kind = _Kind(self, batch)
        self._kinds.append(kind)
        return kind.count(kind.layout.sizes(batch), batch)

    def formulas(self) -> dict[str, str]:
        """The closed forms of the first kind of batch, written out, for forward, backward and recompute."""
        return self._kinds[0].formulas()

    def count_directly(self, batch: Any) -> FlopCount:
        """A count of this very batch, as `count_flops` gives it."""
        return count_flops(
            self._model, batch, convention=self.convention, backward=self._backward, loss_fn=self._loss_fn
        )

    def calibrate(self, batch: Any) -> tuple[Tally, str, tuple[str, ...]]:
        """One calibration: a counted step on a batch made for it."""
        return run_counted(
            self._model,
            batch,
            convention=self.convention,
            backward=self._backward,
            loss_fn=self._loss_fn,
            place=_device_of(self._model),
        )

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""
        return unwrap(self._model)


class _Kind:
    """One kind of batch: its layout, and its closed form if it has one."""

    def __init__(self, owner: FlopModel, batch: Any) -> None:
        self._owner = owner
        self.layout = Layout(owner.model, batch)
        self._kept: OrderedDict[Any, FlopCount] = OrderedDict()
        self._notes: tuple[str, ...] = ()
        self._uncounted: Mapping[str, int] = {}
        self._form: _Form | None = None
        self._runs: list[tuple[Sizes, Tally]] = []
        try:
            self._calibrate(batch)
        except _NoClosedForm as reason:
            warn_once(f"{type(owner.model).__name__} has no closed form ({reason}): {PER_SHAPE}")

    @property
    def closed(self) -> bool:
        return self._form is not None

    def formulas(self) -> dict[str, str]:
        return {} if self._form is None else self._form.written()

    def count(self, sizes: Sizes, batch: Any) -> FlopCount:
        if self._form is not None:
            return self._form.count(sizes, self._owner.convention, self._uncounted, self._notes)
        key = tuple((name, repr(value)) for name, value in sorted(sizes.items()))
        if key not in self._kept:
            counted = self._owner.count_directly(batch)
            self._kept[key] = FlopCount(**{**_fields(counted), "method": f"{counted.method}, {PER_SHAPE}"})
            if len(self._kept) > _MAX_SHAPES_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _calibrate(self, batch: Any) -> None:
        own = self.layout.sizes(batch)
        limits = _limits(self._owner.model)
        first = self._first_run(own, limits)
        for index in range(1, 7):
            if index == 2 and "length" in self.layout.names and not self._is_slow_in_length(first):
                sizes = self._plan(index, own, limits, long=True)
                if not self._try(sizes):
                    self._run(self._plan(index, own, limits))
            else:
                self._run(self._plan(index, own, limits))
            if len(self._runs) >= 3:
                form = self._match()
                enough = form is not None and form.is_simple and not self._is_spatial
                if form is not None and (enough or len(self._runs) > 4):
                    self._form = form
                    break
        else:
            raise _NoClosedForm(f"no term fits {', '.join(sorted(self._unmatched)[:3])}")
        counted = self._runs[0][1].result(method=CLOSED_FORM)
        self._uncounted, self._notes = counted.uncounted, (*counted.notes, *self._said)
        warn_uncounted(counted)
        self._runs.clear()

    @property
    def _is_spatial(self) -> bool:
        """Sizes shrink through strides: small numbers, which need more calibrations to tell terms apart."""
        return bool({"height", "width", "frames"} & set(self.layout.names))

    def _first_run(self, own: dict[str, Any], limits: Mapping[str, int]) -> float:
        """Find out which sizes can change at all; the seconds of the first run that worked."""
        began = time.perf_counter()
        if self._try(self._plan(0, own, limits)):
            return time.perf_counter() - began
        try:
            self._run(own, keep=False)
        except TruemfuError:
            # made batches do not fit this model; is the user's own batch at fault?
            self._owner.count_directly(self._original(own))
            raise _NoClosedForm("batches of other sizes cannot be made from the example") from None
        changed = self._plan(0, own, limits)
        for name in list(self.layout.names):
            if not self._try({**own, name: changed[name]}, keep=False):
                self.layout.fix(name)
        began = time.perf_counter()
        self._run(self._plan(0, own, limits))
        return time.perf_counter() - began

    def _original(self, own: dict[str, Any]) -> Any:
        example = self.layout.example
        return example if self.layout.is_mapping else tuple(example[i] for i in range(len(example)))

    def _is_slow_in_length(self, first_s: float) -> bool:
        """Whether a model loops over positions in Python, so that long sequences take minutes."""
        lengths = [sizes["length"] for sizes, _ in self._runs]
        calls = [len(tally.entries) + tally.operators for _, tally in self._runs]
        growth = (calls[1] - calls[0]) / max(lengths[1] - lengths[0], 1) if len(calls) > 1 else 0
        return growth * _LONG * first_s / max(calls[0], 1) > _SLOW_S * 4

    def _try(self, sizes: Sizes, *, keep: bool = True) -> bool:
        try:
            self._run(sizes, keep=keep)
        except (TruemfuError, IndexError):
            return False
        return True

    def _run(self, sizes: Sizes, *, keep: bool = True) -> None:
        tally, _, notes = self._owner.calibrate(self.layout.make(sizes))
        if keep:
            self._said = notes
            self._runs.append((sizes, tally))

    def _plan(
        self, index: int, own: dict[str, Any], limits: Mapping[str, int], *, long: bool = False
    ) -> dict[str, Any]:
        """Sizes for a calibration: small and without common factors, one long sequence among them."""
        sizes: dict[str, Any] = {}
        for name in self.layout.names:
            if name in _SMALL:
                sizes[name] = _SMALL[name][index]
            else:
                sizes[name] = _uneven(name, own[name])[index]
        if self.layout.grids:
            merge = _merge(self._owner.model)
            sizes["grids"] = [(t, h * merge, w * merge) for t, h, w in _GRIDS[index]]
        if "length" in sizes:
            longest = limits["length"]
            if long:
                sizes["samples"] = min(sizes.get("samples", 1), 2)
                sizes["length"] = max(_LONG, own["length"] + 3, limits["window"] + 37)
            if self.layout.visuals:
                sizes["length"] = max(sizes["length"], self.layout.tokens_for(sizes) + index)
            if sizes["length"] > longest:
                sizes["length"] = longest - index if long or longest - index > 8 else longest
        if self.layout.packed:
            sizes["documents"] = [
                _cut(sizes["length"], row + index) for row in range(sizes.get("samples", 1))
            ]
        return sizes

    def _match(self) -> _Form | None:
        runs = [sizes for sizes, _ in self._runs]
        matcher = Matcher(runs, *self._terms(runs))
        fits, left = _match_parts(matcher, self._parts(lambda e: (e.phase, e.module, e.operator, e.dtype)))
        if left:  # which of two equivalent operators runs may depend on the sizes: take them together
            again = {(phase, module) for phase, module, _, _ in left}
            fits = {part: fit for part, fit in fits.items() if part[:2] not in again}
            together = self._parts(
                lambda e: (e.phase, e.module, "several", e.dtype) if (e.phase, e.module) in again else None
            )
            more, left = _match_parts(matcher, together)
            fits |= more
        self._unmatched = {f"{operator} in {module or 'the model'}" for _, module, operator, _ in left}
        return None if left else _Form(fits)

    def _parts(self, key: Callable[[Entry], Part | None]) -> dict[Part, tuple[list[int], list[int]]]:
        """FLOPs needed and executed by each part in each run."""
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
        """Every term that batches of this kind may need, and the sums worth trying."""
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
        quantities += [t for t in chains if t.name not in {q.name for q in quantities}]
        if "length" in names:
            quantities += [vocabulary.chunks("length", c) for c in _chunk_sizes(self._owner.model)]
        bands = sorted(
            {b for _, tally in self._runs for b in tally.pairs.bands} | {FULL}, key=lambda b: str(b)
        )
        pairs = [
            vocabulary.band_pairs(n, b) for b in bands if b != FULL for n in names if n.endswith("length")
        ]
        terms = vocabulary.products(outer, quantities)
        terms += [o.times(p) for o in outer for p in pairs]
        terms += [o.times(a) for o in outer for a in areas]
        terms += [o.times(a).times(a) for o in outer for a in areas]
        families = vocabulary.polynomial_families(outer, quantities)
        families += vocabulary.polynomial_families(outer[:2], areas)
        if self.layout.packed:
            packed = [vocabulary.document_pairs(b) for b in bands]
            terms += [*packed, vocabulary.documents()]
        if self.layout.grids:
            grid = vocabulary.grid_terms(_window_sizes(self._owner.model))
            terms += grid
            families += [[a, b] for i, a in enumerate(grid) for b in grid[i + 1 :]]
            tokens = [o.times(q) for o in outer[:2] for q in quantities[:1]]
            families += [[t, g] for t in tokens for g in grid]
        return terms, families


def _match_parts(
    matcher: Matcher, parts: Mapping[Part, tuple[list[int], list[int]]]
) -> tuple[dict[Part, tuple[Fit, Fit]], list[Part]]:
    """The parts that terms were found for, and those that none fits."""
    fits: dict[Part, tuple[Fit, Fit]] = {}
    left: list[Part] = []
    for part, (needed, executed) in parts.items():
        fit_needed, fit_executed = matcher.match(tuple(needed)), matcher.match(tuple(executed))
        if fit_needed is None or fit_executed is None:
            left.append(part)
        else:
            fits[part] = (fit_needed, fit_executed)
    return fits, left


class _Form:
    """The closed form of one kind of batch: for each part two short sums of terms."""

    def __init__(self, fits: Mapping[Part, tuple[Fit, Fit]]) -> None:
        self._fits = fits
        self._terms: list[Term] = []
        index: dict[str, int] = {}
        totals: dict[str, defaultdict[int, Fraction]] = {
            phase: defaultdict(Fraction) for phase in ("forward", "backward", "recompute")
        }
        for (phase, *_), (needed, executed) in fits.items():
            for fit, sign in ((needed, 1), (executed, 0)):
                for constant, term in fit:
                    if term.name not in index:
                        index[term.name] = len(self._terms)
                        self._terms.append(term)
                    place = index[term.name]
                    if phase == "recompute":
                        totals["recompute"][place] += 0 if sign else constant
                    elif sign:
                        totals[phase][place] += constant
                        totals["recompute"][place] -= constant
                    else:
                        totals["recompute"][place] += constant
        self._index = index
        self._functions = [term.of for term in self._terms]
        self._totals = {
            phase: [(i, _whole(c)) for i, c in sorted(sums.items()) if c] for phase, sums in totals.items()
        }
        self.is_simple = all(len(f) <= 1 for pair in fits.values() for f in pair)

    def count(
        self, sizes: Sizes, convention: Convention, uncounted: Mapping[str, int], notes: tuple[str, ...]
    ) -> FlopCount:
        values = [of(sizes) for of in self._functions]
        totals = self._totals
        views = _Views(self, values)
        return FlopCount(
            forward=int(sum([c * values[i] for i, c in totals["forward"]])),
            backward=int(sum([c * values[i] for i, c in totals["backward"]])),
            recompute=int(sum([c * values[i] for i, c in totals["recompute"]])),
            by_module=_View(views, "modules"),
            by_operator=_View(views, "operators"),
            by_dtype=_View(views, "dtypes"),
            uncounted=uncounted,
            method=CLOSED_FORM,
            convention=convention,
            notes=notes,
        )

    def split(self, values: list[int]) -> Iterator[tuple[Part, int]]:
        """What each part of the model's FLOPs comes to."""
        for part, (needed, _) in self._fits.items():
            if part[0] != "recompute":
                yield part, int(sum(c * values[self._index[t.name]] for c, t in needed))

    def written(self) -> dict[str, str]:
        """The sums in words."""
        return {
            phase: " + ".join(f"{c}·{self._terms[i].name}" for i, c in sums) or "0"
            for phase, sums in self._totals.items()
        }


class _Views:
    """The splits of a count, worked out when somebody looks."""

    def __init__(self, form: _Form, values: list[int]) -> None:
        self._form, self._values = form, values

    def _summed(self, place: int) -> dict[str, int]:
        sums: defaultdict[str, int] = defaultdict(int)
        for part, flops in self._form.split(self._values):
            sums[part[place]] += flops
        return dict(sums)

    @cached_property
    def modules(self) -> dict[str, int]:
        return with_ancestors(self._summed(1))

    @cached_property
    def operators(self) -> dict[str, int]:
        return self._summed(2)

    @cached_property
    def dtypes(self) -> dict[str, int]:
        return self._summed(3)


class _View(Mapping[str, int]):
    """One split of a count, as a mapping."""

    __slots__ = ("_name", "_views")

    def __init__(self, views: _Views, name: str) -> None:
        self._views, self._name = views, name

    def _get(self) -> dict[str, int]:
        return getattr(self._views, self._name)  # type: ignore[no-any-return]

    def __getitem__(self, key: str) -> int:
        return self._get()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())

    def __repr__(self) -> str:
        return repr(self._get())


class _NoClosedForm(Exception):
    """No sum of known terms describes this model's work."""


def _whole(constant: Fraction) -> int | Fraction:
    return constant.numerator if constant.denominator == 1 else constant


def _fields(count: FlopCount) -> dict[str, Any]:
    return {name: getattr(count, name) for name in count.__dataclass_fields__}


def _cut(length: int, seed: int) -> list[int]:
    """Cut a row into a few documents of unequal lengths."""
    first = max(1, length * (3 + seed % 4) // 11)
    second = max(1, (length - first) * (2 + seed % 3) // 7)
    rest = length - first - second
    return [n for n in (first, second, rest) if n > 0]


@lru_cache(maxsize=64)
def _uneven(name: str, own: int) -> list[int]:
    """Sizes of images or sounds whose halves, quarters … are odd as often as even.

    Strides halve a size and round. If all calibrations were even at some depth, a layer before the stride
    could not be told from one behind it.
    """
    draw = random.Random(f"{name} {own}")
    while True:
        sizes = [2 * own + draw.randrange(20, 500) for _ in range(7)]
        depths = [[n >> k for n in sizes[:5]] for k in range(7)] + [
            [-(-n >> k) for n in sizes[:5]] for k in range(7)
        ]
        if all(1 <= sum(n % 2 for n in depth) <= 4 for depth in depths):
            return sizes


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device


def _config_numbers(model: nn.Module, *words: str) -> set[int]:
    """Integers of the model's configuration and of its modules whose names contain one of these words."""
    found: set[int] = set()

    def look(holder: Mapping[str, Any]) -> None:
        for name, value in holder.items():
            if isinstance(value, int) and not isinstance(value, bool) and any(w in str(name) for w in words):
                found.add(value)
            elif isinstance(value, dict):
                look(value)

    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is not None:
        look(to_dict())
    for module in model.modules():
        look({k: v for k, v in vars(module).items() if isinstance(v, int)})
    return found


def _chunk_sizes(model: nn.Module) -> list[int]:
    return sorted(n for n in _config_numbers(model, "chunk", "block_size", "bucket") if 1 < n <= 1 << 16)


def _window_sizes(model: nn.Module) -> list[int]:
    """Windows of an image in patches: named so, or named in pixels beside the size of a patch."""
    named = _config_numbers(model, "window")
    patches = {n for n in _config_numbers(model, "patch_size") if n > 0}
    return sorted(
        {n for n in named if 1 < n <= 4096} | {n // p for n in named for p in patches if n // p > 1}
    )


def _merge(model: nn.Module) -> int:
    return max(_config_numbers(model, "merge_size") or {2})


def _limits(model: nn.Module) -> dict[str, int]:
    """The longest sequence a model takes, where its configuration tells, and its widest window."""
    named = _config_numbers(model, "max_position", "n_positions", "max_target", "max_seq", "max_length")
    longest = min((n for n in named if n > 1), default=1 << 30)
    windows = [n for n in _config_numbers(model, "window") if n <= 1 << 14]
    return {"length": longest, "window": max(windows, default=0)}
