"""What is noted of a call of `generate`: sizes of its forward passes and of its cache, and marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..timing.clock import TimeMark


class Pass(NamedTuple):
    """A forward pass of a model that generates; or several of one position each, one after the other."""

    number: int
    """In the observation of the step, from 1; 0 if it was not observed."""
    rows: int
    queries: int
    """Positions of each row that are computed."""
    cached: int
    """Positions of each row before them, of which keys and values are read; one more in each pass."""
    times: int = 1

    @property
    def end(self) -> int:
        """Positions that are cached after it."""
        return self.cached + self.queries + self.times - 1

    def followed_by(self, following: Pass) -> Pass | None:
        """Both as one; None if they are not alike, or were observed: then each has FLOPs of its own."""
        is_alike = self.number == following.number == 0 and self.queries == following.queries == 1
        is_next = self.rows == following.rows and self.end == following.cached and following.times == 1
        return self._replace(times=self.times + 1) if is_alike and is_next else None


class Weights(NamedTuple):
    """What each decoding step must read of a model: all but tables of embeddings, of which a few rows are."""

    bytes: int
    matrix_elements: int
    """Those of matrices: a dense model multiplies each position by all of them."""


class CacheLayer(NamedTuple):
    """Keys and values of one layer when generation ended."""

    positions: int
    bytes_per_position: int
    """Of all rows."""


@dataclass(eq=False)
class Generation:
    """One call of `generate`."""

    model: int
    """Which model: equal for calls of the same one."""
    begin: TimeMark
    weights: Weights
    is_paused: bool
    """Whether it ran in a pause, outside of the step."""
    passes: list[Pass] = field(default_factory=list)
    decode: TimeMark | None = None
    """Where the first pass of one position began."""
    end: TimeMark | None = None
    prompt: int | None = None
    """Positions of each row before the first that was generated, where they are returned too; else 0."""
    tokens: int | None = None
    """That were generated in all rows, with those after a row's end."""
    cache: Mapping[CacheLayer, int] | None = None
    """How many layers of each kind."""
    has_assistant: bool = False
    """Whether another call ran inside it, whose passes are not among these."""

    @property
    def is_whole(self) -> bool:
        """Whether all its forward passes were seen."""
        rows = self.passes[0].rows if self.passes and not self.has_assistant else 0
        return (
            bool(rows)
            and self.tokens is not None
            and sum(each.times for each in self.passes) * rows >= self.tokens
        )
