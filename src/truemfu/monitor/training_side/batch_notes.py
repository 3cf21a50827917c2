"""What each forward pass was given, noted on the training thread in microseconds.

A note keeps no tensor of the batch alive. Batches of one shape share a `Template`: names, shapes and dtypes
as tensors without data, and the integers of the first such batch, which a count may look at (placeholders of
images, special tokens). What decides the work of a batch beyond its shape (packed documents, image grids) is
copied to the host for each batch, asynchronously.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...flops import CUMULATIVE, GRIDS, AutocastState, HostCopy, autocast_state, documents_of, start_host_copy
from ...torch_private.trees import tree_flatten, tree_leaves, tree_map
from ...torch_private.watching import (
    functorch_level,
    is_any_autocast,
    tells_backward,
    tells_functorch,
)
from .host_values import Held, HostValues, Number, is_there

_MAX_TEMPLATES = 1024
_MAX_VALUE_BYTES = 64 << 20
_MAX_NOTES = 4096
_SHAPES_SHOWN = 8
_DEEPEST = 4
_VALUE_KEYS = frozenset({*CUMULATIVE, *GRIDS, "position_ids"})
Batch = Mapping[Any, Any]
"""A batch by name, or by place for a forward that takes any number of positional arguments."""
Place = tuple[Any, ...]
"""Where in a batch a tensor is: its key, after those of the mappings around it."""
_PLAIN = (int, float, str, bool, type(None))
_Tensor = torch.Tensor
_UNSUPPORTED_BATCH = (
    "a batch cannot be told to a count, so its step has no MFU: it holds nested tensors or objects with "
    "tensors in them, is inside vmap or its kin, or mixes arguments by place and by name in a forward that "
    "takes any"
)
_TOO_MANY = "a step has too many micro-batches to note, and no MFU: is log_step called for each?"


@dataclass(eq=False)
class Template:
    """Everything batches of one shape have in common."""

    batch: dict[str | int, Any]
    """Names (or places) to tensors without data, to host copies of the first batch, or to plain values."""
    value_places: tuple[Place, ...]
    mask_place: Place | None
    shapes: dict[str, list[int]]
    samples: int | None
    tokens: int | None
    autocast: AutocastState
    slot: int | None = field(default=0)
    """Which model's batch it is, and in which condition; None where it tells samples and tokens alone."""
    model: str | None = field(default=None)
    """The model's name where several are watched."""
    values_ready: bool = field(default=False)
    asked_for: int | None = field(default=None)
    """The number of the model's state in which such a batch was last asked to be counted."""

    def ready(self) -> bool:
        """Whether all values of the first such batch have arrived."""
        return self.values_ready or all(
            value.ready() for value in tree_leaves(self.batch) if isinstance(value, HostCopy)
        )

    def example(self, values: Mapping[Place, torch.Tensor]) -> Any:
        """A batch to count, with these values, as the model takes it."""
        if not self.values_ready:
            self.batch = tree_map(lambda v: v.get() if isinstance(v, HostCopy) else v, self.batch)
            self.values_ready = True
        batch: Batch = self.batch
        for place, value in values.items():
            batch = _with(batch, place, value)
        return tuple(batch.values()) if 0 in batch else batch


@dataclass(eq=False)
class BatchNote:
    """One micro-batch: its template, the values that decide its work, and how many tokens are no padding."""

    template: Template
    values: Mapping[Place, torch.Tensor | Held]
    useful_tokens: Number

    def ready(self) -> bool:
        """Whether everything noted can be read without waiting."""
        return is_there(self.useful_tokens) and all(
            not isinstance(value, Held) or value.ready() for value in self.values.values()
        )

    def samples(self) -> int | None:
        """Rows of the batch, or its documents where rows are packed; None where they are not known.

        A document of a single token is padding: there is nothing in it to predict.
        """
        if not self.values:
            return self.template.samples
        batch = self.example()
        documents = documents_of(batch)
        if documents is None:
            return None if batch is None else self.template.samples
        return sum(length > 1 for row in documents for length in row)

    def example(self) -> Any:
        """A batch to count; None where its values were overwritten before they could be read."""
        if not self.values:
            return self.template.example(self.values)  # type: ignore[arg-type]
        found = {}
        for key, value in self.values.items():
            if isinstance(value, Held):
                if value.is_void:
                    return None
                value = value.get()
            found[key] = value
        return self.template.example(found)


class StepBatches(NamedTuple):
    """The micro-batches of a step."""

    notes: list[BatchNote]
    is_missing: bool
    """Whether there were more than are noted."""
    run_again: bool
    """Whether the whole model ran again in the backward pass."""


class BatchNotes:
    """Turns batches into notes; lives on the training thread.

    Between two forward passes the processor's caches hold other things, and each object and function that is
    touched costs more than what is done with it; so a batch like the last touches few.

    `values_matter` tells whether the first batch of every shape keeps its integers, not only that of every
    kind.
    """

    def __init__(
        self,
        values: HostValues,
        notice: Callable[[str], None],
        values_matter: Callable[[], bool] = lambda: False,
    ) -> None:
        self._values, self._notice, self._values_matter = values, notice, values_matter
        self._is_blind = not (tells_backward() and tells_functorch())
        """Whether a batch in a vmap, or a second run of the first, cannot be told from others."""
        self._templates: OrderedDict[Any, Template] = OrderedDict()
        self._kinds: set[Any] = set()
        self._last_signature: list[Any] = []
        self._last_template: Template | None = None
        self._last_bare: BatchNote | None = None
        """The note of the last batch, where it tells nothing that others of its template have not too."""
        self._last_step = StepBatches([], is_missing=False, run_again=False)
        self._last_noted = self._last_step.notes
        self._noted: list[BatchNote] = []
        self._noted_in_backward: list[BatchNote] = []
        self._is_incomplete = False
        self.has_notes = False
        """Whether the step under way has a micro-batch yet."""

    def note(
        self,
        batch: Batch | None,
        slot: int | None = 0,
        model: str | None = None,
        *,
        in_backward: bool = False,
    ) -> bool:
        """Note one micro-batch of the step under way; False where that cannot be done, which is said.

        Nested tensors have no shape to go by, and inside vmap and its kin a shape is not the whole one. A
        checkpoint around the model runs it again in the backward pass; one that is reentrant ran it without
        gradients before, and then this is the only run that is seen.
        """
        if batch is None or self._is_blind or functorch_level() is not None:
            return self._not_noted(_UNSUPPORTED_BATCH)
        signature: list[Any] = [slot, model, is_any_autocast() and _autocast_dtypes()]
        try:
            for key, value in batch.items():
                kind = type(value)
                if kind is _Tensor:
                    signature += key, value.shape, value.dtype, value.requires_grad
                else:
                    signature += key, kind, value if kind in _PLAIN else _nested_signature(value)
        except Exception:  # an argument may do anything when it is looked at, or contain itself
            return self._not_noted(_UNSUPPORTED_BATCH)
        template = self._last_template
        if template is None or signature != self._last_signature:
            template = self._template(tuple(signature), batch, slot, model)
            self._last_signature, self._last_template, self._last_bare = signature, template, None
        note = self._last_bare
        if note is None:
            note = self._new_note(batch, template)
        noted = self._noted_in_backward if in_backward else self._noted
        if len(noted) >= _MAX_NOTES:
            return self._not_noted(_TOO_MANY)
        noted.append(note)
        self.has_notes = True
        return True

    def _not_noted(self, reason: str) -> bool:
        self._is_incomplete = True
        self._notice(reason)
        return False

    def _template(self, signature: Any, batch: Batch, slot: int | None, model: str | None) -> Template:
        template = self._templates.get(signature)
        if template is None:
            template = self._new_template(batch, autocast_state(), slot, model)
            self._templates[signature] = template
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.popitem(last=False)
        return template

    def shapes(self) -> list[dict[str, list[int]]]:
        """The shapes of the tensors of the batches so far, the latest few kinds of them."""
        return [template.shapes for template in list(self._templates.values())[-_SHAPES_SHOWN:]]

    def take(self) -> StepBatches:
        """The notes of the step that ends now: those of the last one where they are the same."""
        noted, in_backward, is_missing = self._noted, self._noted_in_backward, self._is_incomplete
        self.has_notes = False
        if noted == self._last_noted and not (in_backward or is_missing):
            noted.clear()
            return self._last_step
        self._noted, self._noted_in_backward, self._is_incomplete = [], [], False
        if noted and in_backward:
            first_run = Counter(id(note.template) for note in noted)
            again = Counter(id(note.template) for note in in_backward)
            is_missing = is_missing or bool(again - first_run)  # some were seen in the backward pass alone
        found = StepBatches(noted or in_backward, is_missing, run_again=bool(in_backward))
        if not (is_missing or in_backward):
            self._last_step, self._last_noted = found, noted
        return found

    def _new_note(self, batch: Batch, template: Template) -> BatchNote:
        mask = template.mask_place
        if mask is None and not template.value_places:
            self._last_bare = BatchNote(template, {}, None)
            return self._last_bare
        values = {place: self._values.values(place[-1], _at(batch, place)) for place in template.value_places}
        return BatchNote(template, values, None if mask is None else self._values.tokens_in(_at(batch, mask)))

    def _new_template(
        self, batch: Batch, autocast: AutocastState, slot: int | None, model: str | None
    ) -> Template:
        """A template; the first of its kind holds the batch's integers too, which a count may look at."""
        looks = tuple((k, v.dim(), v.dtype) if isinstance(v, torch.Tensor) else k for k, v in batch.items())
        kind = (slot, looks)
        is_first, keeps_integers = kind not in self._kinds, self._values_matter()
        self._kinds.add(kind)
        example: dict[str | int, Any] = {}
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor):
                example[key] = tree_map(_without_data, value)
            elif is_first or keeps_integers or not _has_values(value):
                example[key] = _without_data(value)
            else:
                example[key] = value.to("meta")
        samples, tokens = _extent(batch)
        places = list(_tensor_places(batch))
        masks = [
            place for place in places if place[-1] == "attention_mask" and _is_mask(_at(batch, place), tokens)
        ]
        return Template(
            batch=example,
            value_places=tuple(
                place for place in places if place[-1] in _VALUE_KEYS and _has_values(_at(batch, place))
            ),
            mask_place=masks[0] if masks else None,
            shapes={str(k): list(v.shape) for k, v in batch.items() if isinstance(v, torch.Tensor)},
            samples=samples,
            tokens=tokens,
            autocast=autocast,
            slot=slot,
            model=model,
        )


def by_name_or_position(batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> Batch | None:
    """A batch as a model takes it; None where it cannot be read."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    try:
        return batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    except Exception:  # a sequence of the caller's own may do anything
        return None


def _tensor_places(batch: Batch) -> Iterator[Place]:
    """Where a batch has tensors, also in the mappings that it holds."""
    for key, value in batch.items():
        if isinstance(value, Mapping):
            yield from ((key, *inner) for inner in _tensor_places(value))
        elif isinstance(value, torch.Tensor):
            yield (key,)


def _is_mask(tensor: torch.Tensor, tokens: int | None) -> bool:
    return tensor.dim() == 2 and tensor.numel() == tokens


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a count may look at more than its shape: integers, and not too many."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.nbytes <= _MAX_VALUE_BYTES


def _at(batch: Batch, place: Place) -> Any:
    value: Any = batch
    for key in place:
        value = value[key]
    return value


def _with(batch: Batch, place: Place, value: torch.Tensor) -> Batch:
    """The batch with another tensor in this place."""
    key, *inner = place
    return {**batch, key: _with(batch[key], tuple(inner), value) if inner else value}


def _nested_signature(value: Any) -> tuple[Any, ...]:
    """What tells arguments apart that are no plain tensors but may be or hold some."""
    if isinstance(value, torch.Tensor):
        return _tensor_signature(value)
    leaves, structure = tree_flatten(value)
    signature: list[Any] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            signature.append(_tensor_signature(leaf))
        elif isinstance(leaf, _PLAIN):
            signature.append(leaf)
        elif _holds_tensors(leaf):
            raise TypeError(f"{type(leaf).__name__} holds tensors")
        else:
            signature.append(type(leaf))
    return tuple(signature)


def _tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.is_nested:
        raise TypeError("a nested tensor")
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _holds_tensors(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether there is a tensor in an object, its attributes or theirs."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (*_PLAIN, type)) or not depth:
        return False
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return any(_holds_tensors(item, depth - 1) for item in inner)


def _without_data(value: Any) -> Any:
    """A tensor inside an argument: its integers on their way to the host, or its shape alone."""
    if not isinstance(value, torch.Tensor):
        return value
    if not _has_values(value):
        shape_alone = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return shape_alone.requires_grad_(value.requires_grad) if value.requires_grad else shape_alone
    return start_host_copy(value)


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """What autocast does on this thread, where it is on: as much of it as tells states apart."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cuda", "cpu")
    )


def _extent(batch: Batch) -> tuple[int | None, int | None]:
    """Samples and tokens of a batch; a picture has no tokens, and what has no tensor has neither."""
    for key, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        tensor = batch.get(key)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == dims:
            return int(tensor.shape[0]), int(tensor.shape[0] * tensor.shape[1])
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
    if not tensors:
        inner = [v for v in batch.values() if isinstance(v, Mapping)]
        return _extent(inner[0]) if len(inner) == 1 else (None, None)
    first = tensors[0]
    if first.dim() == 1 and "input_ids" in batch and any(key in batch for key in CUMULATIVE):
        return None, int(first.numel())  # one row of documents: nobody says what a sample is
    is_tokens = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[0]), int(first.numel()) if is_tokens else None
