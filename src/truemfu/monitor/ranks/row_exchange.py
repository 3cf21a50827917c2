"""How the messages of ranks reach rank 0: one key of the job's store for each rank, overwritten each time.

    <prefix>/length      how many ranks have taken a number; an atomic addition
    <prefix>/<number>    the latest message of the rank with that number

Rank 0 reads all of them together, and only keys that exist: a number is read once its key was seen. A store
that was replaced is empty, so every rank takes a number again. The store is used on the store thread alone.
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
        *,
        world_size: int,
        take: Callable[[list[bytes]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix, self._take, self._clock = prefix, take, clock
        self._others = world_size - 1
        self._read_every_s = read_every_s(world_size)
        self._message: bytes | None = None
        self._is_sent = True
        self._stores = 0
        """Which of the job's stores the numbers are of."""
        self._number: int | None = None
        self._read_s = self._hurry_until_s = 0.0
        self._length = 0
        self._unseen: set[int] = set()
        self._seen: dict[int, int] = {}
        """Numbers whose key exists, and the hash of the message last read."""

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
            self._stores, self._number, self._length = stores, None, 0
            self._unseen.clear()
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
        if self._number is None:
            self._number = int(call(store.add, f"{self._prefix}/length", 1))  # atomic
        call(store.set, f"{self._prefix}/{self._number}", message)

    def _read(self, store: Any, call: Call) -> list[bytes]:
        """The messages that are new."""
        self._find_numbers(store, call)
        numbers = sorted(self._seen)
        new = []
        for at in range(0, len(numbers), _READ_TOGETHER):
            part = numbers[at : at + _READ_TOGETHER]
            messages = _values(store, call, [f"{self._prefix}/{number}" for number in part])
            for number, message in zip(part, messages, strict=True):
                if self._seen[number] != (digest := hash(message)):
                    self._seen[number] = digest
                    new.append(message)
        return new

    def _find_numbers(self, store: Any, call: Call) -> None:
        name = f"{self._prefix}/length"
        if self._length < self._others and call(store.check, [name]):
            length = int(call(store.get, name))
            self._unseen |= set(range(self._length + 1, length + 1))
            self._length = length
        for number in sorted(self._unseen):
            if call(store.check, [f"{self._prefix}/{number}"]):
                self._unseen.discard(number)
                self._seen[number] = 0


def _values(store: Any, call: Call, keys: list[str]) -> list[bytes]:
    """The values of existing keys, in one call where the store has one for that; missing ones would block."""
    if hasattr(store, "has_extended_api") and store.has_extended_api():
        return [bytes(value) for value in call(store.multi_get, keys)]
    return [bytes(call(store.get, key)) for key in keys]
