"""The steps after which some rank of a job began a count: a log in the job's key-value store.

    append(step) ── queue ──► send ──► <prefix>/length += 1, <prefix>/<number> = step ──► receive ──► steps()

A count on one rank makes the next step of all ranks longer, so every rank has to know of it. Entries are only
ever added. `append` is for the training thread, `send` and `receive` for the store thread.
"""

from __future__ import annotations

import contextlib
from collections import deque

from .store_thread import StoreCalls

_MAX_STEPS = 512


class CountLog:
    """This rank's entries and those of the others, the newest few hundred."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._unsent: deque[int] = deque(maxlen=_MAX_STEPS)
        self._known: dict[int, None] = {}
        self._store = self._length = 0
        self._missing: set[int] = set()
        """Entries that are numbered but not written yet."""

    def append(self, step: int) -> None:
        """A count begins here after this step."""
        self._unsent.append(step)

    def steps(self) -> frozenset[int]:
        """All known steps."""
        return frozenset([*self._known.copy(), *self._unsent.copy()])

    def send(self, calls: StoreCalls) -> None:
        """Write the appended steps, except those that another rank has written."""
        while self._unsent:
            step = self._unsent[0]
            if step not in self._known:
                number = calls.add(f"{self._prefix}/length", 1)
                calls.set(f"{self._prefix}/{number}", str(step).encode())
                self._add(step)
            with contextlib.suppress(IndexError):
                self._unsent.popleft()

    def receive(self, calls: StoreCalls) -> None:
        """Read new entries; two short calls if there are none."""
        name = f"{self._prefix}/length"  # read, not added to: a FileStore grows by every addition
        length = int(calls.get(name)) if calls.has(name) else 0
        if calls.number != self._store:
            self._store, self._length = calls.number, 0
            self._missing.clear()
        oldest = length - _MAX_STEPS + 1
        self._missing |= set(range(max(self._length + 1, oldest), length + 1))
        self._missing = {number for number in self._missing if number >= oldest}
        self._length = length
        for number in sorted(self._missing):
            if calls.has(f"{self._prefix}/{number}"):
                self._add(int(calls.get(f"{self._prefix}/{number}")))
                self._missing.discard(number)

    def _add(self, step: int) -> None:
        self._known[step] = None
        while len(self._known) > _MAX_STEPS:
            del self._known[next(iter(self._known))]
