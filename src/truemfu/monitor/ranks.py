"""What crosses the ranks of a job, and how: rank 0 publishes, the others look, nobody waits for anybody.

    rank 0   announce(key, fingerprint) ──► counts ──► publish(key, data) ──► the job's key-value store
    others   poll(key, timeout_s) ──► data, or None: count for yourself

The store is the one torch.distributed was initialised with. No collective is called: a rank that does not
take part holds nobody up. A poll asks whether the key is there, in short calls with pauses between them, and
never gets a missing key, which would block. `publish` and `poll` are for a background thread; what goes wrong
in them is said, never raised.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import warn_once

_CHUNK_BYTES = 1 << 20  # a TCPStore closes the connection on values above 8 MiB
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_WRITING_S = 30.0
_STUCK_S = 5.0  # how long past its limit a poll may take before it is given up
_LOOK_S = 0.2
# A second connection for each rank keeps the job's own store traffic free. In a large job it could use up
# the files that rank 0, which serves the store, may open; there the short calls share the first connection.
_MAX_RANKS_WITH_OWN_CONNECTION = 128
_MAX_NOTES = 100

Result = TypeVar("Result")
_created: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class RankLink:
    """This process among the ranks of its job; made by `RankLink.current()`.

    Links of one namespace are numbered in the order in which a process makes them, so that several monitors
    of a job do not read each other's answers; the ranks have to make them in the same order.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        namespace: str = "monitor",
        notice: Callable[[str], None] = warn_once,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._prefix = f"truemfu/{namespace}/{next(_created[namespace])}"
        self._notice = notice
        self._notes: dict[str, None] = {}

    @classmethod
    def current(cls, *, namespace: str = "monitor", notice: Callable[[str], None] = warn_once) -> RankLink:
        """The rank as torch.distributed has it, else as RANK and WORLD_SIZE say (torchrun), else alone."""
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = _launched(notice)
        return cls(rank=rank, world_size=world_size, namespace=namespace, notice=notice)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that measures for all."""
        return self.rank == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What there was to say so far, warnings included."""
        return tuple(self._notes)

    def announce(self, key: str, fingerprint: str) -> None:
        """Rank 0, before it counts: which model it will count, so that ranks with another need not wait."""
        self._write(key, {"model": fingerprint.encode()})

    def publish(self, key: str, data: dict[str, Any], *, fingerprint: str | None = None) -> None:
        """Rank 0: the answer for all ranks whose model has this fingerprint."""
        packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode())
        chunks = [packed[i : i + _CHUNK_BYTES] for i in range(0, len(packed), _CHUNK_BYTES)]
        values = {str(i): chunk for i, chunk in enumerate(chunks)}
        if fingerprint is not None:
            values["model"] = fingerprint.encode()
        values["chunks"] = str(len(chunks)).encode()  # last: who sees it finds all the rest
        self._write(key, values)

    def poll(
        self,
        key: str,
        timeout_s: float,
        *,
        fingerprint: str | None = None,
        stop: threading.Event | None = None,
    ) -> dict[str, Any] | None:
        """Other ranks: what rank 0 published, or None for a rank that has to count for itself.

        That is so after `timeout_s` seconds, where the store fails (both with a warning), and, at once and
        with a note alone, where rank 0 has a model of another fingerprint. `stop` ends a poll early.
        """
        assert not self.is_first, "rank 0 has nobody to ask"
        ended = stop or threading.Event()
        try:
            return _within(
                timeout_s + _STUCK_S, ended, lambda: self._poll(key, timeout_s, fingerprint, ended)
            )
        except _OtherModel:
            self._note(f"rank 0 has another model than rank {self.rank}, which counts for itself")
        except _NoAnswer:
            self._warn(f"rank 0 gave no count within {timeout_s:g} s; rank {self.rank} counts for itself")
        except Exception as error:  # a store may raise anything: RuntimeError, OSError, its own errors
            self._warn(f"{_store_failed(error)}; rank {self.rank} counts for itself")
        return None

    def _poll(
        self, key: str, timeout_s: float, fingerprint: str | None, stop: threading.Event
    ) -> dict[str, Any] | None:
        store, place = self._store(), f"{self._prefix}/{key}"
        ends = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            is_there = store.check([f"{place}/chunks"])  # first: a model seen after it belongs to it
            if fingerprint is not None and store.check([f"{place}/model"]):
                if store.get(f"{place}/model") != fingerprint.encode():
                    raise _OtherModel
                fingerprint = None
            if is_there:
                break
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise _NoAnswer
            if stop.wait(min(pause_s, left_s)):
                return None
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        count = int(store.get(f"{place}/chunks"))
        packed = b"".join(store.get(f"{place}/{i}") for i in range(count))
        return dict(json.loads(zlib.decompress(packed)))

    def _write(self, key: str, values: dict[str, bytes]) -> None:
        assert self.is_first, "only rank 0 publishes"
        if self.world_size == 1:
            return

        def write() -> None:
            store = self._store()
            for name, value in values.items():
                store.set(f"{self._prefix}/{key}/{name}", value)

        try:
            _within(_WRITING_S, threading.Event(), write)
        except Exception as error:  # a store may raise anything: RuntimeError, OSError, its own errors
            self._warn(f"{_store_failed(error)}; every rank counts for itself")

    def _store(self) -> Any:
        """The job's store, by a connection of our own where that is possible."""
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        store.check([self._prefix])  # a store that is gone fails here, before a new connection is tried
        if self.world_size > _MAX_RANKS_WITH_OWN_CONNECTION or not hasattr(store, "clone"):
            return store
        try:
            return store.clone()
        except Exception:  # a store of another make, which has no such thing: its own calls are short too
            return store

    def _note(self, text: str) -> bool:
        is_new = text not in self._notes and len(self._notes) < _MAX_NOTES
        if is_new:
            self._notes[text] = None
        return is_new

    def _warn(self, text: str) -> None:
        if self._note(text):
            self._notice(text)


class _OtherModel(Exception):
    """Rank 0 counts another model than this rank has."""


class _NoAnswer(Exception):
    """Rank 0 published nothing in time."""


def _within(limit_s: float, stop: threading.Event, work: Callable[[], Result]) -> Result | None:
    """The result of work on a store, in a thread of its own; None if stopped, TimeoutError if it is stuck.

    A store whose server has just gone tries to connect again for minutes, and nothing can end that.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="truemfu-store", daemon=True)
    thread.start()
    ends = time.monotonic() + limit_s
    while thread.is_alive() and not stop.is_set():
        left_s = ends - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        thread.join(min(left_s, _LOOK_S))
    if errors and not stop.is_set():
        raise errors[0]
    return results[0] if results else None


def _launched(notice: Callable[[str], None]) -> tuple[int, int]:
    """Rank and world size as a launcher such as torchrun sets them."""
    told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in told.values():
        return 0, 1
    try:
        rank, world_size = (int(value) for value in told.values() if value is not None)
    except ValueError:
        notice(f"RANK and WORLD_SIZE must be whole numbers; got {told}: taken as a single process")
        return 0, 1
    return rank, world_size


def _store_failed(error: Exception) -> str:
    """One line: torch's own errors carry a C++ stack behind the first."""
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return f"the job's key-value store cannot be used ({reason})"
