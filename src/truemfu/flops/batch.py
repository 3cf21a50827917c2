"""Packed documents and image grids of a batch, which only its values show."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ..torch_private.dispatch import FakeTensor
from ..torch_private.trees import tree_leaves
from .host_copy import on_host

CUMULATIVE = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k")
"""Arguments that hold cumulative lengths of packed documents."""

GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
"""Arguments that hold image grids (t, h, w) in patches, and the arguments that hold those patches."""


def is_readable(tensor: Any) -> bool:
    """Whether this is a tensor whose values can be read."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def grids_of(batch: Mapping[str, Any], key: str) -> list[tuple[int, int, int]]:
    """The (t, h, w) grids of a batch's images or videos, in patches."""
    grid: Any = batch.get(key)
    return [(t, h, w) for t, h, w in on_host(grid).tolist()] if is_readable(grid) else []


def documents_of(batch: Any) -> list[list[int]] | None:
    """The lengths of the documents packed into each row, or None if nothing shows that rows are packed.

    Batches inside the batch are searched too: `model(batch)` has one as its first argument.
    """
    if isinstance(batch, Mapping):
        found = documents_in(batch)
        if found is not None:
            return found
        batch = tuple(batch.values())
    if not isinstance(batch, (tuple, list)):
        return None
    inner = (documents_of(part) for part in batch if isinstance(part, Mapping))
    return next((found for found in inner if found is not None), None)


def documents_in(batch: Mapping[Any, Any]) -> list[list[int]] | None:
    """The same from this mapping's own arguments, without batches inside it.

    Read from cumulative lengths, or from position ids: a document starts wherever a position id is not the
    previous one plus one.
    """
    for key in CUMULATIVE:
        if is_readable(batch.get(key)) and batch[key].dim() == 1:
            ends = on_host(batch[key]).tolist()
            return [[b - a for a, b in itertools.pairwise(ends) if b > a]]
    positions: Any = batch.get("position_ids")
    if not is_readable(positions) or positions.dim() not in (1, 2):
        return None
    mask: Any = batch.get("attention_mask")
    has_mask = isinstance(mask, torch.Tensor) and mask.shape == positions.shape
    positions = on_host(positions)
    rows = [
        lengths_of_positions(row, has_mask=has_mask)
        for row in (positions if positions.dim() == 2 else positions[None])
    ]
    return rows if any(len(row) > 1 for row in rows) else None


def lengths_of_positions(positions: torch.Tensor, *, has_mask: bool = False) -> list[int]:
    """Lengths of the runs in which each position id is the previous one plus one.

    Padding tokens often all have position id 1. So a run of one token whose id is not 0 is not a document: it
    belongs to the document before it, or at the start of a row to the one after it. If the batch has a
    padding mask, the same holds for id 0.
    """
    starts = [0, *torch.nonzero(positions.diff() != 1).flatten().add(1).tolist()]
    firsts = positions[starts].tolist() if positions.numel() else []
    lengths: list[int] = []
    padding = 0
    for first, (a, b) in zip(firsts, itertools.pairwise([*starts, positions.numel()]), strict=False):
        if b - a == 1 and (first != 0 or has_mask):
            if lengths:
                lengths[-1] += 1
            else:
                padding += 1
        else:
            lengths.append(b - a + padding)
            padding = 0
    return [*lengths, padding] if padding else lengths


def digest_of(batch: Any) -> str:
    """A hash of a batch's integer tensors: shapes, and values where they can be read."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and not tensor.is_complex():
            digest.update(str(tuple(tensor.shape)).encode())
            if is_readable(tensor) and tensor.numel():
                values = on_host(tensor).contiguous()
                digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()
