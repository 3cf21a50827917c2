"""What each forward pass was given, noted on the training thread in microseconds.

A note keeps no tensor of the batch alive. Batches of one shape share a `Template`: names, shapes and dtypes
as tensors without data. Values that determine the work of a batch beyond its shape (packed documents, image
grids) are copied to the host for each batch, asynchronously.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...flops import (
    CUMULATIVE,
    GRIDS,
    AutocastState,
    autocast_state,
    documents_of,
    kind_and_sizes,
    lengths_in,
    sizes_of_lengths,
)
from ...torch_private.trees import tree_flatten, tree_map
from ...torch_private.watching import detects_surroundings, functorch_level
from ..values.host_values import Held, HostValues, Number, is_there

_MAX_TEMPLATES = 1024
_MAX_VALUE_BYTES = 64 << 20
_MAX_NOTES = 4096
_SHAPES_SHOWN = 8
_DEEPEST = 4
_VALUE_KEYS = frozenset({*CUMULATIVE, *GRIDS, "position_ids"})
Batch = Mapping[Any, Any]
"""A batch by name, or by position for a forward that takes any number of positional arguments."""
TensorSizes = tuple[tuple[str, tuple[int, ...]], ...]
"""The tensors of a batch by name, and their shapes."""
KeyPath = tuple[Any, ...]
"""The keys that lead to a tensor in a batch, through nested mappings."""
_PLAIN = (int, float, str, bool, type(None))
_Tensor = torch.Tensor
UNREADABLE = (
    "the step's batch shapes cannot be read (nested tensors, objects that contain tensors, vmap and other "
    "functorch transforms, or positional with keyword arguments to a forward(*args, **kwargs)), so only "
    "steps that were observed themselves have an MFU"
)
TOO_MANY = "the step has too many micro-batches: is log_step called once per step?"


@dataclass(eq=False)
class Template:
    """What all batches of one shape have in common."""

    number: int
    """Counts the templates of a run."""
    kind: tuple[Any, ...]
    """Equal for batches that differ in their sizes alone."""
    sizes: tuple[tuple[str, int], ...]
    """Every dimension of every tensor, by name."""
    batch: dict[str | int, Any]
    """Names (or positions) to tensors without data, or to plain values."""
    value_paths: tuple[KeyPath, ...]
    mask_path: KeyPath | None
    shapes: dict[str, list[int]]
    samples: int | None
    tokens: int | None
    autocast: AutocastState
    slot: int | None = field(default=0)
    """The watched module, and whether it is frozen; None for a batch that gives only samples and tokens."""
    model: str | None = field(default=None)
    """The model's name, if several are watched."""

    def example(self, values: Mapping[KeyPath, torch.Tensor]) -> Any:
        """Such a batch with these values, as the model takes it."""
        batch: Batch = self.batch
        for path, value in values.items():
            batch = _with(batch, path, value)
        return tuple(batch.values()) if 0 in batch else batch


@dataclass(eq=False)
class BatchNote:
    """One micro-batch: its template, the values that determine its work, and its tokens without padding."""

    template: Template
    values: Mapping[KeyPath, torch.Tensor | Held]
    useful_tokens: Number

    def ready(self) -> bool:
        """Whether all values can be read without waiting."""
        return is_there(self.useful_tokens) and all(map(is_there, self.values.values()))

    def samples(self) -> int | None:
        """Rows of the batch, or its documents if rows are packed; None if unknown.

        A document of a single token is padding: it has nothing to predict.
        """
        if not self.values:
            return self.template.samples
        batch = self.example()
        documents = documents_of(batch)
        if documents is None:
            return None if batch is None else self.template.samples
        return sum(length > 1 for row in documents for length in row)

    @cached_property
    def lengths(self) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
        """What its values say of its work: lengths of documents, patches of images.

        None if its values were overwritten before they could be read.
        """
        if not self.values:
            return ()
        batch = self.example()
        if batch is None:
            return None
        return lengths_in(batch)

    @property
    def documents(self) -> list[list[int]] | None:
        """The lengths of the documents in each row; None if rows are not packed, or that is unknown."""
        return documents_of(self.example()) if self.values else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for batches of the same work, if they ran the same operators."""
        return self.template.number, self.lengths

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The sizes that its work can depend on."""
        return (*self.template.sizes, *sizes_of_lengths(self.lengths or ()))

    def example(self) -> Any:
        """Such a batch; None if its values were overwritten before they could be read."""
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
    missing: str | None
    """Why some micro-batches could not be noted; None if all were."""


class BatchNotes:
    """Turns batches into notes; lives on the training thread.

    Between two forward passes the processor's caches are evicted, so touching an object or function costs
    more than the work done with it; a batch like the last touches few.
    """

    def __init__(self, values: HostValues) -> None:
        self._values = values
        self._is_blind = not detects_surroundings()
        """Whether batches inside vmap, or in a second run of the forward, cannot be recognised."""
        self._templates: OrderedDict[Any, Template] = OrderedDict()
        self._made = 0
        self._last_signature: list[Any] = []
        self.last_template: Template | None = None
        """That of the batch that was noted last."""
        self._last_bare: BatchNote | None = None
        """The note of the last batch, if it has no values beyond its template, so that it can be reused."""
        self._last_step = StepBatches([], missing=None)
        self._last_noted = self._last_step.notes
        self._noted: list[BatchNote] = []
        self._noted_in_backward: list[BatchNote] = []
        self._missing: str | None = None
        self.has_notes = False
        """Whether the current step has a micro-batch yet."""

    def note(
        self,
        batch: Batch | None,
        slot: int | None = 0,
        model: str | None = None,
        *,
        in_backward: bool = False,
    ) -> bool:
        """Note one micro-batch of the current step; False if its shapes cannot be read.

        Nested tensors have no fixed shape, and inside vmap a tensor does not show its batch dimension. A
        checkpoint around the model runs it again in the backward pass; a reentrant one first ran it without
        gradients, so the second run is the only one that is seen.
        """
        if batch is None or self._is_blind or functorch_level() is not None:
            return self._not_noted(UNREADABLE)
        signature: list[Any] = [slot, model, _autocast_dtypes()]
        try:
            for key, value in batch.items():
                cls = type(value)
                if cls is _Tensor:
                    signature += key, value.shape, value.dtype, value.requires_grad
                else:
                    signature += key, cls, value if cls in _PLAIN else _nested_signature(value)
        except Exception:  # an argument may raise when it is read, or contain itself
            return self._not_noted(UNREADABLE)
        template = self.last_template
        if template is None or signature != self._last_signature:
            template = self._template(tuple(signature), batch, slot, model)
            self._last_signature, self.last_template, self._last_bare = signature, template, None
        note = self._last_bare
        if note is None:
            note = self._new_note(batch, template)
        noted = self._noted_in_backward if in_backward else self._noted
        if len(noted) >= _MAX_NOTES:
            return self._not_noted(TOO_MANY)
        noted.append(note)
        self.has_notes = True
        return True

    def _not_noted(self, reason: str) -> bool:
        self._missing = reason
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
        """The tensor shapes of the batches so far, the latest few different ones."""
        return [template.shapes for template in list(self._templates.values())[-_SHAPES_SHOWN:]]

    def take(self) -> StepBatches:
        """The notes of the step that ends now; the same object as for the last step if they are equal."""
        noted, in_backward, missing = self._noted, self._noted_in_backward, self._missing
        self.has_notes = False
        if noted == self._last_noted and not (in_backward or missing):
            noted.clear()
            return self._last_step
        self._noted, self._noted_in_backward, self._missing = [], [], None
        if noted and in_backward:
            first_run = Counter(id(note.template) for note in noted)
            again = Counter(id(note.template) for note in in_backward)
            if again - first_run:
                missing = "some of the step's forward passes were seen only in the backward pass"
        found = StepBatches(noted or in_backward, missing)
        if not (missing or in_backward):
            self._last_step, self._last_noted = found, noted
        return found

    def _new_note(self, batch: Batch, template: Template) -> BatchNote:
        mask = template.mask_path
        if mask is None and not template.value_paths:
            self._last_bare = BatchNote(template, {}, None)
            return self._last_bare
        values = {path: self._values.values(path[-1], _at(batch, path)) for path in template.value_paths}
        return BatchNote(template, values, None if mask is None else self._values.tokens_in(_at(batch, mask)))

    def _new_template(
        self, batch: Batch, autocast: AutocastState, slot: int | None, model: str | None
    ) -> Template:
        self._made += 1
        kind, sizes = kind_and_sizes(batch)
        example: dict[str | int, Any] = {key: tree_map(_without_data, value) for key, value in batch.items()}
        samples, tokens = _extent(batch)
        paths = list(_tensor_paths(batch))
        masks = [
            path for path in paths if path[-1] == "attention_mask" and _is_mask(_at(batch, path), tokens)
        ]
        return Template(
            number=self._made,
            kind=(slot, autocast.dtypes, *kind),
            sizes=sizes,
            batch=example,
            value_paths=tuple(
                path for path in paths if path[-1] in _VALUE_KEYS and _has_values(_at(batch, path))
            ),
            mask_path=masks[0] if masks else None,
            shapes={str(k): list(v.shape) for k, v in batch.items() if isinstance(v, torch.Tensor)},
            samples=samples,
            tokens=tokens,
            autocast=autocast,
            slot=slot,
            model=model,
        )


def by_name_or_position(batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> Batch | None:
    """A batch as a mapping of names or positions; None if it cannot be read."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    try:
        return batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    except Exception:  # a custom sequence may raise anything
        return None


def tensor_sizes(batch: Batch) -> TensorSizes:
    """The shapes of a batch's own tensors, in a microsecond or two."""
    return tuple([(str(name), tuple(v.shape)) for name, v in batch.items() if isinstance(v, _Tensor)])


def _tensor_paths(batch: Batch) -> Iterator[KeyPath]:
    """The key paths of a batch's tensors, nested mappings included."""
    for key, value in batch.items():
        if isinstance(value, Mapping):
            yield from ((key, *inner) for inner in _tensor_paths(value))
        elif isinstance(value, torch.Tensor):
            yield (key,)


def _is_mask(tensor: torch.Tensor, tokens: int | None) -> bool:
    return tensor.dim() == 2 and tensor.numel() == tokens


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether its values may be copied: integers, and not too many."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return not is_number and tensor.nbytes <= _MAX_VALUE_BYTES


def _at(batch: Batch, path: KeyPath) -> Any:
    value: Any = batch
    for key in path:
        value = value[key]
    return value


def _with(batch: Batch, path: KeyPath, value: torch.Tensor) -> Batch:
    """The batch with another tensor at this key path."""
    key, *inner = path
    return {**batch, key: _with(batch[key], tuple(inner), value) if inner else value}


def _nested_signature(value: Any) -> tuple[Any, ...]:
    """The signature of an argument that is not a plain tensor but may be a subclass or contain tensors."""
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
    """Whether an object or its attributes, a few levels deep, contain a tensor."""
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
    """A tensor's shape and dtype as a tensor without data; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape_alone = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return shape_alone.requires_grad_(value.requires_grad) if value.requires_grad else shape_alone


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Autocast's dtypes on this thread, enough to distinguish its states."""
    return (
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
    )


def _extent(batch: Batch) -> tuple[int | None, int | None]:
    """Samples and tokens of a batch; images have no tokens, and a batch without tensors has neither."""
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
        return None, int(first.numel())  # one row of documents: the number of samples is unknown here
    is_tokens = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[0]), int(first.numel()) if is_tokens else None
