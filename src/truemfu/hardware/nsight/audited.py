"""An audit's findings on a model's kernels, for later runs: tiles, and how activity overstates their work.

    truemfu audit --json -- python train.py > audit.json ─► read_audit ─► hybrid mode

A model of a few layers has every product that one of many layers has, so its audit gives the tiles of both.
`executed_over_activity` is of the whole step audited: a first layer unlike the others (patch embedding, first
convolution) weighs more in a model that was cut.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import RecordError
from ..tiles import Shape

_MOST = 1.001
"""A step sums many launches, each rounded."""


class AuditedProduct(msgspec.Struct, frozen=True, kw_only=True):
    """All products of one shape: what they need, and what their kernels executed."""

    m: int
    n: int
    k: int
    needed_flops: int
    executed_flops: int


class AuditedKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an audit that applies to other runs of the model on the same GPU model."""

    executed_over_activity: float | None
    """Executed operations over what the tensor pipe's active cycles would have done at the rates of the
    dtypes; None if ncu or the table of rates does not have it."""
    executed_by_dtype: dict[str, int]
    products: tuple[AuditedProduct, ...]
    is_a_step: bool
    """Whether all launches of one step were audited and nothing else."""

    def tile_factors(self) -> dict[Shape, float]:
        """Executed over needed, by shape."""
        return {(p.m, p.n, p.k): p.executed_flops / p.needed_flops for p in self.products}


def read_audit(path: Path) -> AuditedKernels:
    """What `truemfu audit --json` printed into this file; a `RecordError` if it is something else."""
    try:
        audited = msgspec.json.decode(path.read_bytes(), type=AuditedKernels)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is not an audit: {error}") from None
    if not audited.is_a_step:
        raise RecordError(f"{path} covers a selection of launches: audit a whole step")
    ratio = audited.executed_over_activity
    if ratio is not None and not 0 < ratio <= _MOST:
        raise RecordError(f"{path}: executed_over_activity is {ratio:g}, expected above 0 and at most 1")
    if not all(1 <= product.needed_flops <= product.executed_flops for product in audited.products):
        raise RecordError(f"{path}: a matrix product executed fewer FLOPs than it needs")
    return audited
