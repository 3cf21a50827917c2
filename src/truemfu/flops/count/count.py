"""Counting one step: `count_flops` for a model and a batch, `count_step` for any callable.

model, batch ──► shadow on fake tensors ──► forward, loss, backward under a CountingMode ──► FlopCount
                      │ cannot run that way
                      └─► shadow on real CPU copies, the same way
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import UsageError, warn_once
from ...torch_private.dispatch import check_counts
from ..attention.windows import Windows
from ..flop_count import FlopCount
from ..wrappers import unwrap
from .calls import counted
from .counted_step import CountedStep
from .counting_mode import CountingMode

EXECUTED = "count of an executed step"
_DEFAULT = Convention()


def count_flops(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    convention: Convention = _DEFAULT,
    backward: bool = True,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> FlopCount:
    """FLOPs of one training step of `model` on `batch`, exact; uses no device and does not change the model.

    `batch` is a mapping of keyword arguments or a tuple of positional ones, as the model takes it; its
    tensors may be real, meta or fake. The loss is `loss_fn(output)` if given, else the output's `.loss`,
    else the sum of its floating-point tensors that need a gradient. `backward=False` counts only the forward
    pass, without gradients.
    """
    step = CountedStep(model, batch, convention, backward, loss_fn)
    tally, method, notes = step.run()
    outside = Windows(unwrap(model), convention).notes_for_batch(step.kwargs or step.args)
    count = tally.result(method=method, notes=(*notes, *outside))
    warn_uncounted(count)
    return count


def count_step(
    fn: Callable[..., Any], *args: Any, convention: Convention = _DEFAULT, **kwargs: Any
) -> FlopCount:
    """FLOPs that `fn(*args, **kwargs)` executes: a whole training step of any trainer, or any other callable.

    The callable runs once, with all its effects; compiled code inside runs eagerly for this call and stays
    compiled. What runs in a backward pass counts as backward, what a checkpoint runs again as recompute.
    """
    if not callable(fn):
        raise UsageError(f"count_step takes a callable and its arguments; got {type(fn).__name__}")
    check_counts()
    tally = CountingMode(convention)
    with counted(tally):
        fn(*args, **kwargs)
    count = tally.result(method=EXECUTED)
    warn_uncounted(count)
    return count


def profile_model_flops(model: nn.Module, batch_example: Mapping[str, Any] | tuple[Any, ...]) -> float | None:
    """Forward and backward FLOPs for a real batch; None, and one warning with the reason, if it fails."""
    try:
        return float(count_flops(model, batch_example).model_flops)
    except Exception as error:  # a failed count must not stop a training run
        warn_once(f"no FLOPs for this model: {error}")
        return None


def warn_uncounted(count: FlopCount) -> None:
    """Warn once about operators that may do matrix work and have no formula."""
    text = uncounted_notice(count)
    if text is not None:
        warn_once(text)


def uncounted_notice(count: FlopCount) -> str | None:
    """A message that names the operators without a formula; None if there are none."""
    if not count.uncounted:
        return None
    names = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(count.uncounted.items()))
    return (
        f"operators that may do matrix work and have no formula are not counted: {names}; "
        "register one with truemfu.register_formula, or a module's work with truemfu.register_module"
    )
