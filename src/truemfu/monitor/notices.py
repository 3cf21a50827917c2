"""The monitor's warnings: each is shown once when it occurs, and again in the summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TruemfuWarning, one_line, warn_once

Result = TypeVar("Result")
_MAX_TEXTS = 100


class Notices:
    """Collects warnings; adding one never raises, even where a filter turns warnings into errors."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __call__(self, text: str, *, about: str | None = None) -> None:
        """Warn once per text, or once per `about` where that is given."""
        key = about or text
        if key in self._texts or len(self._texts) >= _MAX_TEXTS:
            return
        self._texts[key] = text
        with contextlib.suppress(TruemfuWarning):  # a filter may turn warnings into errors
            warn_once(text)

    def with_warnings_collected(self, work: Callable[[], Result]) -> Result:
        """The result of work that issues warnings itself; they are collected too."""
        for _ in range(_MAX_TEXTS):
            try:
                return work()
            except TruemfuWarning as warning:
                self(str(warning))  # each is issued once, so the next attempt gets further
        return work()

    def in_closing(self, work: Callable[..., object], *args: Any) -> None:
        """Run one part of closing; its exception does not prevent the other parts."""
        try:
            work(*args)
        except Exception as error:
            self(f"the monitor could not be closed properly: {one_line(error)}")

    @property
    def texts(self) -> tuple[str, ...]:
        """All warnings so far."""
        return tuple(self._texts.values())
