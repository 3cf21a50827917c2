"""Evaluation and checkpoints of known trainers: what runs in these methods is no part of a step.

The integrations wrap them on one trainer (`paused_methods`). For a script that is watched without an
integration they are wrapped on their class, once its library is imported (`TrainerPauses`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..torch_private.replacing import replace
from .guarded import pausing

METHODS = (
    ("transformers.trainer", "Trainer", "evaluate", "evaluation"),
    ("transformers.trainer", "Trainer", "predict", "evaluation"),
    ("transformers.trainer", "Trainer", "_save_checkpoint", "checkpoint"),
    ("transformers.trainer", "Trainer", "save_model", "checkpoint"),
    ("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop", "run", "evaluation"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint", "checkpoint"),
    ("pytorch_lightning.loops.evaluation_loop", "_EvaluationLoop", "run", "evaluation"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint", "checkpoint"),
    ("accelerate.accelerator", "Accelerator", "save_state", "checkpoint"),
    ("accelerate.accelerator", "Accelerator", "save_model", "checkpoint"),
)
"""Module, class and method, and what runs in it."""


def paused_methods(module: str) -> dict[str, str]:
    """The methods in this module's row of the table, and what runs in each."""
    return {name: kind for found, _, name, kind in METHODS if found == module}


class TrainerPauses:
    """Wraps each method once."""

    def __init__(self, pause: Callable[[str], AbstractContextManager[None]]) -> None:
        self._pause, self._thread = pause, threading.get_ident()
        self._wrapped: set[tuple[str, ...]] = set()

    def follow(self) -> None:
        """Wrap the methods of the libraries that have been imported since."""
        for entry in METHODS:
            module, class_name, name, kind = entry
            owner = getattr(sys.modules.get(module), class_name, None)
            if owner is not None and callable(vars(owner).get(name)) and entry not in self._wrapped:
                self._wrapped.add(entry)
                replace(owner, name, pausing(self._pause_here, kind))

    def _pause_here(self, kind: str) -> AbstractContextManager[None]:
        """A pause, unless another thread than the training's calls the method."""
        return self._pause(kind) if threading.get_ident() == self._thread else contextlib.nullcontext()
