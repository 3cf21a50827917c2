"""Which parameters an optimizer finds with a gradient: they show which parts of a model gradients reached."""

from __future__ import annotations

import torch

from ...torch_private.dispatch import disable_torch_function

MOST_PARAMETERS = 100
"""That are looked at, evenly spaced; the last one of a group, mostly a head's, is always among them."""


def gradients_found(optimizer: torch.optim.Optimizer) -> bytes:
    """A byte for each parameter that is looked at: 1 if it has a gradient. No value is read."""
    groups = optimizer.param_groups[:: -(len(optimizer.param_groups) // MOST_PARAMETERS + 1)]
    stride = sum(len(group["params"]) for group in groups) // MOST_PARAMETERS + 1
    with disable_torch_function():
        return bytes([p.grad is not None for group in groups for p in group["params"][::-stride]])
