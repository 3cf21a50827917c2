"""The sizes an estimate needs, from a batch's shapes; values are read only from small CPU tensors.

Common arguments are recognised by name, others by dtype: integers are token ids, floating point tensors are
images, audio or features, whichever the model's first layer takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...errors import BatchError, warn_once
from ..batch import CUMULATIVE, GRIDS, documents_in, grids_of
from .walk import FEATURES, SIGNAL, TARGET, TOKENS, Sizes, Walk

Batch = Mapping[str, Any]
DEFAULT_PATCHES = 576
_TOKENS = ("input_ids", "inputs_embeds", "tokens", "idx", "src")
_TARGET = ("decoder_input_ids", "decoder_inputs_embeds", "labels", "tgt")
_AUDIO = ("input_features", "input_values", "audio_values")
_NO_INPUT = ("mask", "label", "position", "type_ids", "target", "weight", "cache", "past")


def sizes_of(batch: Batch, walk: Walk) -> tuple[Sizes, list[str]]:
    """The sizes of the inputs that a model's layers take, and notes on what had to be assumed."""
    notes: list[str] = []
    readers = {
        TOKENS: lambda: _tokens(batch),
        SIGNAL: lambda: _signal(batch, walk, notes),
        FEATURES: lambda: _rows(_find(batch, (), floating=True), walk),
        TARGET: lambda: _rows(_find(batch, _TARGET), walk),
    }
    sizes = {source: readers[source]() for source in walk.sources}
    optional = SIGNAL if TOKENS in walk.sources else None
    missing = [source for source, lengths in sizes.items() if not lengths and source != optional]
    if missing:
        keys = ", ".join(map(str, batch)) or "nothing"
        raise BatchError(f"the model takes {' and '.join(missing)}; the batch has {keys}")
    return sizes, notes


def _tokens(batch: Batch) -> Counter[int]:
    """Rows of text, or the documents packed into them if their lengths are on the CPU."""
    ids = _find(batch, _TOKENS, floating=False)
    if ids is None:
        return Counter()
    samples, length = (1, ids.shape[0]) if ids.dim() == 1 else ids.shape[:2]
    given = {key: batch.get(key) for key in (*CUMULATIVE, "position_ids", "attention_mask")}
    documents = documents_in({k: t for k, t in given.items() if str(getattr(t, "device", "")) == "cpu"})
    if documents is not None:
        times = max(samples // len(documents), 1)  # one row of position ids may apply to all samples
        return Counter([n for row in documents for n in row] * times)
    return Counter({length: samples})


def _signal(batch: Batch, walk: Walk, notes: list[str]) -> Counter[int]:
    """Images, whole or cut into patches, or audio; their positions are pixels or samples."""
    patches: list[int] = []
    for grid_key, key in GRIDS.items():
        value, grid = batch.get(key), batch.get(grid_key)
        if isinstance(value, torch.Tensor) and isinstance(grid, torch.Tensor):
            grids = grids_of(batch, grid_key) if grid.device.type == "cpu" else []
            patches += [h * w for t, h, w in grids for _ in range(t)]
            if not grids:
                patches += [prod(value.shape[:-1]) // len(grid)] * len(grid)
                notes.append(f"images in {key} are assumed to be equally large: their grids were not read")
        elif value is not None and not isinstance(value, torch.Tensor):
            warn_once(
                f"the size of the images in {key} is unknown: {DEFAULT_PATCHES} visual tokens "
                "are assumed for each"
            )
            patches += [DEFAULT_PATCHES] * (len(value) if isinstance(value, (list, tuple)) else 1)
    if patches:
        return Counter(int(n * walk.patch_size) for n in patches)
    signal = _find(batch, (*GRIDS.values(), *_AUDIO), floating=None if TOKENS in walk.sources else True)
    if signal is None:
        return Counter()
    outer = max(signal.dim() - walk.signal_dims - 1, 1)
    return Counter({prod(signal.shape[-walk.signal_dims :]): prod(signal.shape[:outer])})


def _rows(tensor: torch.Tensor | None, walk: Walk) -> Counter[int]:
    """Rows of features, or the text of a decoder as token ids or features."""
    if tensor is None:
        return Counter()
    shape = tuple(tensor.shape)
    width = (walk.features_in or shape[-1]) if tensor.is_floating_point() else 1
    if prod(shape) % width:
        raise BatchError(f"the model's first layer takes {width} features; the batch has {shape}")
    samples = 1 if len(shape) == 1 else shape[walk.sequence_first and len(shape) == 3]
    return Counter({prod(shape) // width // max(samples, 1): samples})


def _find(batch: Batch, names: Sequence[str], *, floating: bool | None = None) -> torch.Tensor | None:
    """The first tensor of these names; else, of this dtype, the first that is no mask, label or position."""
    tensors = {name: t for name, t in batch.items() if isinstance(t, torch.Tensor) and t.dim()}
    named = next((tensors[name] for name in names if name in tensors), None)
    if named is not None or floating is None:
        return named
    inputs = (t for name, t in tensors.items() if not any(word in name for word in _NO_INPUT))
    return next((t for t in inputs if t.is_floating_point() == floating), None)
