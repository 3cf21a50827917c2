"""Private training with one backward pass, and a check of it while it runs (docs/private.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .batches import losses_by_sample
    from .check import gradient_error
    from .optimizer import PrivateOptimizer

__all__ = ["PrivateOptimizer", "gradient_error", "losses_by_sample"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"PrivateOptimizer": "optimizer", "gradient_error": "check", "losses_by_sample": "batches"},
)
