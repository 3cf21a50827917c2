"""Notes on the pairs outside sliding windows, for the convention that counts all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ..batch import documents_of
from .pairs import Band


def sliding_window(config: Any, module: nn.Module) -> int | None:
    """How many tokens a token of this attention layer sees on one side, itself included; None: all."""
    if hasattr(module, "sliding_window"):
        own = module.sliding_window
        return own if isinstance(own, int) and own > 0 else None
    layers, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if isinstance(layers, (list, tuple)) and isinstance(index, int) and layers[index] != "sliding_attention":
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


class Windows:
    """The sliding windows of a model's attention layers, as stated by their modules.

    An attention layer is a module that states whether it `is_causal`, or its own `sliding_window`. Under a
    convention that counts only the pairs inside the window there are no notes.
    """

    def __init__(self, model: nn.Module, convention: Convention) -> None:
        self._bands: Counter[Band] = Counter()
        self._layers = 0
        if convention.attention != "full":
            return
        found = {m: None for m in model.modules() if _is_attention(m)}
        for module in found:
            if any(inner in found for inner in module.modules() if inner is not module):
                continue  # a layer around the attention states the window too
            self._layers += 1
            config = getattr(module, "config", getattr(model, "config", None))
            window = sliding_window(config, module)
            if window is not None:
                is_causal = getattr(module, "is_causal", True)
                self._bands[Band(behind=window - 1, ahead=0 if is_causal else window - 1)] += 1

    def notes_for_batch(self, batch: Any) -> tuple[str, ...]:
        """Notes on the count of this batch."""
        return self._notes(_lengths_of(batch)) if self._bands else ()

    def _notes(self, lengths: Sequence[int]) -> tuple[str, ...]:
        """A note for each window that is smaller than one of these sequences."""
        longest, every = max(lengths, default=0), sum(n * n for n in lengths)
        return tuple(
            f"attention counts all pairs, also those outside a sliding window: in {layers} of {self._layers} "
            f"attention layers a token sees at most {band.behind + 1:,} tokens {_side(band)}, and the mask "
            f"allows {sum(map(band.pairs, lengths)) / every:.1%} of the pairs of sequences of "
            f"{_up_to(lengths)} tokens; the causal convention counts only those"
            for band, layers in sorted(self._bands.items())
            if band.behind is not None and band.behind + 1 < longest
        )


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "is_causal", None), bool) or hasattr(module, "sliding_window")


def _side(band: Band) -> str:
    return "(itself and those before it)" if band.ahead == 0 else "to each side"


def _up_to(lengths: Sequence[int]) -> str:
    longest = f"{max(lengths):,}"
    return longest if min(lengths) == max(lengths) else f"up to {longest}"


def _lengths_of(batch: Any) -> list[int]:
    """The lengths of a batch's documents, or of its rows."""
    documents = documents_of(batch)
    if documents is not None:
        return [n for row in documents for n in row]
    values = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    named = [values.get(key) for key in ("input_ids", "inputs_embeds", 0)]
    tensors = [t for t in named if isinstance(t, torch.Tensor) and not t.is_nested and t.dim() >= 2]
    return [int(tensors[0].shape[1])] if tensors else []
