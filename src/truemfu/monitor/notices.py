"""What the monitor has to say: each thing once, now as a warning and at the end in the summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TruemfuWarning, one_line, warn_once

Result = TypeVar("Result")
_MAX_KEPT = 100


class Notices:
    """Collects texts; saying one never raises, even where warnings are turned into errors."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __call__(self, text: str, *, about: str | None = None) -> None:
        """Say this, unless it has been said, or anything about the same thing where that is named."""
        key = about or text
        if key in self._texts or len(self._texts) >= _MAX_KEPT:
            return
        self._texts[key] = text
        with contextlib.suppress(TruemfuWarning):  # a filter may make errors of warnings
            warn_once(text)

    def among(self, work: Callable[[], Result]) -> Result:
        """The result of work that may warn by itself, with its warnings kept."""
        for _ in range(_MAX_KEPT):
            try:
                return work()
            except TruemfuWarning as warning:
                self(str(warning))  # each is said once, so the next try goes further
        return work()

    def in_closing(self, work: Callable[..., object], *args: Any) -> None:
        """Do one part of closing: what it raises keeps no other part from being done."""
        try:
            work(*args)
        except Exception as error:
            self(f"the monitor could not be closed properly: {one_line(error)}")

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything said so far."""
        return tuple(self._texts.values())
