"""One count for all ranks of a model structure: which rank makes it, and how the others get it.

    <link>/announced/<key>                        rank 0's structure
    <link>/published/<structure>/<key>/counters   how many ranks of this structure offered to count
    <link>/published/<structure>/<key>/<i>        the published count, packed and in chunks
    <link>/published/<structure>/<key>/chunks     their number; written last, when all chunks are there

The first to offer is elected. Ranks with rank 0's structure offer nothing: it counts for them. All of this
runs on the store thread, and reads only keys that exist.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

from .store_thread import StoreCalls

_CHUNK_BYTES = 1 << 20  # a TCPStore closes the connection on values above 8 MiB
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class Answer:
    """What a rank does about a key."""

    kind: Literal["waiting", "count", "nothing", "received"]
    data: dict[str, Any] = field(default_factory=dict)
    """The published count, if received."""


WAITING = Answer("waiting")
"""Not known yet: call `ask` again."""
COUNT = Answer("count")
"""This rank counts, and publishes."""
NOTHING = Answer("nothing")
"""No other rank will provide a count: estimate."""


@dataclass(eq=False, kw_only=True)
class Question:
    """A requested key of a rank with this model structure; settled once, by either thread."""

    link: str
    """The prefix of this link's keys in the store."""
    key: str
    structure: str
    limit_s: float
    """For rank 0 to announce the key, and then for the counting rank to publish."""
    answer: Answer = WAITING
    counter: str | None = None
    """Which rank counts; None until rank 0 has announced its structure."""
    is_published: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pause_s, self._due_s = _FIRST_PAUSE_S, 0.0
        self._ends_s = time.monotonic() + self.limit_s

    @property
    def late_s(self) -> float:
        """Seconds since the time limit; negative before it."""
        return time.monotonic() - self._ends_s

    @property
    def next_poll_s(self) -> float:
        """Seconds until the next poll of the store."""
        return min(self._due_s, self._ends_s) - time.monotonic()

    def settle(self, answer: Answer) -> bool:
        """Set the answer, unless there is one already; whether it was set."""
        with self._lock:
            if self.answer is not WAITING:
                return False
            self.answer = answer
            return True

    def announce(self, calls: StoreCalls) -> None:
        """Rank 0: write which structure it counts, so that ranks with another one do not wait for it."""
        calls.set(self._announced, self.structure.encode())

    def publish(self, calls: StoreCalls, data: dict[str, Any]) -> None:
        """The counting rank: write the count for all ranks of this structure; {}: it cannot be counted."""
        packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode())
        chunks = [packed[i : i + _CHUNK_BYTES] for i in range(0, len(packed), _CHUNK_BYTES)]
        for i, chunk in enumerate(chunks):
            calls.set(f"{self._published}/{i}", chunk)
        calls.set(f"{self._published}/chunks", str(len(chunks)).encode())

    def poll(self, calls: StoreCalls) -> None:
        """Check for an answer; raises ValueError for a published count that cannot be read."""
        self._due_s = time.monotonic() + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        if calls.has(f"{self._published}/chunks"):
            data = self._received(calls)
            self.settle(Answer("received", data) if data else NOTHING)
        elif self.counter is None and calls.has(self._announced):
            self._find_counter(calls)

    def _find_counter(self, calls: StoreCalls) -> None:
        if calls.get(self._announced) == self.structure.encode():
            self.counter = "rank 0"
        elif calls.add(f"{self._published}/counters", 1) == 1:
            self.counter = "this rank"
            if not self.settle(COUNT):  # abandoned meanwhile: let no other rank wait for it
                self.publish(calls, {})
        else:
            self.counter = "the counting rank"
        self._ends_s = time.monotonic() + self.limit_s
        self._pause_s, self._due_s = _FIRST_PAUSE_S, 0.0

    def _received(self, calls: StoreCalls) -> dict[str, Any]:
        count = int(calls.get(f"{self._published}/chunks"))
        chunks = [calls.get(f"{self._published}/{i}") for i in range(count)]
        try:
            return dict(json.loads(zlib.decompress(b"".join(chunks))))
        except (zlib.error, TypeError) as error:
            raise ValueError(str(error)) from error

    @property
    def _announced(self) -> str:
        return f"{self.link}/announced/{self.key}"

    @property
    def _published(self) -> str:
        return f"{self.link}/published/{self.structure}/{self.key}"
