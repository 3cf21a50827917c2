"""How the messages of ranks reach rank 0: one key of the job's store for each rank, overwritten each time.

    <prefix>/<rank>    the latest message of that rank

Rank 0 reads all of them together, and only keys that exist: a missing one would block. A store that was
replaced is empty. The store is used on the store thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_READ_EVERY_S = 1.0
_RANKS_PER_SECOND = 1024
"""Larger jobs are read less often, but twice for each row."""
_LONGEST_READ_EVERY_S = 5.0
_HURRIED_READ_EVERY_S = 0.05
_HURRY_S = 0.5
_READ_TOGETHER = 1024


def read_every_s(world_size: int) -> float:
    """How often rank 0 reads."""
    return min(_LONGEST_READ_EVERY_S, max(_READ_EVERY_S, world_size / _RANKS_PER_SECOND))


Call = Callable[..., Any]
"""Calls a method of the store with these arguments, within a limit of time."""


class RowExchange:
    """The exchange of one rank; `take` gets new messages on rank 0 and is None on the others."""

    def __init__(
        self,
        prefix: str,
        rank: int,
        *,
        world_size: int,
        take: Callable[[list[bytes]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix, self._rank, self._take, self._clock = prefix, rank, take, clock
        self._others = range(1, world_size)
        self._read_every_s = read_every_s(world_size)
        self._message: bytes | None = None
        self._is_sent = True
        self._stores = 0
        """Which of the job's stores was used last."""
        self._read_s = self._hurry_until_s = 0.0
        self._seen: dict[int, int] = {}
        """Ranks whose key exists, and the hash of the message last read."""

    def put(self, message: bytes) -> None:
        """The message to send next; replaces one that was not sent yet. On any thread."""
        self._message, self._is_sent = message, False

    def hurry(self) -> None:
        """Rank 0: read more often for a moment. On any thread."""
        self._hurry_until_s = self._clock() + _HURRY_S

    def work(self, store: Any, stores: int, call: Call) -> float | None:
        """Store thread: send and read what is due; returns the seconds until the next read.

        `stores` counts the job's stores: a new one is empty. No call waits for another rank.
        """
        if stores != self._stores:
            self._stores = stores
            self._seen.clear()
            self._is_sent = self._message is None
        if self._take is None:
            self._send(store, call)
            return None
        now_s = self._clock()
        pause_s = _HURRIED_READ_EVERY_S if now_s < self._hurry_until_s else self._read_every_s
        if now_s >= self._read_s + pause_s:
            self._read_s = now_s
            self._take(self._read(store, call))
        return max(0.0, self._read_s + pause_s - self._clock())

    def _send(self, store: Any, call: Call) -> None:
        message = self._message
        if message is None or self._is_sent:
            return
        self._is_sent = True  # before the message is written: one that is put meanwhile is sent next
        call(store.set, self._key(self._rank), message)

    def _read(self, store: Any, call: Call) -> list[bytes]:
        """The messages that are new."""
        for rank in self._others:
            if rank not in self._seen and call(store.check, [self._key(rank)]):
                self._seen[rank] = 0
        ranks, new = sorted(self._seen), []
        for at in range(0, len(ranks), _READ_TOGETHER):
            part = ranks[at : at + _READ_TOGETHER]
            messages = _values(store, call, [self._key(rank) for rank in part])
            for rank, message in zip(part, messages, strict=True):
                if self._seen[rank] != (digest := hash(message)):
                    self._seen[rank] = digest
                    new.append(message)
        return new

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _values(store: Any, call: Call, keys: list[str]) -> list[bytes]:
    """The values of existing keys, in one call where the store has one for that; missing ones would block."""
    if hasattr(store, "has_extended_api") and store.has_extended_api():
        return [bytes(value) for value in call(store.multi_get, keys)]
    return [bytes(call(store.get, key)) for key in keys]
