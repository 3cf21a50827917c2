"""Evaluation and checkpoints of known trainers, for a script that is watched without their callbacks.

A method in the table is wrapped on its class once its library is imported: what runs in it is no part of a
step. Nothing else of the trainers is touched.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

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
)
"""Module, class and method, and what runs in it."""


class TrainerPauses:
    """Wraps each method once."""

    def __init__(self, pause: Callable[[str], Any]) -> None:
        self._pause, self._thread = pause, threading.get_ident()
        self._wrapped: set[tuple[str, ...]] = set()

    def follow(self) -> None:
        """Wrap the methods of the libraries that have been imported since."""
        for entry in METHODS:
            module, class_name, name, kind = entry
            owner = getattr(sys.modules.get(module), class_name, None)
            method = None if owner is None else vars(owner).get(name)
            if callable(method) and entry not in self._wrapped:
                self._wrapped.add(entry)
                setattr(owner, name, self._pausing(method, kind))

    def _pausing(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def pausing(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            with self._pause(kind):
                return method(*args, **kwargs)

        return pausing
