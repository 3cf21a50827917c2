"""The batch of a group of ranks among which context parallelism splits each sequence.

    a rank's batch          samples × length ÷ ranks, whose queries attend to keys of the whole sequence
    the group's batch       samples × length: its count is the group's work, each pair of tokens once

Only shapes are taken over: a rank's tokens are an arbitrary part of the sequence (with load balancing its
first and last piece). Rows are taken to be whole documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .dimension_names import DimensionNames, Key

_LENGTH = "length"


def has_whole_sequences(batch: Mapping[Any, Any]) -> bool:
    """Whether `whole_sequences` can be applied: all tensors are of samples and tokens, not packed."""
    dimensions = _dimensions(batch)
    names = {name for dims in dimensions.values() for name in dims if isinstance(name, str)}
    return _LENGTH in names and names <= {"samples", _LENGTH}


def whole_sequences(batch: Mapping[Any, Any], parts: int) -> dict[Any, Any]:
    """The batch without values, with sequences that are `parts` times as long."""
    made = dict(batch)
    for key, dims in _dimensions(batch).items():
        tensor = batch[key]
        shape = [n * parts if name == _LENGTH else n for n, name in zip(tensor.shape, dims, strict=True)]
        made[key] = torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
    return made


def _dimensions(batch: Mapping[Any, Any]) -> dict[Key, tuple[str | int, ...]]:
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    names = DimensionNames(None, tensors, is_mapping=not any(isinstance(key, int) for key in tensors))
    return {key: names.dims(key) for key in tensors}
