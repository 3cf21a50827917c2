"""Numbers from a model's configuration and modules: chunks, windows, patches, the longest sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def config_numbers(model: nn.Module, *words: str) -> set[int]:
    """Integers of the model's configuration and of its modules whose names contain one of these words."""
    found: set[int] = set()

    def collect(holder: Mapping[str, Any]) -> None:
        for name, value in holder.items():
            if isinstance(value, int) and not isinstance(value, bool) and any(w in str(name) for w in words):
                found.add(value)
            elif isinstance(value, dict):
                collect(value)

    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is not None:
        collect(to_dict())
    for module in model.modules():
        collect({k: v for k, v in vars(module).items() if isinstance(v, int)})
    return found


def chunk_sizes(model: nn.Module) -> list[int]:
    """Sizes of the chunks in which positions are processed together."""
    return sorted(n for n in config_numbers(model, "chunk", "block_size", "bucket") if 1 < n <= 1 << 16)


def window_sizes(model: nn.Module) -> list[int]:
    """Window sizes of an image in patches, given as such or in pixels together with the patch size."""
    named = config_numbers(model, "window")
    patches = {n for n in config_numbers(model, "patch_size") if n > 0}
    return sorted(
        {n for n in named if 1 < n <= 4096} | {n // p for n in named for p in patches if n // p > 1}
    )


def merge_size(model: nn.Module) -> int:
    """How many patches along an edge become one visual token."""
    return max(config_numbers(model, "merge_size") or {2})


def limits(model: nn.Module) -> dict[str, int]:
    """The longest sequence a model accepts, if its configuration states it, and its widest window."""
    named = config_numbers(model, "max_position", "n_positions", "max_target", "max_seq", "max_length")
    longest = min((n for n in named if n > 1), default=1 << 30)
    windows = [n for n in config_numbers(model, "window") if n <= 1 << 14]
    return {"length": longest, "window": max(windows, default=0)}
