"""What the integrations share: how they stay out of a trainer's way, and what they add to its log.

A trainer's methods are replaced on its instance, for the time of a run, and put back. An exception in an
integration becomes one warning and never reaches the trainer.
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


def pausing(pause: Callable[[str], AbstractContextManager[None]], kind: str, method: _Method) -> _Method:
    """The method, with all that runs in it left out of the step."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with pause(kind):
            return method(*args, **kwargs)

    return call  # type: ignore[return-value]


def noting(note: Callable[[Any], None], method: _Method) -> _Method:
    """The method, with its result passed to `note`."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note(result)
        return result

    return call  # type: ignore[return-value]


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Set `replacement` on this instance alone; the result puts the former method back.

    Where other code has replaced the method since, it is left alone.
    """
    had_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if had_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return put_back


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
