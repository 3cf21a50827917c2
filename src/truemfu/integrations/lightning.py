"""Lightning: `Trainer(callbacks=[TrueMFUCallback()])`, or the environment variable TRUEMFU=1 and no code.

Lightning calls `callbacks_by_environment` for every Trainer, by the entry point in pyproject.toml. Without
TRUEMFU=1 it returns at once, and neither torch nor Lightning is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..environment import ENABLED, is_disabled, is_set

if TYPE_CHECKING:
    from .lightning_callback import TrueMFUCallback

__all__ = ["TrueMFUCallback", "callbacks_by_environment"]


def callbacks_by_environment() -> list[Any]:
    """The callback if TRUEMFU=1 is set and TRUEMFU_DISABLED is not; else none."""
    if not is_set(ENABLED) or is_disabled():
        return []
    from .lightning_callback import TrueMFUCallback

    return [TrueMFUCallback()]


def __getattr__(name: str) -> Any:
    if name != "TrueMFUCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .lightning_callback import TrueMFUCallback

    return TrueMFUCallback
