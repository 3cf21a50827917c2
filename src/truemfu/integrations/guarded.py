"""What keeps an integration out of a trainer's way.

A trainer's methods are replaced on its instance, for the time of a run, and put back. An exception in an
integration becomes one warning and never reaches the trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import one_line, warn_once

_Method = TypeVar("_Method", bound=Callable[..., Any])


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
