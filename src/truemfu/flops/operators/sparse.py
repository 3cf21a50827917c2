"""Sparse tensors, which take part in products only with the elements they store."""

from __future__ import annotations

from typing import Any

import torch

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_sparse(tensor: Any) -> bool:
    """Whether a tensor stores only some of its elements, in any layout."""
    return isinstance(tensor, torch.Tensor) and tensor.layout in _SPARSE


def stored_elements(sparse: torch.Tensor) -> int:
    """The number of elements that a sparse tensor stores, those of whole blocks included."""
    values = sparse._values() if sparse.layout is torch.sparse_coo else sparse.values()
    return int(values.numel())
