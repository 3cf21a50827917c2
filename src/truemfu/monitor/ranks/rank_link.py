"""This process as one of the ranks of its job: messages to rank 0, without a collective and without waiting.

    row thread   send_message ──► store thread ──► the job's key-value store ──► rank 0: exchange_rows' `take`

All calls return at once: the store is used on its own thread (store_thread.py), and a missing key is never
read, since that would block. Nothing is raised. A failure becomes a note; it is a warning on rank 0 only, the
one rank that writes a log.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ...errors import warn_once
from .row_exchange import RowExchange
from .store_thread import StoreCalls, StoreThread

_STOP_S = 0.5
_GROUP_POLL_S = 1.0
_MAX_NOTES = 100

_created: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """Time limits."""

    group_s: float = 120.0
    """How long a process group is waited for."""
    stuck_s: float = 5.0
    """How long one store call may take before the store is considered unusable."""


class RankLink:
    """This process as one of the ranks of its job; created by `RankLink.current()`.

    Links of one namespace are numbered in the order of their creation, so that several monitors of a job do
    not read each other's messages; all ranks must create them in the same order.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        namespace: str = "monitor",
        notice: Callable[[str], None] = warn_once,
        limits: LinkLimits | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._prefix = f"truemfu/{namespace}/{next(_created[namespace])}"
        self._notes: dict[str, None] = {}
        self._limits = limits = limits or LinkLimits()
        self._exchange: RowExchange | None = None
        self._no_group_since_s: float | None = None
        self._thread = StoreThread(
            world_size=world_size,
            work=self._work,
            own_limit_s=limits.stuck_s,
            shared_limit_s=limits.group_s + limits.stuck_s,
        )

    @classmethod
    def current(
        cls,
        *,
        namespace: str = "monitor",
        notice: Callable[[str], None] = warn_once,
        limits: LinkLimits | None = None,
    ) -> RankLink:
        """The rank from torch.distributed, else from RANK and WORLD_SIZE (torchrun), else 0 of 1."""
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = launched(notice)
        return cls(rank=rank, world_size=world_size, namespace=namespace, notice=notice, limits=limits)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the log."""
        return self.rank == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes so far."""
        return tuple(self._notes.copy())

    def note(self, text: str) -> None:
        """Add a note without a warning: for ranks that write no log."""
        if len(self._notes) < _MAX_NOTES:
            self._notes[text] = None

    def exchange_rows(self, take: Callable[[list[bytes]], None] | None) -> None:
        """Begin to exchange messages; `take`, on rank 0, gets new ones on the store thread."""
        self._exchange = RowExchange(f"{self._prefix}/rows", world_size=self.world_size, take=take)
        self._thread.wake()

    def send_message(self, message: bytes) -> None:
        """Row thread: send this to rank 0, in place of one that was not sent yet."""
        if self._exchange is not None:
            self._exchange.put(message)
            self._thread.wake()

    def read_soon(self) -> None:
        """Row thread of rank 0: read messages more often for a moment."""
        if self._exchange is not None:
            self._exchange.hurry()
            self._thread.wake()

    @property
    def is_connected(self) -> bool:
        """Whether messages can be exchanged: the store responds, and there is a process group."""
        return self._thread.check() and self._thread.is_connected

    @property
    def was_connected(self) -> bool:
        """Whether there is a process group or has been one, and its store has not failed."""
        return self._thread.check() and self._thread.was_connected

    @property
    def failure(self) -> str | None:
        """Why the store is not used any more."""
        return self._thread.failure

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the store thread once the last message is sent or `timeout_s` has passed; no more warnings."""
        self._thread.stop(timeout_s)

    def _work(self, calls: StoreCalls | None, is_last: bool) -> float | None:
        """Store thread: all work that is due; returns the seconds until the next work may be due."""
        if calls is None:
            return self._without_group()
        self._no_group_since_s = None
        read_in_s = None if self._exchange is None else self._exchange.work(calls)
        return None if is_last else read_in_s

    def _without_group(self) -> float | None:
        if self._thread.was_connected:  # destroyed, as at the end of a run: not a failure
            return None
        now_s = time.monotonic()
        self._no_group_since_s = self._no_group_since_s or now_s
        if now_s > self._no_group_since_s + self._limits.group_s:
            self._thread.failure = "torch.distributed is not initialized"
        return _GROUP_POLL_S


def launched(notice: Callable[[str], None]) -> tuple[int, int]:
    """Rank and world size as a launcher such as torchrun sets them."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in found.values():
        return 0, 1
    try:
        rank, world_size = (int(value) for value in found.values() if value is not None)
    except ValueError:
        notice(f"RANK and WORLD_SIZE must be whole numbers; got {found}: treated as a single process")
        return 0, 1
    return rank, world_size
