"""How many rows a layer processes: functions of a batch's shapes, found without running anything.

    batch ──► Sizes: tokens are (2, 512), pixels are (3, 224, 224) …
    Stream ──► rows and query-key pairs that a layer at this point of the model processes

A stream starts at one of the batch's inputs and is changed by the layers it passes: strides shorten it, a
class token lengthens it, a merger divides it, pooling leaves one row for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..attention.pairs import Band

TOKENS, TARGET, PIXELS, FRAMES, FEATURES = "tokens", "target", "pixels", "frames", "features"
"""Where a stream starts: token ids, a decoder's ids, images, audio, or generic features."""


@dataclass(frozen=True)
class FixedSize:
    """A dimension after adaptive pooling: the same for every input."""

    size: int

    def __call__(self, size: int) -> int:
        return self.size


@dataclass(frozen=True)
class Strided:
    """A dimension after a convolution that changes the size only by its stride."""

    stride: int

    def __call__(self, size: int) -> int:
        return -(-size // self.stride)


@dataclass(frozen=True)
class Padded:
    """A dimension with positions added at its ends."""

    positions: int

    def __call__(self, size: int) -> int:
        return size + self.positions


@dataclass(slots=True)
class Sizes:
    """The sizes of one batch for each source: how many sequences or images, and the size of each.

    `patches` and `grids` are those of images given as patches; `documents` are the lengths of the documents
    packed into each row, `executed_apart` states that pairs between documents are not executed either.
    """

    outer: dict[str, int] = field(default_factory=dict)
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    patches: int | None = None
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    documents: list[list[int]] | None = None
    executed_apart: bool = False
    one_label_each: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stream:
    """A point in the model, as a function of the batch: `outer` sequences of `positions` each."""

    source: str
    steps: tuple[tuple[Callable[[int], int], ...], ...] = ((),)
    """The steps that have changed each dimension so far."""
    extra: int = 0
    """Positions added to each sequence: class and register tokens."""
    merged: int = 1
    """How many neighbouring positions were merged into one."""
    pooled: bool = False
    """Whether one row is left per sequence."""
    head: bool = False
    """Whether one row is left per sequence if the batch has one label for each."""

    def outer(self, sizes: Sizes) -> int:
        return sizes.outer.get(self.source, 0)

    def positions(self, sizes: Sizes) -> int:
        """Positions of one sequence; images given as patches differ in size: use `rows`."""
        if self.pooled or (self.head and sizes.one_label_each):
            return 1
        dims = sizes.dims.get(self.source, ())
        total = 1
        for size, steps in zip(dims, self.steps, strict=False):
            for step in steps:
                size = step(size)
            total *= size
        return (total + self.extra) // self.merged

    def rows(self, sizes: Sizes) -> int:
        if self.source == PIXELS and sizes.patches is not None:
            if self.pooled or (self.head and sizes.one_label_each):
                return self.outer(sizes)
            return sizes.patches // self.merged
        return self.outer(sizes) * self.positions(sizes)


class Quantity:
    """A quantity that FLOPs are proportional to."""

    def of(self, sizes: Sizes) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Rows(Quantity):
    """Rows of a stream."""

    stream: Stream

    def of(self, sizes: Sizes) -> int:
        return self.stream.rows(sizes)


@dataclass(frozen=True)
class Sequences(Quantity):
    """Sequences of a stream; with `other`, pairs with every sequence of that stream."""

    stream: Stream
    other: Stream | None = None

    def of(self, sizes: Sizes) -> int:
        return self.stream.outer(sizes) * (1 if self.other is None else self.other.outer(sizes))


@dataclass(frozen=True)
class Chunks(Quantity):
    """Chunks of a stream's sequences, the last one padded; or pairs of chunks, with one more chunk each."""

    stream: Stream
    chunk: int
    pairs: bool = False

    def of(self, sizes: Sizes) -> int:
        chunks = -(-self.stream.positions(sizes) // self.chunk)
        return self.stream.outer(sizes) * ((chunks + 1) ** 2 if self.pairs else chunks)


@dataclass(frozen=True)
class SelfPairs(Quantity):
    """Query-key pairs under a band, document by document; with `executed`, those that a kernel computes.

    `window` is the side, in patches, of the squares within which patches of an image attend to one another.
    """

    stream: Stream
    band: Band
    window: int | None = None
    executed: bool = False

    def of(self, sizes: Sizes) -> int:
        stream = self.stream
        if stream.source == PIXELS and sizes.patches is not None:
            return self._pairs_of_patches(sizes)
        if self.window is not None:
            return stream.rows(sizes) * min(self.window**2, stream.positions(sizes))
        pairs = self.band.pairs
        if stream.source == TOKENS and sizes.documents is not None and not stream.merged > 1:
            rows = sizes.documents
            if self.executed and not sizes.executed_apart:
                return sum(pairs(sum(row)) for row in rows)
            return sum(pairs(n) for row in rows for n in row)
        return stream.outer(sizes) * pairs(stream.positions(sizes))

    def _pairs_of_patches(self, sizes: Sizes) -> int:
        side = self.window
        if not sizes.grids:
            each = sizes.patches or 0
            images = max(self.stream.outer(sizes), 1)
            return each * each // images if side is None else each * min(side * side, each // images)
        if side is None:
            return sum(t * (h * w) ** 2 for t, h, w in sizes.grids)
        return sum(t * _squares(h, side) * _squares(w, side) for t, h, w in sizes.grids)


@dataclass(frozen=True)
class CrossPairs(Quantity):
    """Pairs of the queries of one stream and the keys of another, sample by sample."""

    queries: Stream
    keys: Stream

    def of(self, sizes: Sizes) -> int:
        samples = max(self.queries.outer(sizes), 1)
        return self.queries.rows(sizes) * self.keys.rows(sizes) // samples


def _squares(n: int, side: int) -> int:
    """Σ p² over the parts of n cut into windows."""
    return n // side * side * side + (n % side) ** 2


def rows_of_documents(documents: Sequence[Sequence[int]] | None, samples: int) -> list[list[int]] | None:
    """Documents for each sample; one row of position ids may apply to all samples."""
    if documents is None:
        return None
    times = max(samples // len(documents), 1)
    return [list(row) for row in documents for _ in range(times)]
