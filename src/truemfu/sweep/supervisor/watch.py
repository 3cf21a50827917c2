"""A worker from its order to the end of its last descendant.

order ─► worker ─► progress … ─► its process ends ─► its descendants are killed ─► WorkerEnd
            │                          ▲
            └── time limit, Ctrl-C ────┘  TERM, then KILL
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...records import Phase
from ..failures import WorkerEnd
from ..order import WorkerOrder, encode_order
from ..process import GRACE_S, WorkerProcess, kernel_oom_kills
from ..progress import Progress, last_phase, read_progress

_POLL_INTERVAL_S = 0.25
_EXIT_TIMEOUT_S = 60.0
"""How long a worker may take to end once it has written its result."""

OnProgress = Callable[[Phase, float], None]
"""Called several times a second with the phase, and the seconds since the order."""


class Stop:
    """A request to stop (Ctrl-C): the first ends gracefully, the second at once."""

    def __init__(self) -> None:
        self.by_ctrl_c = False
        self._requested = threading.Event()
        self._at_once = threading.Event()

    def request(self) -> None:
        if self._requested.is_set():
            self._at_once.set()
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    @property
    def at_once(self) -> bool:
        return self._at_once.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleep this long, or until a stop is requested."""
        self._requested.wait(timeout_s)


def watch(
    worker: WorkerProcess,
    order: WorkerOrder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_progress: OnProgress,
    clock: Callable[[], float] = time.monotonic,
) -> WorkerEnd:
    """Send the worker its order and wait until it and all its descendants have ended."""
    progress_file = Path(order.progress_path)
    kills_before = kernel_oom_kills()
    began_at_s, began = time.time(), clock()
    done_since: float | None = None
    timed_out = interrupted = False
    seen: list[Progress] = []
    try:
        worker.send(encode_order(order))
        while not worker.wait(_POLL_INTERVAL_S):
            elapsed_s = clock() - began
            seen = _longer(read_progress(progress_file), seen)
            phase = last_phase(seen)
            on_progress(phase, elapsed_s)
            if phase is Phase.DONE and done_since is None:
                done_since = elapsed_s
            interrupted = stop.requested
            timed_out = elapsed_s > time_limit_s
            does_not_exit = done_since is not None and elapsed_s - done_since > _EXIT_TIMEOUT_S
            if interrupted or timed_out or does_not_exit:
                break
    finally:
        unkillable = worker.end(GRACE_S, hurry=lambda: stop.at_once)
    kills = kernel_oom_kills()
    return WorkerEnd(
        exit_code=worker.exit_code,
        signal_name=worker.signal_name,
        began_at_s=began_at_s,
        wall_s=clock() - began,
        progress=_longer(read_progress(progress_file), seen),
        peak_bytes=worker.peak_bytes,
        timed_out=timed_out,
        interrupted=interrupted,
        kernel_killed=kills is not None and kills_before is not None and kills > kills_before,
        unkillable=unkillable,
    )


def _longer(now: list[Progress], before: list[Progress]) -> list[Progress]:
    """The progress now, or as read before its file was lost."""
    return now if len(now) >= len(before) else before
