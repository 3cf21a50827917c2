"""Steps on their way from the training thread to the row thread."""

from __future__ import annotations

import contextlib
from collections import deque

from ..step_note import StepNote

_MOST_WAITING = 10_000


class StepQueue:
    """Bounded: if rows fall behind, the oldest steps are dropped and counted as lost."""

    def __init__(self) -> None:
        self._steps: deque[StepNote] = deque()
        self._oldest: StepNote | None = None
        self.taken = self._processed = self._rows = 0
        self.lost = 0
        """Dropped because the queue was full."""

    def put(self, note: StepNote) -> None:
        """On the training thread: enqueue a step; never waits."""
        self.taken += 1
        self._steps.append(note)
        if self.taken - self.finished > _MOST_WAITING:
            try:
                self._steps.popleft()
            except IndexError:  # the row thread took it at this very moment
                return
            self.lost += 1

    def oldest(self) -> StepNote | None:
        """The next step to process; it stays until `take`."""
        if self._oldest is None:
            with contextlib.suppress(IndexError):
                self._oldest = self._steps.popleft()
        return self._oldest

    def take(self) -> None:
        """The oldest step is being processed."""
        self._oldest = None

    def note_rows(self, processed: int, *, held: int) -> None:
        """So many more steps were processed, of all of which this number still waits for other ranks."""
        self._processed += processed
        self._rows = self._processed - held

    @property
    def processed(self) -> int:
        """Steps that were processed, or lost."""
        return self._processed + self.lost

    @property
    def finished(self) -> int:
        """Steps that became rows, or were lost."""
        return self._rows + self.lost
