"""How many query-key pairs an attention mask allows: exact integers, no tensors stored.

A mask that depends only on the distance between query and key is a `Band`: full, causal, sliding window in
one direction or both. A closed form needs the band, which gives the pairs for every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


@dataclass(frozen=True, order=True)
class Band:
    """A query at position i sees the keys from i − behind to i + ahead; None is unbounded.

    `Band()` is full attention, `Band(ahead=0)` causal, `Band(behind=w - 1, ahead=0)` a causal window of w.
    """

    behind: int | None = None
    ahead: int | None = None

    def allows(self, queries: Any, keys: Any) -> Any:
        """Which of these queries see which keys, both given by position as tensors of integers."""
        import torch

        inside = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if self.behind is not None:
            inside &= keys >= queries[:, None] - self.behind
        if self.ahead is not None:
            inside &= keys <= queries[:, None] + self.ahead
        return inside

    def pairs(self, q_len: int, k_len: int | None = None) -> int:
        """Pairs allowed between q_len queries and k_len keys (default: q_len), aligned at the first position.

        For a square the excluded pairs are two triangles: L² − T(L−1−behind) − T(L−1−ahead), with
        T(n) = n(n+1)/2.
        """
        if k_len is None or k_len == q_len:
            total = q_len * q_len
            if self.behind is not None:
                total -= _triangle(q_len - 1 - self.behind)
            if self.ahead is not None:
                total -= _triangle(q_len - 1 - self.ahead)
            return total
        if self.behind is None and self.ahead is None:
            return q_len * k_len
        return sum(
            max(
                0,
                (k_len if self.ahead is None else min(k_len, i + self.ahead + 1))
                - (0 if self.behind is None else max(0, i - self.behind)),
            )
            for i in range(q_len)
        )

    def blocked_pairs(self, q_len: int, k_len: int, block: int = 128) -> int:
        """Pairs in the square blocks that contain an allowed one: what a fused kernel executes.

        Blocks that cross the band's edge or extend past the last query or key are executed completely.
        """
        blocks = 0
        for first in range(0, q_len, block):
            last = min(first + block, q_len) - 1
            first_key = 0 if self.behind is None else max(0, first - self.behind)
            last_key = k_len - 1 if self.ahead is None else min(k_len - 1, last + self.ahead)
            if first_key <= last_key:
                blocks += last_key // block - first_key // block + 1
        return blocks * block * block


FULL, CAUSAL = Band(), Band(ahead=0)


def document_ids(documents: Sequence[int], length: int) -> Any:
    """The index of each position's document, as a tensor of `length` integers."""
    import torch

    return torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[:length]


def band_of_mask(allowed: Any, documents: Sequence[int]) -> Band | None:
    """The band of a boolean (queries × keys) mask, ignoring padding and document borders.

    Keys that no query sees are padding, and so are the queries at the same positions. Returns None for a mask
    that is not a band (a prefix, blocks, a tree).
    """
    import torch

    q_len, k_len = allowed.shape
    seen = allowed.any(0)
    rows = seen if q_len == k_len else torch.ones(q_len, dtype=torch.bool)
    view = allowed[rows][:, seen]
    sees = view.any(1)
    if not bool(sees.any()):
        return None
    queries, keys = rows.nonzero()[:, 0], seen.nonzero()[:, 0]
    first = keys[view.view(torch.uint8).argmax(1)]
    last = keys[-1 - view.flip(1).view(torch.uint8).argmax(1)]
    furthest, nearest = int((queries - first)[sees].max()), int((queries - last)[sees].min())
    expected = Band(behind=furthest, ahead=-nearest).allows(queries, keys)
    longest, shortest = int(queries[-1] - keys[0]), int(queries[0] - keys[-1])
    if q_len == k_len and len(documents) > 1:
        ids = document_ids(documents, q_len)[keys]  # the queries are at the same positions
        expected &= ids[:, None] == ids[None, :]
        longest = max(int(keys[ids == n][-1] - keys[ids == n][0]) for n in ids.unique())
        shortest = -longest
    if not torch.equal(view, expected):
        return None
    return Band(
        behind=None if furthest >= longest else furthest, ahead=None if nearest <= shortest else -nearest
    )
