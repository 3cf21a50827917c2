"""Turns the error of a failed count into one line about the model or the batch."""

from __future__ import annotations

import inspect
import re
import traceback

from torch import nn

from ...errors import BatchError, ModelError, TruemfuError, one_line
from ..wrappers import unwrap


def is_about_fake_tensors(error: Exception) -> bool:
    """Whether an error is caused by fake tensors, and so means nothing to the user."""
    home = type(error).__module__
    text = str(error).lower()
    return (
        home.startswith(("torch._subclasses", "torch.fx.experimental"))
        or "fake" in text
        or "shape_env" in text
    )


def explain(error: Exception, model: nn.Module) -> TruemfuError:
    """One line for an error from inside the model."""
    name, text = type(unwrap(model)).__name__, one_line(error)
    if isinstance(error, TypeError) and ("argument" in text or "forward()" in text):
        return BatchError(f"the batch does not fit {name}, which takes {_arguments(model)}: {text}")
    names = _arguments(model).split(", ")
    about_batch = _came_from_torch(error) or any(re.search(rf"\b{re.escape(n)}\b", text) for n in names)
    if about_batch and not isinstance(error, NotImplementedError):
        return BatchError(f"{name} cannot run on this batch: {text}")
    return ModelError(f"{name} cannot be run for a count: {text}")


def _arguments(model: nn.Module) -> str:
    """The names of the arguments a model takes."""
    names = [p.name for p in inspect.signature(unwrap(model).forward).parameters.values() if p.kind < 4]
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _came_from_torch(error: Exception) -> bool:
    """Whether torch raised the error, not the model's own code: shapes or dtypes do not match."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    home = frames[-1].f_globals.get("__name__", "") if frames else ""
    return home.partition(".")[0] == "torch" or home.startswith("truemfu.")
