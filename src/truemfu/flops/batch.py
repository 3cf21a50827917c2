"""What a batch holds: samples, tokens, documents, images. Read from shapes where they tell, from values where
they must be read (masks, packed positions, image grids).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CUMULATIVE = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seqlens_q")
GRIDS = ("image_grid_thw", "video_grid_thw")


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """A batch in numbers. `tokens` are all positions, padding included; `useful_tokens` those that an
    attention mask keeps (all of them without a mask), or None where the mask cannot be read."""

    samples: int
    tokens: int
    useful_tokens: int | None
    documents: tuple[tuple[int, ...], ...]
    grids: tuple[tuple[int, int, int], ...]

    @property
    def squared_lengths(self) -> int:
        """Σ L² over the documents."""
        return sum(n * n for row in self.documents for n in row)

    @property
    def visual_patches(self) -> int:
        """Σ t·h·w over images and videos."""
        return sum(t * h * w for t, h, w in self.grids)

    @property
    def padding_efficiency(self) -> float | None:
        """Useful tokens over all tokens."""
        return None if self.useful_tokens is None or not self.tokens else self.useful_tokens / self.tokens

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> BatchShape | None:
        """The numbers of a batch with `input_ids` or `inputs_embeds`; None for a batch without tokens."""
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor):
            ids = batch.get("inputs_embeds")
        if not isinstance(ids, torch.Tensor):
            return None
        samples, length = (1, ids.shape[0]) if ids.dim() == 1 else (ids.shape[0], ids.shape[1])
        mask = batch.get("attention_mask")
        useful: int | None = samples * length
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            useful = int(mask.ne(0).sum()) if is_readable(mask) else None
        documents = documents_of(batch) or [[length]] * samples
        return cls(
            samples=samples,
            tokens=samples * length,
            useful_tokens=useful,
            documents=tuple(tuple(row) for row in documents),
            grids=tuple(grid for key in GRIDS for grid in grids_of(batch, key)),
        )


def is_readable(tensor: Any) -> bool:
    """Whether a tensor has values."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def grids_of(batch: Mapping[str, Any], key: str) -> list[tuple[int, int, int]]:
    """The (t, h, w) grids of a batch's images or videos, in patches."""
    grid: Any = batch.get(key)
    return [(t, h, w) for t, h, w in grid.tolist()] if is_readable(grid) else []


def documents_of(batch: Any) -> list[list[int]] | None:
    """The lengths of the documents packed into each row, or None where nothing says that rows are packed.

    Read from cumulative lengths, or from positions: a document starts wherever a position does not follow
    the one before.
    """
    if not isinstance(batch, Mapping):
        return None
    for key in _CUMULATIVE:
        if is_readable(batch.get(key)) and batch[key].dim() == 1:
            ends = batch[key].tolist()
            return [[b - a for a, b in itertools.pairwise(ends) if b > a]]
    positions: Any = batch.get("position_ids")
    if not is_readable(positions) or positions.dim() not in (1, 2):
        return None
    rows = [lengths_of_positions(row) for row in (positions if positions.dim() == 2 else positions[None])]
    return rows if any(len(row) > 1 for row in rows) else None


def lengths_of_positions(positions: torch.Tensor) -> list[int]:
    """Lengths of the stretches in which each position is the one before plus one."""
    starts = torch.nonzero(positions.diff() != 1).flatten().add(1).tolist()
    borders: Sequence[int] = [0, *starts, positions.numel()]
    return [b - a for a, b in itertools.pairwise(borders)]
