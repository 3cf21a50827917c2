"""What the integrations share: how they stay out of a trainer's way, and what they add to its log.

What is in the place of a trainer's method, by `torch_private.replacing.replace`, gets the original first. An
exception in an integration becomes one warning and never reaches the trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import one_line, warn_once

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
