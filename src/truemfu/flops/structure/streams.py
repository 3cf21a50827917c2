"""How many rows and query-key pairs a layer processes, as functions of a batch's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ..attention.pairs import Band

TOKENS, TARGET, SIGNAL, FEATURES = "token ids", "a decoder's token ids", "images or audio", "features"
"""The inputs that a stream may start at."""

Sizes = Mapping[str, Mapping[int, int]]
"""For each input of a batch: how many sequences or images of each length there are."""


@dataclass(frozen=True)
class Stream:
    """Rows at one point of the model."""

    source: str
    stride: Fraction = Fraction(1)
    """How many positions of the input there are for each row."""
    extra: int = 0
    """Rows added to each sequence: class and register tokens."""
    pooled: bool = False
    """Whether one row is left of each sequence."""

    def of(self, sizes: Sizes) -> int:
        """Rows of all sequences."""
        return sum(self.rows(length) * count for length, count in sizes.get(self.source, {}).items())

    def rows(self, length: int) -> int:
        """Rows of a sequence of this length in the batch."""
        return 1 if self.pooled else int(length / self.stride) + self.extra


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs of an attention layer."""

    queries: Stream
    keys: Stream | None
    """Another stream that is attended to; None for self-attention."""
    band: Band
    window: int | None
    """How many patches attend to one another, if they are confined to windows."""

    def of(self, sizes: Sizes) -> int:
        """Pairs of all sequences."""
        lengths = sizes.get(self.queries.source, {})
        if self.keys is not None:
            return self.queries.of(sizes) * self.keys.of(sizes) // max(sum(lengths.values()), 1)
        return sum(self._pairs(self.queries.rows(length)) * count for length, count in lengths.items())

    def _pairs(self, rows: int) -> int:
        return self.band.pairs(rows) if self.window is None else rows * min(self.window, rows)
