"""A count as a function of the batch: fitted once, exact for later shapes, in microseconds.

    example ──► a few counts at other sizes ──► each part matched to a term, exactly ──► FlopModel
                                                   └─ no term fits ──► counted once per shape (and values,
                                                                       if they matter), with a warning

A part is the work of one operator in one module and phase. Its FLOPs in every calibration must equal a
constant times a term of the batch's sizes (samples × length, samples × length², patches …), or a short sum of
such products; in integers, without rounding, with more calibrations than unknowns. `calibration.py` runs the
counts, `terms.py` is the vocabulary, `form.py` the result.

A fit can be reused in another process: `export()` returns plain data, `from_export` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import nn

from ...convention import Convention
from ...errors import UsageError, warn_once
from ..arguments import check_call
from ..attention.windows import Windows
from ..count.count import run_counted, warn_uncounted
from ..count.counting_mode import CountingMode
from ..count.step_work import StepWork, work_of
from ..flop_count import FlopCount
from ..host_copy import original_device
from ..wrappers import unwrap
from .batch_kind import PER_SHAPE, PER_VALUES, Kind, KindData
from .calibration import Calibration, NoClosedForm
from .calibration_batch import BatchMaker
from .form import CLOSED_FORM
from .layout import READ_BY_VALUE, Layout

__all__ = ["CLOSED_FORM", "PER_SHAPE", "PER_VALUES", "FlopModel"]

_DEFAULT = Convention()
_EXPORT_VERSION = 2
_MAX_KINDS = 64
_MAX_REPEATED = 256
_SCALARS = (bool, int, float, str, type(None))


class _ModelData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A FlopModel, as exported to another process."""

    version: int
    attention: str
    backward: bool
    has_loss_fn: bool
    kinds: list[KindData]


class FlopModel:
    """FLOPs as a function of the batch. `FlopModel.fit(model, batch)`, then `f(other_batch)`.

    Exact for other numbers of samples, lengths, packed documents, numbers and sizes of images. The first
    batch of another kind (other keys, packed instead of not, an input that needs a gradient) is calibrated
    when it arrives. A model whose work is not a function of these sizes is counted once per shape; `closed`
    is then False. Padding counts as work unless the model skips it: if the work depends on other values
    (a mask, labels, a task's number), each batch is counted with its own values.

    Only shapes are read, and the values of packed positions, cumulative lengths and image grids: put these
    on the CPU if the caller must not wait for the device. All other tensors may be on the meta device, and
    are then taken to be complete (no padding, a label for each token). If values matter, all integers are
    read. Not thread-safe.
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
        self._kinds: list[Kind] = []
        self._repeated: dict[tuple[Any, ...], FlopCount] = {}
        self._latest: tuple[tuple[Any, ...] | None, StepWork] | None = None
        self.reads_model_values = False
        """Whether a count has read values stored in the model: with other values it may differ."""

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
        """Calibrate on batches like this one; uses no device and does not change the model."""
        check_call(model, batch)
        fitted = cls(model, convention=convention, backward=backward, loss_fn=loss_fn)
        fitted._calibrate(_arguments(batch))
        return fitted

    @classmethod
    def from_export(
        cls, model: nn.Module, data: Any, *, loss_fn: Callable[[Any], torch.Tensor] | None = None
    ) -> FlopModel:
        """The FlopModel that `export()` described in another process, for the same model, without counting.

        A batch of a kind that was not exported is calibrated when it arrives. A loss function cannot be
        exported: pass the one that the export was counted with, if any.
        """
        read = _read(data)
        if read.has_loss_fn != (loss_fn is not None):
            raise UsageError(
                f"the export was counted {'with' if read.has_loss_fn else 'without'} a loss_fn: pass "
                f"{'the same one' if read.has_loss_fn else 'none'}"
            )
        convention = Convention(attention=read.attention)  # type: ignore[arg-type]
        adopting = cls(model, convention=convention, backward=read.backward, loss_fn=loss_fn)
        adopting._add(read)
        return adopting

    def adopt(self, data: Any) -> None:
        """Add the batch kinds in another process's `export()` that this FlopModel does not have."""
        read = _read(data)
        theirs = (read.attention, read.backward, read.has_loss_fn)
        ours = (self.convention.attention, self._backward, self._loss_fn is not None)
        if theirs != ours:
            raise UsageError(
                f"an export with (attention, backward, loss_fn) = {theirs} does not fit one with {ours}"
            )
        self._add(read)

    def export(self) -> dict[str, Any]:
        """Everything fitted so far as plain data, ready for JSON.

        Batch kinds with arguments that are neither tensors nor plain values are left out.
        """
        return {
            "version": _EXPORT_VERSION,
            "attention": self.convention.attention,
            "backward": self._backward,
            "has_loss_fn": self._loss_fn is not None,
            "kinds": [kind.export() for kind in self._kinds if kind.layout.is_exportable],
        }

    @property
    def closed(self) -> bool:
        """Whether every kind of batch seen so far has a closed form."""
        return all(kind.form is not None for kind in self._kinds)

    def knows(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> bool:
        """Whether `f(batch)` returns without counting. This check takes microseconds."""
        if _key(batch) in self._repeated:
            return True
        found = self._find(_arguments(batch))
        return found is not None and found[0].known(found[1], self.convention) is not None

    def provisional(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount | None:
        """The count of a batch that is known except for numbers that made no difference so far; else None.

        A call checks such a number again once it is far from those seen.
        """
        batch = _arguments(batch)
        if isinstance(batch, (Mapping, tuple, list)):
            for kind, sizes in self._kinds_with_any_numbers(batch):
                known = kind.known(sizes, self.convention)
                if known is not None:
                    return known
        return None

    def __call__(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> FlopCount:
        """The count for another batch."""
        key = _key(batch)
        if key in self._repeated:
            return self._repeated[key]
        count = self._count(_arguments(batch))
        if key is not None and PER_VALUES not in count.method:
            if len(self._repeated) >= _MAX_REPEATED:
                self._repeated.clear()
            self._repeated[key] = count
        return count

    def step_work(self, batch: Mapping[str, Any] | tuple[Any, ...]) -> StepWork:
        """The same step by the shapes of its products; not counted again if this batch was counted last."""
        batch = _arguments(batch)
        key = _key(batch)
        if self._latest is not None and key is not None and self._latest[0] == key:
            return self._latest[1]
        return work_of(self._run(batch)[0])

    def formulas(self) -> dict[str, str]:
        """The closed form of the first batch kind as text, for forward, backward and recompute."""
        form = self._kinds[0].form
        return {} if form is None else form.written()

    def _count(self, batch: Any) -> FlopCount:
        found = self._find(batch) or self._find_beyond_seen_numbers(batch)
        if found is None:
            check_call(self._model, batch)
            kind = self._calibrate(batch)
            found = kind, kind.layout.sizes(batch)
        kind, sizes = found
        count = kind.known(sizes, self.convention)
        if count is None:
            tally, method, notes = self._run_with_values(kind, batch, sizes)
            count = tally.result(method=f"{method}, {kind.method}", notes=(*notes, *kind.notes))
            warn_uncounted(count)
            kind.store(sizes, count)
        outside = self._windows.notes_for_sizes(sizes)
        return replace(count, notes=(*count.notes, *outside)) if outside else count

    @cached_property
    def _windows(self) -> Windows:
        return Windows(unwrap(self._model), self.convention)

    def _find(self, batch: Any) -> tuple[Kind, dict[str, Any]] | None:
        """The kind of this batch and its sizes, if it is already known."""
        if isinstance(batch, (Mapping, tuple, list)):
            for kind in self._kinds:
                sizes = kind.layout.quick_sizes(batch)
                if sizes is not None:
                    return kind, sizes
        return None

    def _find_beyond_seen_numbers(self, batch: Any) -> tuple[Kind, dict[str, Any]] | None:
        """The kind of a batch whose free numbers are far from those seen, if they still change nothing."""
        if not isinstance(batch, (Mapping, tuple, list)):
            return None
        count = None
        for kind, sizes in self._kinds_with_any_numbers(batch):
            known = kind.known(sizes, self.convention)
            if known is None:
                continue
            count = count or self._run_with_values(kind, batch, sizes)[0].result(method="")
            if (known.forward, known.backward) == (count.forward, count.backward):
                kind.layout = kind.layout.with_wider_ranges(batch)
                return kind, sizes
        return None

    def _kinds_with_any_numbers(self, batch: Any) -> Iterator[tuple[Kind, dict[str, Any]]]:
        """The kinds that match a batch with any free numbers, and its sizes in each."""
        for kind in self._kinds:
            sizes = kind.layout.quick_sizes(batch, any_number=True) if kind.layout.free else None
            if sizes is not None:
                yield kind, sizes

    def _calibrate(self, batch: Any) -> Kind:
        model = unwrap(self._model)
        calibration = Calibration(model, Layout.of(getattr(model, "config", None), batch), batch, self._run)
        try:
            form = calibration.form()
            kind = Kind(calibration.layout, form)  # sizes may have been fixed during calibration
        except NoClosedForm as reason:
            layout = calibration.layout
            kind = Kind(layout.with_values() if calibration.values_matter() else layout, None)
            warn_once(f"{type(model).__name__} has no closed form ({reason}): {kind.description}")
        for other in self._kinds:
            if irrelevant := other.irrelevant_numbers(kind):
                other.layout = other.layout.with_free(irrelevant, kind.layout)
                return other
        self._kinds.append(kind)
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[0]
        return kind

    def _run_with_values(
        self, kind: Kind, batch: Any, sizes: dict[str, Any]
    ) -> tuple[CountingMode, str, tuple[str, ...]]:
        """One counted step on a batch; integer tensors without values are generated."""
        return self._run(BatchMaker(unwrap(self._model), batch).own(kind.layout, sizes))

    def _run(self, batch: Any) -> tuple[CountingMode, str, tuple[str, ...]]:
        """One counted step; the batch is taken to be on the model's device."""
        tally, method, notes = run_counted(
            self._model,
            batch,
            convention=self.convention,
            backward=self._backward,
            loss_fn=self._loss_fn,
            device=device_of(self._model),
        )
        self._latest = _key(batch), work_of(tally)
        self.reads_model_values = self.reads_model_values or tally.reads_model_values
        return tally, method, notes

    def _add(self, data: _ModelData) -> None:
        try:
            kinds = [Kind.from_export(kind, self.convention) for kind in data.kinds]
        except RecursionError:
            raise UsageError("this export of a FlopModel cannot be read: its terms nest too deeply") from None
        except UsageError as error:
            raise UsageError(f"this export of a FlopModel cannot be read: {error}") from None
        ours = [kind.layout.export() for kind in self._kinds if kind.layout.is_exportable]
        self._kinds += [kind for kind in kinds if kind.layout.export() not in ours]
        del self._kinds[:-_MAX_KINDS]


def _read(data: Any) -> _ModelData:
    version = data.get("version") if isinstance(data, dict) else None
    if version != _EXPORT_VERSION:
        raise UsageError(
            f"expected an export of a FlopModel, version {_EXPORT_VERSION}; got "
            f"{type(data).__name__ if version is None else f'version {version!r}'}"
        )
    try:
        return msgspec.convert(data, _ModelData)
    except msgspec.ValidationError as error:
        raise UsageError(f"this export of a FlopModel cannot be read: {error}") from None


def _arguments(batch: Any) -> Any:
    """The batch, with a single tensor as the only positional argument."""
    return (batch,) if isinstance(batch, torch.Tensor) else batch


def _key(batch: Any) -> tuple[Any, ...] | None:
    """What determines the work of a plain batch: shapes, dtypes, gradients, scalars. None if values do."""
    if isinstance(batch, Mapping):
        items: Any = batch.items()
    elif isinstance(batch, (tuple, list)):
        items = enumerate(batch)
    else:
        return None
    key: list[Any] = []
    for name, value in items:
        if isinstance(value, torch.Tensor):
            if name in READ_BY_VALUE or value.is_nested:
                return None
            key += (name, value.shape, value.dtype, value.requires_grad)
        elif isinstance(value, _SCALARS):
            key += (name, value)
        elif type(value) is dict and (inner := _key(value)) is not None:
            key += (name, inner)
        else:
            return None
    return tuple(key)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a model, or of the model that a snapshot was taken from."""
    parameter = next(iter(model.parameters()), None)
    return None if parameter is None else original_device(parameter)
