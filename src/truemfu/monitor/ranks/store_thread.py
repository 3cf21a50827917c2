"""The one thread on which a rank uses the job's key-value store: messages to rank 0, without a collective.

    any thread   send(message), read_soon() ──► store thread: one round of `RowExchange`, then sleep
                 is_connected ──► whether the store still responds; waits 0.1 s at most

Nothing is raised, and no call but `stop` waits for this thread: a store whose server has ended tries to
reconnect for minutes, inside a call that cannot be interrupted. So the thread is a daemon and records the
deadline of its current call, which others check. The store is the one torch.distributed was initialised with,
over a separate connection if possible. It is not kept alive: after `destroy_process_group` its server can
close and its port is free again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...torch_private.watching import default_store
from .row_exchange import RowExchange

GROUP_S = 120.0
"""How long a process group is waited for."""
STUCK_S = 5.0
"""How long one store call may take before the store is considered unusable."""
# A second connection for each rank keeps the job's own store traffic free. In a large job it could use up
# the files that rank 0, which serves the store, may open; there the short calls share the first connection.
_MAX_RANKS_WITH_OWN_CONNECTION = 128
_GRACE_S = 0.1  # lets a thread whose call has returned take the GIL and record that
_GROUP_POLL_S = 1.0
_STOP_S = 0.5


class StoreThread:
    """Starts with the first call that wakes it."""

    def __init__(
        self, exchange: RowExchange, *, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exchange, self._clock = exchange, clock
        self._may_clone = world_size <= _MAX_RANKS_WITH_OWN_CONNECTION
        self._wake = threading.Event()
        self._begun = threading.Lock()  # acquired once, to start the thread
        self._thread: threading.Thread | None = None
        self._job_store: Callable[[], Any] | None = None
        self._own_store: Any = None
        self._stores = 0
        self._had_group = _has_process_group()
        self._no_group_since_s: float | None = None
        self._call_ends_s: float | None = None
        self._stop_ends_s: float | None = None
        self.failure: str | None = None
        """Why the store is not used any more."""

    def send(self, message: bytes) -> None:
        """Send this to rank 0, in place of a message that was not sent yet."""
        self._exchange.put(message)
        self.wake()

    def read_soon(self) -> None:
        """On rank 0: read messages more often for a moment."""
        self._exchange.hurry()
        self.wake()

    def wake(self) -> None:
        """Exchange messages from now on, with a round soon."""
        if not self._is_usable:
            return
        self._wake.set()
        if self._begun.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name="truemfu-store", daemon=True)
            self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether messages can be exchanged: the store responds, and there is a process group."""
        return self._responds() and _has_process_group()

    @property
    def was_connected(self) -> bool:
        """Whether there is a process group or has been one, and its store has not failed."""
        return self._responds() and self._had_group

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the thread after one last round; waits at most `timeout_s`, and not for a store that failed."""
        was_usable = self._is_usable
        self._stop_ends_s = self._stop_ends_s or self._clock() + timeout_s
        self._wake.set()
        thread = self._thread
        if was_usable and thread is not None and thread.is_alive():
            thread.join(timeout_s)

    @property
    def _is_usable(self) -> bool:
        return self.failure is None and self._stop_ends_s is None

    def _responds(self) -> bool:
        """Whether messages are still exchanged; marks the store as failed if its call is overdue."""
        if self._is_usable and self._is_overdue():
            time.sleep(_GRACE_S)
            if self._is_overdue():
                self.failure = "the job's key-value store does not respond"
        return self._is_usable

    def _is_overdue(self) -> bool:
        ends_s = self._call_ends_s
        return ends_s is not None and self._clock() > ends_s

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop_ends_s is not None
            try:
                pause_s = self._round()
            except _Ended:
                return
            except Exception as error:  # a store may raise anything: RuntimeError, OSError, its own errors
                if not self._is_usable:
                    return
                if _has_process_group():
                    self.failure = f"the job's key-value store cannot be used ({_reason(error)})"
                pause_s = 0.0  # without a failure the group was destroyed meanwhile
            if self.failure is not None:
                return
            if not is_last:
                self._wake.wait(pause_s)
                self._wake.clear()

    def _round(self) -> float | None:
        """All work that is due; returns the seconds until the next round, None: until it is woken.

        Nothing else references the store, so that it can close between rounds.
        """
        store = _default_store()
        if store is None:
            self._job_store = self._own_store = None
            return self._without_group()
        self._had_group, self._no_group_since_s = True, None
        used, limit_s = self._usable(store)
        return self._exchange.work(used, self._stores, functools.partial(self._call, limit_s))

    def _without_group(self) -> float | None:
        if self._had_group:  # destroyed, as at the end of a run: not a failure
            return None
        now_s = self._clock()
        self._no_group_since_s = self._no_group_since_s or now_s
        if now_s > self._no_group_since_s + GROUP_S:
            self.failure = "torch.distributed is not initialized"
        return _GROUP_POLL_S

    def _usable(self, store: Any) -> tuple[Any, float]:
        """Our own connection to the store if there is one, and how long a call may take."""
        shared_limit_s = GROUP_S + STUCK_S  # the connection is locked while the training itself waits on it
        if self._job_store is None or self._job_store() is not store:
            self._own_store = None
            # A store whose server has ended fails here, before a new connection is tried.
            self._call(shared_limit_s, store.check, ["truemfu"])
            if self._may_clone and hasattr(store, "clone"):
                with contextlib.suppress(Exception):  # another type of store, without `clone`
                    self._own_store = self._call(STUCK_S, store.clone)
            self._job_store = weakref.ref(store)
            self._stores += 1
        return (store, shared_limit_s) if self._own_store is None else (self._own_store, STUCK_S)

    def _call(self, limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
        is_late = self._stop_ends_s is not None and self._clock() > self._stop_ends_s
        if is_late or self.failure is not None:
            raise _Ended
        self._call_ends_s = self._clock() + limit_s
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
