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
    if not bool(allowed.any()):
        return None
    distance = torch.arange(q_len)[:, None] - torch.arange(k_len)[None, :]
    seen = allowed.any(0)
    rows = seen if q_len == k_len else torch.ones(q_len, dtype=torch.bool)
    if q_len == k_len and len(documents) > 1:
        ids = document_ids(documents, q_len)
        same = ids[:, None] == ids[None, :]
    else:
        same = torch.ones_like(allowed)
    view = allowed[rows][:, seen]
    span = distance[rows][:, seen]
    if not bool(view.any()):
        return None
    furthest, nearest = int(span[view].max()), int(span[view].min())
    expected = same[rows][:, seen] & (span <= furthest) & (span >= nearest)
    if not torch.equal(view, expected):
        return None
    possible = span[same[rows][:, seen]]
    return Band(
        behind=None if furthest >= int(possible.max()) else furthest,
        ahead=None if nearest <= int(possible.min()) else -nearest,
    )
