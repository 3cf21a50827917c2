"""What the integrations share: how they stay out of a trainer's way, and what they add to its log.

What is in the place of a trainer's method, by `torch_private.replacing.replace`, gets the original first. An
exception in an integration becomes one warning and never reaches the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import one_line, warn_once
from ..torch_private.replacing import replace

if TYPE_CHECKING:
    from ..monitor.monitor import TrainingMonitor

LOGGED = ("perf/mfu", "perf/hfu", "perf/tokens_per_second")
"""What the newest row adds to a trainer's own log."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


def newest_figures(monitor: TrainingMonitor) -> dict[str, Any]:
    """The metrics in `LOGGED` of the newest finished row, as far as they are known."""
    row = monitor.last
    return {name: row[name] for name in LOGGED if row.get(name) is not None}


def pausing(pause: Callable[[str], AbstractContextManager[None]], kind: str) -> Callable[..., Any]:
    """Runs a method with all that is in it left out of the step."""

    def instead(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with pause(kind):
            return original(*args, **kwargs)

    return instead


def noting(note: Callable[[Any], None]) -> Callable[..., Any]:
    """Runs a method and passes its result to `note`."""

    def instead(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result)
        return result

    return instead


PAUSED_METHODS = (
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
"""Evaluation and checkpoints of known trainers, which are no part of a step: module, class and method, and
what runs in it."""


def paused_methods(module: str) -> dict[str, str]:
    """The methods in this module's row of the table, and what runs in each."""
    return {name: kind for found, _, name, kind in PAUSED_METHODS if found == module}


class TrainerPauses:
    """Pauses in the methods of a script that is watched without an integration: each is wrapped once, on its
    class, when its library has been imported."""

    def __init__(self, pause: Callable[[str], AbstractContextManager[None]]) -> None:
        self._pause, self._thread = pause, threading.get_ident()
        self._wrapped: set[tuple[str, ...]] = set()

    def follow(self) -> None:
        """Wrap the methods of the libraries that have been imported since."""
        for entry in PAUSED_METHODS:
            module, class_name, name, kind = entry
            owner = getattr(sys.modules.get(module), class_name, None)
            if owner is not None and callable(vars(owner).get(name)) and entry not in self._wrapped:
                self._wrapped.add(entry)
                replace(owner, name, pausing(self._pause_here, kind))

    def _pause_here(self, kind: str) -> AbstractContextManager[None]:
        """A pause, unless another thread than the training's calls the method."""
        return self._pause(kind) if threading.get_ident() == self._thread else contextlib.nullcontext()


def guarded(method: _Method) -> _Method:
    """A method of an integration that returns nothing: if it raises, its object's `give_up` is called."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.give_up()
            warn_once(f"truemfu is switched off for this training, which continues: {one_line(error)}")

    return call  # type: ignore[return-value]
