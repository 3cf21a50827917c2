"""Which rank of a job counts, and how the others get its count: without a collective and without waiting.

    row thread        ask(key, structure) ──► COUNT │ WAITING │ received data │ NOTHING (estimate)
    training thread   count_begins(step), then the count
    row thread        publish(key, structure, data) ──► the job's key-value store ──► the others' `ask`

Rank 0 counts its own structure of the model. Ranks with another structure elect one of them by an atomic
addition in the store. All calls return at once: the store is used on its own thread (store_thread.py), and a
missing key is never read, since that would block. Nothing is raised. A failure becomes a note; it is a
warning on rank 0 only, the one rank that writes a log, and only if other ranks lose its count.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...errors import one_line, warn_once
from .count_exchange import COUNT, NOTHING, WAITING, Answer, Question
from .count_log import CountLog
from .row_exchange import RowExchange
from .store_thread import StoreCalls, StoreThread

__all__ = ["COUNT", "NOTHING", "WAITING", "Answer", "LinkLimits", "RankLink"]

_STOP_S = 0.5
_GROUP_POLL_S = 1.0
_SHORTEST_PAUSE_S = 0.01
_MAX_NOTES = 100
_MAX_QUESTIONS = 64
_MAX_WRITES = 256

_created: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """Time limits."""

    answer_s: float = 120.0
    """Until rank 0 has announced a key, and again until the counting rank has published it."""
    stuck_s: float = 5.0
    """How long one store call may take before the store is considered unusable."""
    read_s: float = 1.0
    """How long `counted_after` waits for a fresh answer."""


class RankLink:
    """This process as one of the ranks of its job; created by `RankLink.current()`.

    Links of one namespace are numbered in the order of their creation, so that several monitors of a job do
    not read each other's answers; all ranks must create them in the same order.
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
        self._notice = notice
        self._notes: dict[str, None] = {}
        self._limits = limits = limits or LinkLimits()
        self._questions: dict[tuple[str, str], Question] = {}
        self._writes: deque[Callable[[StoreCalls], None]] = deque(maxlen=_MAX_WRITES)
        self._log = CountLog(f"{self._prefix}/counts")
        self._exchange: RowExchange | None = None
        self._read: threading.Event | None = None
        self._no_group_since_s: float | None = None
        self._thread = StoreThread(
            world_size=world_size,
            work=self._work,
            own_limit_s=limits.stuck_s,
            shared_limit_s=limits.answer_s + limits.stuck_s,
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
        """Whether this is the rank that measures for all, and writes the log."""
        return self.rank == 0

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes so far, warnings included."""
        return tuple(self._notes.copy())

    def note(self, text: str) -> None:
        """Add a note without a warning: for ranks that write no log."""
        self._add_note(text)

    def ask(self, key: str, structure: str) -> Answer:
        """Row thread: what this rank does about a key; may be called repeatedly, and returns at once.

        Every answer except WAITING is final. Rank 0 always counts.
        """
        if self.world_size == 1:
            return COUNT
        question = self._questions.get((key, structure))
        if question is None:
            question = self._new_question(key, structure)
        # Past the limit the store thread is waiting for a connection that the training uses.
        if question.answer is WAITING and (not self._is_usable() or question.late_s > self._limits.stuck_s):
            self._give_up(question)
        return question.answer

    def publish(self, key: str, structure: str, data: dict[str, Any]) -> None:
        """The counting rank: the form for all ranks with this structure; {}: it cannot be counted."""
        if self.world_size == 1:
            return
        question = self._questions.get((key, structure)) or self._question(key, structure)
        question.is_published = True
        self._write(lambda calls: self._publish(question, data, calls))

    def count_begins(self, step: int) -> None:
        """Training thread: a count begins after this optimizer step; only appends to a queue."""
        self._log.append(step)
        if self.world_size > 1:
            self._thread.wake()

    def counted_after(self) -> frozenset[int]:
        """Row thread: the steps after which some rank began a count, the newest few hundred.

        Costs a round trip to the store, so call it once for several rows. If that takes longer than
        `limits.read_s`, and after `stop`, the last known steps are returned.
        """
        is_read = self._read is None or self._read.is_set()  # else an earlier read is still pending
        if self.world_size > 1 and self._is_usable() and is_read:
            self._read = threading.Event()
            self._thread.wake()
            self._read.wait(self._limits.read_s)
        return self._log.steps()

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
        """End the store thread once the queue is written or `timeout_s` has passed; no more warnings."""
        if self.world_size > 1 and self._thread.is_usable:
            for question in list(self._questions.values()):
                if question.answer is COUNT and not question.is_published:
                    self.publish(question.key, question.structure, {})  # else the others wait for it
        self._thread.stop(timeout_s)

    def _question(self, key: str, structure: str) -> Question:
        return Question(link=self._prefix, key=key, structure=structure, limit_s=self._limits.answer_s)

    def _new_question(self, key: str, structure: str) -> Question:
        question = self._question(key, structure)
        answered = [name for name, asked in self._questions.items() if asked.answer is not WAITING]
        for name in answered[: max(0, len(self._questions) + 1 - _MAX_QUESTIONS)]:
            del self._questions[name]
        self._questions[key, structure] = question
        if self.is_first:
            question.settle(COUNT)
            self._write(question.announce)
        self._thread.wake()
        return question

    def _write(self, write: Callable[[StoreCalls], None]) -> None:
        self._writes.append(write)
        self._thread.wake()
        if not self._thread.is_usable:
            self._drop_writes()

    def _is_usable(self) -> bool:
        """Whether the store still responds; not for the training thread, since this may wait briefly."""
        is_usable = self._thread.check()
        if not is_usable:
            self._drop_writes()
        return is_usable

    def _drop_writes(self) -> None:
        """Drop writes that cannot be made any more, with one note unless the run is over."""
        failure, is_lost = self._thread.failure, bool(self._writes)
        self._writes.clear()
        if is_lost and failure is not None and not self._thread.is_stopped:
            warns = self.is_first and self._thread.was_connected
            self._add_note(f"{failure}; the FLOPs of other ranks are estimated", warns=warns)

    def _give_up(self, question: Question) -> None:
        if not question.settle(NOTHING) or self._thread.is_stopped:
            return
        if self._thread.failure is not None:
            why = self._thread.failure
        else:
            what = "announced" if question.counter is None else "published"
            why = f"{question.counter or 'rank 0'} {what} no count within {self._limits.answer_s:g} s"
        self._add_note(f"{why}; the FLOPs of rank {self.rank} are estimated")

    def _work(self, calls: StoreCalls | None, is_last: bool) -> float | None:
        """Store thread: all work that is due; returns the seconds until the next work may be due."""
        if calls is None:
            return self._without_group()
        self._no_group_since_s = None
        self._log.send(calls)
        read = self._read
        if read is not None and not read.is_set() and not is_last:
            self._log.receive(calls)
            read.set()
        while self._writes:
            self._writes[0](calls)
            with contextlib.suppress(IndexError):  # cleared meanwhile
                self._writes.popleft()
        read_in_s = None if self._exchange is None else self._exchange.work(calls)
        if is_last:
            return None
        pauses_s = [pause_s for pause_s in (read_in_s, self._poll_all(calls)) if pause_s is not None]
        return min(pauses_s) if pauses_s else None

    def _without_group(self) -> float | None:
        if self._read is not None:
            self._read.set()
        if self._thread.was_connected:  # destroyed, as at the end of a run: not a failure
            self._writes.clear()
            for question in self._open_questions():
                question.settle(NOTHING)
            return None
        now_s = time.monotonic()
        self._no_group_since_s = self._no_group_since_s or now_s
        if now_s > self._no_group_since_s + self._limits.answer_s:
            self._writes.clear()
            self._thread.failure = "torch.distributed is not initialized"
        return _GROUP_POLL_S

    def _open_questions(self) -> list[Question]:
        return [question for question in list(self._questions.values()) if question.answer is WAITING]

    def _poll_all(self, calls: StoreCalls) -> float | None:
        for question in self._open_questions():
            if question.next_poll_s > 0:
                continue
            try:
                question.poll(calls)
            except ValueError as error:
                if question.settle(NOTHING):
                    self._add_note(
                        f"the count from another rank cannot be read ({one_line(error)}); "
                        f"the FLOPs of rank {self.rank} are estimated"
                    )
            if question.counter == "this rank":
                self._add_note(
                    f"the model of rank {self.rank} differs from rank 0's, so it is counted separately"
                )
            if question.late_s > 0:
                self._give_up(question)
        pauses_s = [question.next_poll_s for question in self._open_questions()]
        return max(_SHORTEST_PAUSE_S, min(pauses_s)) if pauses_s else None

    def _publish(self, question: Question, data: dict[str, Any], calls: StoreCalls) -> None:
        try:
            question.publish(calls, data)
        except (TypeError, ValueError) as error:  # not serialisable as JSON
            self._add_note(f"the count cannot be published ({one_line(error)}); other ranks estimate FLOPs")
            question.publish(calls, {})

    def _add_note(self, text: str, *, warns: bool = False) -> None:
        if text in self._notes or len(self._notes) >= _MAX_NOTES:
            return
        self._notes[text] = None
        if warns:
            with contextlib.suppress(Exception):  # a filter may turn warnings into errors
                self._notice(text)


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
