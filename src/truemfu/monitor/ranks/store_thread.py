"""The one thread on which a rank uses the job's key-value store.

    any thread   wake() ──► store thread: one round of work on the store, then sleep
                 check() ──► whether the store still responds; waits 0.1 s at most

A store whose server has ended tries to reconnect for minutes, inside a call that cannot be interrupted. So no
thread waits for this one: it is a daemon and records the deadline of its current call, which others check.
The store is the one torch.distributed was initialised with, over a separate connection if possible. It is not
kept alive: after `destroy_process_group` its server can close and its port is free again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...torch_private.watching import default_store

# A second connection for each rank keeps the job's own store traffic free. In a large job it could use up
# the files that rank 0, which serves the store, may open; there the short calls share the first connection.
_MAX_RANKS_WITH_OWN_CONNECTION = 128
_GRACE_S = 0.1  # lets a thread whose call has returned take the GIL and record that


class StoreCalls:
    """The store's calls that do not wait for another rank, valid for one round of work."""

    def __init__(self, store: Any, number: int, call: Callable[..., Any]) -> None:
        self._store, self._call = store, call
        self.number = number
        """The number of this store in the job: a new one is empty."""

    def has(self, key: str) -> bool:
        return bool(self._call(self._store.check, [key]))

    def get(self, key: str) -> bytes:
        """The value of an existing key; for a missing one this would block."""
        return bytes(self._call(self._store.get, key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of existing keys, in one call where the store has one for that."""
        store = self._store
        if hasattr(store, "has_extended_api") and store.has_extended_api():
            return [bytes(value) for value in self._call(store.multi_get, keys)]
        return [self.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self._call(self._store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to an integer, which begins at 0, in one atomic operation; the sum."""
        return int(self._call(self._store.add, key, amount))


class StoreThread:
    """Runs `work` when woken, and again after the seconds it returns.

    `work(calls, is_last)` gets None for the calls while there is no process group. After `stop` it is run
    once more with `is_last`, to write what is still queued.
    """

    def __init__(
        self,
        *,
        world_size: int,
        work: Callable[[StoreCalls | None, bool], float | None],
        own_limit_s: float,
        shared_limit_s: float,
    ) -> None:
        self._work = work
        self._own_limit_s = own_limit_s
        # A shared connection is locked while the training itself waits on it.
        self._shared_limit_s = shared_limit_s
        self._may_clone = world_size <= _MAX_RANKS_WITH_OWN_CONNECTION
        self._wake = threading.Event()
        self._begun = threading.Lock()  # acquired once, to start the thread
        self._thread: threading.Thread | None = None
        self._job_store: Callable[[], Any] | None = None
        self._own_store: Any = None
        self._stores = 0
        self._call_ends_s: float | None = None
        self._stop_ends_s: float | None = None
        self.was_connected = _has_process_group()
        """Whether there has been a process group: if there is none now, it was destroyed."""
        self.failure: str | None = None
        """Why the store is not used any more."""

    @property
    def is_usable(self) -> bool:
        """Whether requests are still processed."""
        return self.failure is None and not self.is_stopped

    @property
    def is_connected(self) -> bool:
        """Whether requests are processed and there is a process group."""
        return self.is_usable and _has_process_group()

    @property
    def is_stopped(self) -> bool:
        return self._stop_ends_s is not None

    def wake(self) -> None:
        """Run the work soon; never waits for it."""
        if not self.is_usable:
            return
        self._wake.set()
        if self._begun.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name="truemfu-store", daemon=True)
            self._thread.start()

    def check(self) -> bool:
        """Whether requests are still processed; marks the store as failed if its call is overdue."""
        if self.is_usable and self._is_overdue():
            time.sleep(_GRACE_S)
            if self._is_overdue():
                self.failure = "the job's key-value store does not respond"
        return self.is_usable

    def stop(self, timeout_s: float) -> None:
        """End the thread after one last round; waits at most `timeout_s`, and not for a store that failed."""
        was_usable = self.is_usable
        self._stop_ends_s = self._stop_ends_s or time.monotonic() + timeout_s
        self._wake.set()
        thread = self._thread
        if was_usable and thread is not None and thread.is_alive():
            thread.join(timeout_s)

    def _is_overdue(self) -> bool:
        ends_s = self._call_ends_s
        return ends_s is not None and time.monotonic() > ends_s

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.is_stopped
            try:
                pause_s = self._round(is_last)
            except _Ended:
                return
            except Exception as error:  # a store may raise anything: RuntimeError, OSError, its own errors
                if not self.is_usable:
                    return
                if _has_process_group():
                    self.failure = f"the job's key-value store cannot be used ({_reason(error)})"
                    return
                pause_s = 0.0  # the group was destroyed meanwhile, which is not a failure
            if self.failure is not None:
                return
            if not is_last:
                self._wake.wait(pause_s)
                self._wake.clear()

    def _round(self, is_last: bool) -> float | None:
        """One round; nothing else references the store, so that it can close between rounds."""
        return self._work(self._connected(), is_last)

    def _connected(self) -> StoreCalls | None:
        store = _default_store()
        if store is None:
            self._job_store = self._own_store = None
            return None
        self.was_connected = True
        if self._job_store is None or self._job_store() is not store:
            self._own_store = None
            # A store whose server has ended fails here, before a new connection is tried.
            self._call(self._shared_limit_s, store.check, ["truemfu"])
            if self._may_clone and hasattr(store, "clone"):
                with contextlib.suppress(Exception):  # another type of store, without `clone`
                    self._own_store = self._call(self._own_limit_s, store.clone)
            self._job_store = weakref.ref(store)
            self._stores += 1
        is_own = self._own_store is not None
        limit_s = self._own_limit_s if is_own else self._shared_limit_s
        return StoreCalls(
            self._own_store if is_own else store, self._stores, lambda *args: self._call(limit_s, *args)
        )

    def _call(self, limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
        is_late = self._stop_ends_s is not None and time.monotonic() > self._stop_ends_s
        if is_late or self.failure is not None:
            raise _Ended
        self._call_ends_s = time.monotonic() + limit_s
        try:
            return function(*args)
        finally:
            self._call_ends_s = None


class _Ended(BaseException):
    """The thread must end in the middle of its work."""


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _default_store() -> Any:
    """The job's store; None without a process group, or where its backend has none (MPI)."""
    if not _has_process_group():
        return None
    try:
        return default_store()
    except Exception:
        if _has_process_group():
            raise
        return None  # destroyed just now


def _reason(error: Exception) -> str:
    """The first line: torch's errors have a C++ stack after it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
