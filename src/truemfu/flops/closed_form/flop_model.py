"""A count as a function of the batch: exact, and in microseconds for sizes that a closed form speaks for.

    example ──► counted, and some copies of it in other sizes ──► form ──► FlopModel

    batch ──► its kind and sizes
                ├─ counted before                     ──► that count
                ├─ the form speaks for these sizes    ──► closed form
                └─ else                               ──► counted on fake tensors: the form learns from it

The form is fitted in integers, without rounding (`form.py`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ..arguments import check_call
from ..attention.windows import Windows
from ..batch import digest_of
from ..count.count import warn_uncounted
from ..count.counted_step import CountedStep
from ..flop_count import FlopCount
from ..shadow.tensor_makers import device_of
from ..wrappers import unwrap
from .batch_key import BatchKey
from .copies import Example, with_other_values, with_values
from .form import MicroBatch, ObservedForm
from .integers import TOTALS, count_of, integers_of

_DEFAULT = Convention()
CLOSED_FORM = "closed form"
_VALUES_MATTER = (
    "the work may depend on the values of a batch (a mask, labels, a number), not on its shapes alone"
)
_MOST_KINDS = 64
_MOST_COUNTS = 1024
_MOST_OPERATORS = 60_000
"""Further operators of longer copies beyond which these are not counted: the model loops over positions."""


@dataclass
class _Kind:
    """Batches that differ in their sizes alone."""

    by_values: bool = False
    """Whether their work depends on the integers in them."""
    longest: int = 0
    """The longest packed document in a counted batch."""
    form: ObservedForm = field(default_factory=ObservedForm)
    counts: OrderedDict[Hashable, FlopCount] = field(default_factory=OrderedDict)
    notes: dict[str, None] = field(default_factory=dict)

    def exact_key(self, key: BatchKey, batch: Any) -> Hashable:
        """Equal for batches of the same work."""
        return key.sizes, key.grids, key.documents, digest_of(batch) if self.by_values else None

    def predict(self, key: BatchKey) -> dict[str, int] | None:
        """The integers of a batch by the form; None if it does not speak for its sizes."""
        is_longer = max(key.documents, default=0) > self.longest
        if self.by_values or key.grids or is_longer or not self.form.is_fitted:
            return None
        return self.form.predict([MicroBatch(key.kind, key.sizes)])

    def learn(self, key: BatchKey, count: FlopCount) -> None:
        """Let the form learn from a count."""
        self.longest = max((self.longest, *key.documents))
        self.notes |= dict.fromkeys(count.notes)
        self.form.add([MicroBatch(key.kind, key.sizes)], integers_of(count))


class FlopModel:
    """FLOPs as a function of the batch. `FlopModel.fit(model, batch)`, then `f(other_batch)`.

    Exact for every batch. The form answers for other numbers of samples and other lengths between those that
    were counted. Any other batch (a longer one, other keys, images of other sizes) is counted when it
    arrives, once for each shape, and the form learns from it. If the work depends on other values (the model
    skips padding, or chooses a head by a number), each batch is counted with its own values. `method` of a
    count states which it was.

    Only shapes are read, and the values of packed positions, cumulative lengths and image grids: put these
    on the CPU if the caller must not wait for the device. All other tensors may be on the meta device, and
    are then taken to be complete (no padding, a label for each token). If values matter, all integers are
    read. Not thread-safe. `model` may be a weak reference, which does not keep it alive.
    """

    def __init__(
        self,
        model: nn.Module | weakref.ref[nn.Module],
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self.convention = convention
        self._given = model
        self._backward, self._loss_fn = backward, loss_fn
        self._windows: Windows | None = None
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    @classmethod
    def fit(
        cls,
        model: nn.Module | weakref.ref[nn.Module],
        batch: Mapping[str, Any] | tuple[Any, ...],
        *,
        convention: Convention = _DEFAULT,
        backward: bool = True,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
    ) -> FlopModel:
        """Count this batch and some copies in other sizes; uses no device and does not change the model."""
        fitted = cls(model, convention=convention, backward=backward, loss_fn=loss_fn)
        fitted._fit(batch)
        return fitted

    @property
    def closed(self) -> bool:
        """Whether every kind of batch seen so far has a closed form."""
        return all(kind.form.is_fitted for kind in self._kinds.values())

    def formulas(self) -> dict[str, str]:
        """The closed form of the first batch kind as text, for forward, backward and recompute."""
        first = next(iter(self._kinds.values()), None)
        return {} if first is None else first.form.written(TOTALS)

    @property
    def _model(self) -> Any:
        return self._given() if isinstance(self._given, weakref.ref) else self._given

    def _fit(self, batch: Any) -> None:
        """Count a batch, and copies of it in other sizes until a form speaks for the sizes between them."""
        batch = _arguments(batch)
        key = BatchKey.of(batch)
        _, operators = self._counted(batch, key)
        if key is None or key.grids or self._kinds[key.kind].by_values:
            return
        example = Example(with_values(batch))
        for samples, length in _other_sizes(example):
            counted = self._learn_copy(key.kind, example.copy(samples, length))
            if counted is None and length is not None:  # the model may accept no other length
                counted = self._learn_copy(key.kind, example.copy(samples, None))
            if counted is None or (counted and 4 * (operators - counted) > _MOST_OPERATORS):
                return

    def __call__(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount:
        """The count for another batch."""
        batch = _arguments(batch)
        key = BatchKey.of(batch)
        count = None if key is None else self._known(key, batch)
        if count is None:
            count, _ = self._counted(batch, key)
        self._windows = self._windows or Windows(unwrap(self._model), self.convention)
        outside = self._windows.notes_for_batch(batch)
        return replace(count, notes=(*count.notes, *outside)) if outside else count

    def _known(self, key: BatchKey, batch: Any) -> FlopCount | None:
        """The count of a batch like one that was counted, or by the form."""
        kind = self._kinds.get(key.kind)
        if kind is None:
            return None
        count = kind.counts.get(kind.exact_key(key, batch))
        integers = kind.predict(key) if count is None else None
        if integers is None:
            return count
        return count_of(integers, method=CLOSED_FORM, convention=self.convention, notes=tuple(kind.notes))

    def _counted(self, batch: Any, key: BatchKey | None) -> tuple[FlopCount, int]:
        """Count a batch and keep the result; also returns the number of operators."""
        check_call(self._model, batch)
        filled = with_values(batch)
        tally, method, notes = self._step(filled).run()
        count = tally.result(method=method, notes=notes)
        warn_uncounted(count)
        if key is None:
            return count, tally.operators
        kind = self._kinds.get(key.kind)
        if kind is None:
            kind = self._kinds[key.kind] = _Kind(by_values=self._depends_on_values(filled, count))
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        if kind.by_values:
            count = replace(count, notes=(*count.notes, _VALUES_MATTER))
        kind.counts[kind.exact_key(key, batch)] = count
        if len(kind.counts) > _MOST_COUNTS:
            kind.counts.popitem(last=False)
        if not kind.by_values and not key.grids:
            kind.learn(key, count)
        return count, tally.operators

    def _depends_on_values(self, batch: Any, count: FlopCount) -> bool:
        """Whether a batch with other integers has other work; True if in doubt."""
        other = with_other_values(batch)
        if other is None:
            return False
        try:
            changed = self._step(other).run_fake()[0].result(method="")
        except Exception:  # whatever the model raises for values that it was not given
            return True
        return any(getattr(changed, total) != getattr(count, total) for total in TOTALS)

    def _learn_copy(self, kind: Hashable, copy: Any) -> int | None:
        """Count a copy; its number of operators, 0 if the form knows it already, None if it cannot run."""
        key = BatchKey.of(copy)
        assert key is not None
        if self._kinds[kind].predict(key) is not None:
            return 0
        try:
            tally, _ = self._step(copy).run_fake()
        except Exception:  # whatever the model raises for sizes that it was not given
            return None
        self._kinds[kind].learn(key, tally.result(method=""))
        return tally.operators

    def _step(self, batch: Any) -> CountedStep:
        """A step on a batch, which is taken to be where the model is."""
        first = next(iter(self._model.parameters()), None)
        device = None if first is None else device_of(first)
        return CountedStep(self._model, batch, self.convention, self._backward, self._loss_fn, device)


def _other_sizes(example: Example) -> Iterator[tuple[int | None, int | None]]:
    """Samples and lengths of copies: extremes first, then what a form with more terms needs."""
    samples, length = example.samples or 0, example.length or 0
    if not samples and not length:
        return
    for other_samples, other_length in (
        (2, 5),
        (1, 4 * length + 3),
        (4 * samples + 3, 6),
        (3, 2 * length + 1),
        (5, 7),
        (7, length + 2),
        (6, 11),
    ):
        yield other_samples if samples else None, other_length if length else None


def _arguments(batch: Any) -> Any:
    """The batch, with a single tensor as the only positional argument."""
    return (batch,) if isinstance(batch, torch.Tensor) else batch
