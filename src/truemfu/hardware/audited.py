"""What an audit found of a model's kernels, for runs that follow: tiles by shape, and work without products.

    truemfu audit --json -- python train.py > audit.json ─► read_audit ─► hybrid mode

A model of a few layers has every product that one of many layers has, so its audit tells the tiles of both.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import RecordError
from .tiles import Shape


class AuditedProduct(msgspec.Struct, frozen=True, kw_only=True):
    """All products of one shape: what they need, and what their kernels executed."""

    m: int
    n: int
    k: int
    needed_flops: int
    executed_flops: int


class AuditedKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an audit that holds for other runs of such a model on such a GPU."""

    non_matrix_share: float | None
    products: tuple[AuditedProduct, ...]
    is_a_step: bool
    """Whether all launches of one step were audited and nothing else."""

    def tile_factors(self) -> dict[Shape, float]:
        """Executed over needed, by shape."""
        return {(p.m, p.n, p.k): p.executed_flops / p.needed_flops for p in self.products}


def read_audit(path: Path) -> AuditedKernels:
    """What `truemfu audit --json` printed into this file; a `RecordError` where it is something else."""
    try:
        audited = msgspec.json.decode(path.read_bytes(), type=AuditedKernels)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} holds no audit: {error}") from None
    if not audited.is_a_step:
        raise RecordError(f"{path} tells of a selection of launches: audit a whole step")
    share = audited.non_matrix_share
    if share is not None and not 0 <= share < 1:
        raise RecordError(f"{path}: non_matrix_share is {share:g}, no share from 0 to below 1")
    if not all(1 <= product.needed_flops <= product.executed_flops for product in audited.products):
        raise RecordError(f"{path}: a product executed less than it needs")
    return audited
