"""The sizes an estimate needs, from a batch's shapes; values are read only from small CPU tensors.

Common arguments are recognised by name, others by dtype and dimensions: integers are token ids, floating
point tensors are images, audio or features, whichever the model's first layer takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import BatchError, warn_once
from ..batch import CUMULATIVE, GRIDS, documents_in, grids_of
from .streams import FEATURES, FRAMES, PIXELS, TARGET, TOKENS, Sizes, Stream, rows_of_documents

if TYPE_CHECKING:
    from .walk import Walk

DEFAULT_PATCHES = 576
_TOKENS = ("input_ids", "inputs_embeds", "tokens", "idx", "src")
_TARGET = ("decoder_input_ids", "decoder_inputs_embeds", "labels", "tgt")
_FRAMES = ("input_features", "input_values", "audio_values")
_NO_INPUT = ("mask", "label", "position", "type_ids", "target", "weight", "cache", "past")
_WORDS = {
    TOKENS: "token ids (input_ids)",
    TARGET: "the decoder's token ids (decoder_input_ids, labels)",
    PIXELS: "images (pixel_values)",
    FRAMES: "audio (input_features, input_values)",
    FEATURES: "features",
}


class BatchReader:
    """Turns batches into sizes for one model."""

    def __init__(self, model: nn.Module, walk: Walk) -> None:
        self._name = type(model).__name__
        self._arguments = [
            p.name
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        streams = {
            stream
            for work in walk.works
            for value in vars(work.counted).values()
            if isinstance(stream := value, Stream)
        }
        self._sources = {stream.source for stream in streams}
        self._last = walk.last.stream.source
        self._dims = {s.source: len(s.steps) for s in streams if s.source in (PIXELS, FRAMES)}
        self._features_in = walk.features_in
        self._sequence_first = walk.sequence_first
        kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
        self._documents_apart = isinstance(kernel, str) and "flash" in kernel

    def __call__(self, batch: Any) -> Sizes:
        items = self._items(batch)
        sizes = Sizes()
        sources = self._sources
        if TOKENS in sources:
            self._tokens(items, sizes)
        if PIXELS in sources:
            self._pixels(items, sizes)
        if FRAMES in sources:
            self._frames(items, sizes)
        if FEATURES in sources:
            self._features(items, sizes)
        if TARGET in sources:
            self._target(items, sizes)
        if not sizes.outer.get(self._last):
            keys = ", ".join(map(str, items)) or "nothing"
            raise BatchError(f"{self._name} takes {_WORDS[self._last]}; the batch has {keys}")
        labels = items.get("labels")
        if isinstance(labels, torch.Tensor):
            one_each = labels.dim() == 1 and labels.shape[0] == sizes.outer[self._last]
            sizes.one_label_each = one_each or (labels.dim() == 2 and not sources & {TOKENS, TARGET})
        else:
            sizes.one_label_each = not sources & {TOKENS, TARGET}
        return sizes

    def _items(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Mapping):
            return batch
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        if not isinstance(batch, (tuple, list)):
            raise BatchError(
                "a batch is a mapping of keyword arguments or a tuple of positional ones; "
                f"got {type(batch).__name__}"
            )
        names = self._arguments
        return {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(batch)}

    def _tokens(self, items: Mapping[str, Any], sizes: Sizes) -> None:
        ids = _named(items, _TOKENS)
        if ids is None:
            ids = next((t for t in _inputs(items) if not t.is_floating_point() and t.dim() <= 2), None)
        if ids is None:
            return
        samples, length = (1, ids.shape[0]) if ids.dim() == 1 else ids.shape[:2]
        sizes.outer[TOKENS], sizes.dims[TOKENS] = samples, (length,)
        self._documents(items, sizes, samples, length)

    def _documents(self, items: Mapping[str, Any], sizes: Sizes, samples: int, length: int) -> None:
        """Packed documents, if their lengths can be read without waiting for a GPU."""
        key = next((k for k in (*CUMULATIVE, "position_ids") if isinstance(items.get(k), torch.Tensor)), None)
        sizes.executed_apart = key in CUMULATIVE or self._documents_apart
        if key is None:
            return
        tensor = items[key]
        if tensor.device.type == "cpu":
            lengths = documents_in({key: tensor, "attention_mask": items.get("attention_mask")})
            sizes.documents = rows_of_documents(lengths, samples)
        elif key == "position_ids":
            if tensor.dim() <= 2:
                sizes.notes.append("each row counts as one document: its position ids are not on the CPU")
        elif tensor.numel() > 1:
            count = tensor.numel() - 1
            whole = samples * length
            each = [whole // count + (i < whole % count) for i in range(count)]
            sizes.documents = [each]
            sizes.notes.append(
                f"{count} packed documents are assumed to be equally long: their lengths are not on the CPU"
            )

    def _pixels(self, items: Mapping[str, Any], sizes: Sizes) -> None:
        dims = self._dims[PIXELS]
        outer, patches, grids = 0, 0, []
        cut = False
        for grid_key, key in GRIDS.items():
            value, grid = items.get(key), items.get(grid_key)
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                value = _stacked(value)
            if value is None:
                images = len(items[key]) if isinstance(items[key], (list, tuple)) else 1
                warn_once(
                    f"the size of the images in {key} is unknown: {DEFAULT_PATCHES} visual tokens "
                    "are assumed for each"
                )
                cut, outer, patches = True, outer + images, patches + DEFAULT_PATCHES * images
            elif value.dim() <= 2 or isinstance(grid, torch.Tensor):
                cut = True
                outer += grid.shape[0] if isinstance(grid, torch.Tensor) else 1
                patches += prod(value.shape[:-1])
                if isinstance(grid, torch.Tensor) and grid.device.type == "cpu":
                    grids += grids_of(items, grid_key)
                else:
                    sizes.notes.append(
                        f"images in {key} are assumed to be equally large: their grids were not read"
                    )
            else:
                outer += prod(value.shape[: max(value.dim() - dims - 1, 1)])
                sizes.dims[PIXELS] = tuple(value.shape[-dims:])
        if outer == 0 and TOKENS not in self._sources:
            picture = next((t for t in _inputs(items) if t.is_floating_point() and t.dim() > dims), None)
            if picture is not None:
                outer = prod(picture.shape[: max(picture.dim() - dims - 1, 1)])
                sizes.dims[PIXELS] = tuple(picture.shape[-dims:])
        sizes.outer[PIXELS] = outer
        if cut:
            sizes.patches, sizes.grids = patches, grids

    def _frames(self, items: Mapping[str, Any], sizes: Sizes) -> None:
        sound = _named(items, _FRAMES)
        if sound is None and TOKENS not in self._sources:
            sound = next((t for t in _inputs(items) if t.is_floating_point() and t.dim() >= 2), None)
        if sound is not None:
            sizes.outer[FRAMES], sizes.dims[FRAMES] = sound.shape[0], (sound.shape[-1],)

    def _features(self, items: Mapping[str, Any], sizes: Sizes) -> None:
        tensor = next((t for t in _inputs(items) if t.is_floating_point()), None)
        if tensor is not None:
            sizes.outer[FEATURES], sizes.dims[FEATURES] = self._as_features(tensor)

    def _as_features(self, tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        shape, width = tuple(tensor.shape), self._features_in or tensor.shape[-1]
        elements = prod(shape)
        if elements % width:
            raise BatchError(f"the first layer of {self._name} takes {width} features; the batch has {shape}")
        if len(shape) == 3 and self._sequence_first:
            return shape[1], (shape[0],)
        outer = shape[0] if len(shape) > 1 else 1
        return outer, (elements // width // max(outer, 1),)

    def _target(self, items: Mapping[str, Any], sizes: Sizes) -> None:
        target = _named(items, _TARGET)
        if target is None:
            inputs = list(_inputs(items))
            target = inputs[1] if len(inputs) > 1 else None
        if target is None:
            return
        if target.is_floating_point() and target.dim() == 3:
            sizes.outer[TARGET], sizes.dims[TARGET] = self._as_features(target)
        elif target.dim() == 2:
            sizes.outer[TARGET], sizes.dims[TARGET] = target.shape[0], (target.shape[1],)


def _named(items: Mapping[str, Any], names: tuple[str, ...]) -> torch.Tensor | None:
    for name in names:
        value = items.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    return None


def _inputs(items: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors whose names mark them as inputs: not masks, labels or positions."""
    for name, value in items.items():
        if isinstance(value, torch.Tensor) and value.dim() and not any(word in name for word in _NO_INPUT):
            yield value


def _stacked(value: Any) -> torch.Tensor | None:
    """A list of equally large images as one tensor without data; None for anything else."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, torch.Tensor) for v in value):
        return None
    shapes = {tuple(v.shape) for v in value}
    return torch.empty(len(value), *shapes.pop(), device="meta") if len(shapes) == 1 else None
