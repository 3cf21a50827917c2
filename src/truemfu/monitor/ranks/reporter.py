"""What this rank reports: a row every ten seconds, and what it did in each step.

    row thread add(step) … ── tick ──► a row when it is due ──► the rank's file
                                       a message every few seconds ──► RowExchange ──► rank 0

Rows are due 1, 2, 4 and 8 seconds after the start, then every ten seconds, so that a short run has some. All
of this is on the row thread; the training thread has no part in it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from ...trackers.lane import Lane
from .amounts import Amounts, Message, OwnAmounts, StepKey, TimedSteps, plus
from .rank_row import RankRow
from .row_sources import RowSources

GPU_NAME = "GPU-"
"""How the name of a device that is known by its UUID begins."""
ROW_EVERY_S = 10.0
FIRST_ROWS_S = (1.0, 2.0, 4.0, 8.0)
_SEND_EVERY_S = 2.0
_RANKS_PER_SECOND = 64
"""How many messages a second rank 0's store is to take; larger jobs send less often, up to every row."""
_MOST_PAUSED = 0.05
"""Of a window's steps: with more time than that in pauses, shares of its time say nothing about steps."""


def send_every_s(world_size: int) -> float:
    """How often a rank sends what is new."""
    return min(ROW_EVERY_S, max(_SEND_EVERY_S, world_size / _RANKS_PER_SECOND))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process this is, across restarts too."""

    rank: int
    world_size: int
    host: str
    device: str
    restart: int

    @classmethod
    def current(cls, rank: int, world_size: int, device: torch.device) -> Identity:
        host = socket.gethostname()
        place = os.environ.get("LOCAL_RANK", str(rank))
        name = f"{host}:{device.type}:{place}"
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # an older torch, another vendor
                name = f"{GPU_NAME}{torch.cuda.get_device_properties(device).uuid}"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=rank,
            world_size=world_size,
            host=host,
            device=name,
            restart=int(restart) if restart.isdecimal() else 0,
        )


@dataclass
class _Window:
    """The steps since the last row."""

    began_s: float
    step: int | None = None
    steps: int = 0
    seconds: float = 0.0
    timed: int = 0
    data_wait_s: float | None = None
    paused_s: float = 0.0
    flops: float | None = 0.0
    tokens: float | None = 0.0
    so_far: TimedSteps = field(default_factory=TimedSteps)
    """Of this and all windows before."""


class RankReporter:
    """Lives on the row thread; `close` may be called on any other once that has ended."""

    def __init__(
        self,
        identity: Identity,
        *,
        role_name: Callable[[], str],
        memory_bytes: Callable[[], int | None],
        send: Callable[[bytes], None],
        file: Lane | None = None,
        sources: RowSources | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._role_name, self._memory_bytes, self._send = role_name, memory_bytes, send
        self.file, self.sources, self._clock = file, sources or RowSources(), clock
        self.amounts = OwnAmounts(clock)
        self._began_s = self._sent_s = clock()
        self._window = _Window(self._began_s)
        self._row: RankRow | None = None
        self._row_due_s = self._began_s + FIRST_ROWS_S[0]
        self._sent_steps = 0
        self._is_closed = threading.Lock()

    def add(
        self,
        step: int,
        steps: int,
        seconds: float | None,
        data_wait_s: float | None,
        *,
        paused_s: float,
        is_warmup: bool,
        amounts: Amounts,
    ) -> StepKey:
        """Add a step."""
        window = self._window
        window.step = step
        window.paused_s += paused_s
        if not is_warmup:
            window.steps += steps
            window.so_far.add(steps, seconds, data_wait_s)
            window.flops = plus(window.flops, amounts.get("model_flops"))
            window.tokens = plus(window.tokens, amounts.get("tokens"))
            if seconds is not None:
                window.seconds += seconds
                window.timed += steps
            if data_wait_s is not None:
                window.data_wait_s = (window.data_wait_s or 0.0) + data_wait_s
        return self.amounts.add(step, steps, amounts)

    @property
    def due_in_s(self) -> float:
        """Seconds until the next row."""
        return max(0.0, self._row_due_s - self._clock())

    @property
    def _pause_s(self) -> float:
        return send_every_s(self.identity.world_size)

    def tick(self, *, now: bool = False) -> None:
        """Make the row that is due, and send what is new; with `now` also if it is not due yet."""
        now_s = self._clock()
        is_new = self.amounts.steps != self._sent_steps
        if now_s >= self._row_due_s or (self._row is None and now and is_new):
            self._make_row(now_s)
        elif self._row is not None and is_new and (now or now_s >= self._sent_s + self._pause_s):
            self._send_message(self._row, now_s)

    def close(self) -> None:
        """Make and send the last row, once."""
        if not self._is_closed.acquire(blocking=False):
            return
        self._make_row(self._clock(), is_last=True)
        self.sources.close()

    def _send_message(self, row: RankRow, now_s: float) -> Message:
        self._sent_s, self._sent_steps = now_s, self.amounts.steps
        message = self.amounts.message(row, self._window.so_far)
        self._send(msgspec.json.encode(message))
        return message

    def _make_row(self, now_s: float, *, is_last: bool = False) -> None:
        after_s = now_s - self._began_s
        self._row_due_s = self._began_s + next(
            (due_s for due_s in FIRST_ROWS_S if due_s > after_s), max(after_s, FIRST_ROWS_S[-1]) + ROW_EVERY_S
        )
        self._row = row = self._row_of(self._window, now_s, is_last=is_last)
        # The step stays the last one known: a window without steps is not a rank without a position.
        self._window = _Window(now_s, step=row.step, so_far=self._window.so_far)
        message = self._send_message(row, now_s)
        if self.file is not None:
            line = msgspec.to_builtins(row)
            self.file.put(
                row.step or 0, line | {"message": msgspec.to_builtins(message)} if is_last else line
            )
            self.file.wake()

    def _row_of(self, window: _Window, now_s: float, *, is_last: bool) -> RankRow:
        step_time_s, from_sources = None, {}
        if window.timed:  # else the sources go on, up to the row that has the step
            step_time_s = window.seconds / window.timed
            is_paused = window.paused_s > _MOST_PAUSED * window.seconds
            from_sources = self.sources.read(step_time_s, is_paused=is_paused)
        own = self.identity
        return RankRow(
            rank=own.rank,
            world_size=own.world_size,
            host=own.host,
            device=own.device,
            role=self._role_name(),
            restart=own.restart,
            number=1 if self._row is None else self._row.number + 1,
            at_s=time.time(),
            window_s=round(now_s - window.began_s, 3),
            is_last=is_last,
            step=window.step,
            steps=window.steps,
            step_time_s=step_time_s,
            data_wait_s=_per(window.data_wait_s, window.steps),
            memory_bytes=self._memory_bytes(),
            model_flops=_per(window.flops, window.steps),
            tokens=_per(window.tokens, window.steps),
            **from_sources,
        )


def _per(total: float | None, steps: int) -> float | None:
    return None if total is None or not steps else total / steps
