"""How many pairs of an attention call count, given the convention, the masks and the documents.

    scores of (samples, heads, queries, keys), masks, documents ──► pairs needed, pairs executed

These differ only for packed rows: a dense kernel also executes the pairs between documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ...convention import Convention
from ...torch_private.dispatch import disable_modes
from ..shadow.values import Value
from .pairs import FULL, Band, band_of_mask, document_ids

NOT_A_BAND = "an attention mask is neither causal nor a window: the pairs it allows were counted one by one"
MASK_NOT_READ = "an attention mask could not be read: all its pairs are counted"


class PairCounter:
    """Counts pairs for one run; `notes` are what limits the accuracy.

    `documents` are the lengths of packed documents, sample by sample, or None; `windows` the sliding windows
    that modules declare, by path, which a mask over short documents does not show.
    """

    def __init__(self, convention: Convention, documents: Sequence[Sequence[int]] | None) -> None:
        self.documents = documents
        self.windows: dict[str, int] = {}
        self.notes: dict[str, None] = {}
        self._causal = convention.attention == "causal"
        packed = documents is not None and any(len(row) > 1 for row in documents)
        self.masks_matter = packed or self._causal

    def packed(self, q_lengths: Sequence[int], k_lengths: Sequence[int], heads: int, band: Band) -> int:
        """Pairs of sequences that are given to a kernel separately."""
        band = band if self._causal else FULL
        return heads * sum(band.pairs(q, k) for q, k in zip(q_lengths, k_lengths, strict=True))

    def dense(
        self, shape: Sequence[int], masks: Sequence[Value | None], band: Band, module: str
    ) -> tuple[int, int]:
        """(needed, executed) pairs of scores of this shape: leading dimensions, queries, keys."""
        if not self.masks_matter:
            return prod(shape), prod(shape)
        if any(mask is None for mask in masks):
            self.notes[MASK_NOT_READ] = None
        with disable_modes(), torch.no_grad():
            allowed = _intersection([m.tensor() for m in masks if m is not None], shape)
            return self._count(shape, allowed, band, self.windows.get(module))

    def _count(
        self, shape: Sequence[int], allowed: torch.Tensor | None, band: Band, window: int | None
    ) -> tuple[int, int]:
        samples, heads = _samples_and_heads(shape)
        q_len, k_len = shape[-2:]
        documents = self._documents_of(samples, q_len, k_len, allowed)
        if not self._causal:
            needed = heads * sum(n * n for row in documents for n in row) if documents else prod(shape)
            return needed, prod(shape)
        if allowed is None or bool(allowed.all()):
            return self._banded(shape[-2:], samples, heads, band, documents)
        allowed = allowed & band.allows(torch.arange(q_len), torch.arange(k_len))
        if allowed.shape[1] > 1 and torch.equal(allowed, allowed[:, :1].expand_as(allowed)):
            allowed = allowed[:, :1]
        each = heads // allowed.shape[1]
        needed = executed = 0
        for head in allowed.unbind(1):
            found = self._band_of(head, documents, window)
            if found is None:
                self.notes[NOT_A_BAND] = None
                pairs = each * int(head.expand(samples, -1, -1).sum())
                needed, executed = needed + pairs, executed + pairs
            else:
                counted = self._banded(shape[-2:], samples, each, found, documents)
                needed, executed = needed + counted[0], executed + counted[1]
        return needed, executed

    def _banded(
        self,
        lengths: Sequence[int],
        samples: int,
        heads: int,
        band: Band,
        documents: Sequence[Sequence[int]] | None,
    ) -> tuple[int, int]:
        executed = heads * samples * band.pairs(lengths[0], lengths[1])
        needed = heads * sum(band.pairs(n) for row in documents for n in row) if documents else executed
        return needed, executed

    def _band_of(
        self, allowed: torch.Tensor, documents: Sequence[Sequence[int]] | None, window: int | None
    ) -> Band | None:
        """The band of one head, from the sample with the most allowed pairs."""
        fullest = int(allowed.flatten(1).sum(1).argmax())
        lengths = documents[fullest] if documents else [allowed.shape[-1]]
        found = band_of_mask(allowed[fullest], lengths)
        if found and found.behind is None and window and max(lengths) <= window < allowed.shape[-1]:
            return Band(behind=window - 1, ahead=found.ahead)
        return found

    def _documents_of(
        self, samples: int, q_len: int, k_len: int, allowed: torch.Tensor | None
    ) -> Sequence[Sequence[int]] | None:
        """The batch's documents if this attention separates them, else None."""
        documents = self.documents
        if documents is None or allowed is None or q_len != k_len or samples % len(documents):
            return None
        if any(sum(row) != q_len for row in documents):
            return None
        documents = [row for row in documents for _ in range(samples // len(documents))]
        for sample, lengths in enumerate(documents):
            ids = document_ids(lengths, q_len)
            view = allowed[sample if allowed.shape[0] > 1 else 0]
            if bool((view & (ids[:, None] != ids[None, :])).any()):
                return None
        return documents


def mask_of_function(
    function: Callable[..., Any], shape: Sequence[int], make: Callable[[int], torch.Tensor]
) -> torch.Tensor | None:
    """The pairs that a flex-attention mask function allows, as (samples or 1, heads or 1, queries, keys).

    `make(n)` returns the integers below n, as tensors that the function can work on. None if the function
    cannot be evaluated for all indices at once.
    """
    indices = []
    for dim, n in enumerate(shape):
        index = make(n)
        indices.append(index.reshape([-1 if i == dim else 1 for i in range(4)]))
    try:
        allowed = function(*indices)
    except Exception:  # a user's function may fail in any way; the caller adds a note that it was not read
        return None
    return allowed if isinstance(allowed, torch.Tensor) else None


def _samples_and_heads(shape: Sequence[int]) -> tuple[int, int]:
    lead = shape[:-2]
    return (prod(lead), 1) if len(lead) < 2 else (prod(lead[:-1]), lead[-1])


def _intersection(masks: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """The pairs that all masks allow, as (samples or 1, heads or 1, queries, keys)."""
    together: torch.Tensor | None = None
    for mask in masks:
        while mask.dim() > len(shape) and mask.shape[0] == 1:
            mask = mask[0]
        if mask.dim() > len(shape) or not _broadcasts(mask.shape, shape):
            continue
        mask = mask.reshape((1,) * (len(shape) - mask.dim()) + tuple(mask.shape))
        lead = mask.shape[:-2]
        if len(lead) < 2:
            mask = mask.reshape(*(lead or (1,)), 1, *mask.shape[-2:])
        elif len(lead) > 2:
            if any(n > 1 for n in lead[:-1]):
                mask = mask.expand(*shape[: len(lead) - 1], *mask.shape[-3:])
            mask = mask.flatten(0, len(lead) - 2)
        mask = mask.expand(*mask.shape[:2], *shape[-2:])
        together = mask if together is None else together & mask
    return together


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))
