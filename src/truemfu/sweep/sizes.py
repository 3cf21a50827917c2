"""The sizes of the reference models: plain numbers, so that they can be read without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The dimensions of one reference model."""

    vocab: int
    hidden: int
    layers: int
    heads: int


SIZES: Mapping[str, ModelSize] = MappingProxyType(
    {
        "tiny": ModelSize(vocab=1_000, hidden=64, layers=2, heads=4),
        "small": ModelSize(vocab=8_000, hidden=256, layers=4, heads=8),
        "medium": ModelSize(vocab=16_000, hidden=512, layers=8, heads=8),
        "1b": ModelSize(vocab=32_000, hidden=2_048, layers=24, heads=32),
    }
)
