"""Steps on their way from the training thread to the row thread."""

from __future__ import annotations

from collections import deque

from ..step_note import StepNote

_MOST_WAITING = 10_000


class StepQueue:
    """Bounded: if rows fall behind, further steps are not taken, and counted as lost."""

    def __init__(self) -> None:
        self._steps: deque[StepNote] = deque()
        self.taken = self.processed = self.finished = 0
        """Steps that were put, those that were read since, and those of them that became rows."""
        self.lost = 0
        """Not taken because the queue was full."""

    def put(self, note: StepNote) -> None:
        """On the training thread: enqueue a step; never waits."""
        if self.taken - self.finished >= _MOST_WAITING:
            self.lost += 1
            return
        self.taken += 1
        self._steps.append(note)

    def oldest(self) -> StepNote | None:
        """The next step to process; it stays until `take`."""
        return self._steps[0] if self._steps else None

    def take(self) -> None:
        """The oldest step is being processed."""
        self._steps.popleft()

    def note_rows(self, processed: int, *, held: int) -> None:
        """So many more steps were processed, of all of which this number still waits for other ranks."""
        self.processed += processed
        self.finished = self.processed - held
