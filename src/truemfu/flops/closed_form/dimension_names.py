"""The meaning of the dimensions of a batch's tensors: samples, length, an image's height and so on.

It follows from the argument's name if that is a common one, else from its dtype and number of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch import CUMULATIVE, GRIDS

Key = str | int

_TOKENS = ("samples", "length")
_NAMED: Mapping[str, tuple[str | None, ...]] = {
    "input_ids": _TOKENS,
    "attention_mask": _TOKENS,
    "token_type_ids": _TOKENS,
    "mm_token_type_ids": _TOKENS,
    "position_ids": _TOKENS,
    "labels": _TOKENS,
    "loss_mask": _TOKENS,
    "inputs_embeds": ("samples", "length", None),
    "decoder_input_ids": ("samples", "decoder_length"),
    "decoder_attention_mask": ("samples", "decoder_length"),
    "input_features": ("samples", None, "frames"),
    "input_values": ("samples", "frames"),
    "pixel_values": ("images", None, "height", "width"),
}
_BY_DIMS: Mapping[tuple[bool, int], tuple[str | None, ...]] = {  # (floating point, dimensions)
    (False, 1): ("samples",),
    (False, 2): _TOKENS,
    (True, 1): ("samples",),
    (True, 2): ("samples", None),
    (True, 3): ("samples", "length", None),
    (True, 4): ("samples", None, "height", "width"),
    (True, 5): ("samples", None, "frames", "height", "width"),
}


class DimensionNames:
    """Names the dimensions of an example's tensors."""

    def __init__(self, config: Any, tensors: Mapping[Key, torch.Tensor], is_mapping: bool) -> None:
        self._config, self._tensors, self._is_mapping = config, tensors, is_mapping
        self._flat_tokens = self._length_of_flat_row() if is_mapping else None

    def _length_of_flat_row(self) -> int | None:
        """How many tokens are packed into one row without a dimension for samples, if they are."""
        tokens = self._tensors.get("input_ids")
        has_documents = any(key in self._tensors for key in (*CUMULATIVE, "position_ids"))
        return int(tokens.shape[0]) if tokens is not None and tokens.dim() == 1 and has_documents else None

    def dims(self, key: Key) -> tuple[str | int, ...]:
        shape = tuple(int(n) for n in self._tensors[key].shape)
        if key in CUMULATIVE:
            return ("_documents",)
        if key in GRIDS:
            return ("_grids", 3)
        if key in GRIDS.values() and any(pixels == key for g, pixels in GRIDS.items() if g in self._tensors):
            return ("_patches", *shape[1:])
        names = self._names(key, shape)
        return tuple(n if n is not None else shape[i] for i, n in enumerate(names))

    def _names(self, key: Key, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        if self._flat_tokens is not None and self._flat_tokens in shape[:2]:
            return tuple("length" if n == self._flat_tokens and i < 2 else None for i, n in enumerate(shape))
        names = _NAMED.get(str(key)) if self._is_mapping else None
        if names is not None and len(names) != len(shape):
            names = ("samples",) if len(shape) == 1 and key == "labels" else None
            if key == "position_ids" and len(shape) == 3:  # time, height and width of each token
                names = (None, *_TOKENS)
        if names is None:
            floating = self._tensors[key].is_floating_point()
            names = _BY_DIMS.get((floating, len(shape)), (None,) * len(shape))
        tokens = self._tensors.get("input_ids")
        if key == "labels" and names == _TOKENS and self._labels_are_decoded(shape):
            return ("samples", "decoder_length")
        if key == "pixel_values" and tokens is None:
            return ("samples", *names[1:])
        if key == "position_ids" and shape[0] == 1 and self._has_several_samples():
            return (None, *names[1:])
        return names

    def _has_several_samples(self) -> bool:
        held = (self._tensors.get(key) for key in ("input_ids", "inputs_embeds", "hidden_states"))
        return any(tensor is not None and tensor.dim() > 1 and tensor.shape[0] != 1 for tensor in held)

    def _labels_are_decoded(self, shape: tuple[int, ...]) -> bool:
        """Labels of an encoder-decoder are as long as the decoder's input, not the encoder's."""
        tokens = self._tensors.get("input_ids", self._tensors.get("inputs_embeds"))
        other = tokens is None or tuple(tokens.shape[:2]) != shape
        return bool(getattr(self._config, "is_encoder_decoder", False)) or other
