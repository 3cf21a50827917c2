"""This process as one of the ranks of its job, or as the only one: its role, and what ranks report.

    reporter ──► store, or on rank 0 the job itself
        └──────► file of this device's rows in the run's folder
    job (rank 0 alone) ◄── store, and at the end also the files

No call waits for another rank but `leave`. A failure becomes a note; it is a warning on rank 0 only, the one
rank that writes a log. A run of one process has neither reports nor a thread here.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import one_line
from ...trackers.lane import Lane
from .collective_times import CollectiveTimes
from .find_role import role_of
from .job_view import JobView
from .outside_time import OutsideTime
from .rank_file import FOLDER, LastMessages, RankFile, file_name
from .rank_gpu import RankGpu
from .reporter import Identity, RankReporter
from .role import UNKNOWN, WHOLE
from .row_exchange import RowExchange
from .row_sources import HostTime, RowSources
from .store_thread import StoreThread

_FILE_TIMEOUT_S = 1.0
_POLL_S = 0.02
_MAX_NOTES = 100

_created = itertools.count()


class ThisRank:
    """Made on the training thread.

    The monitors of a job are numbered in the order of their creation, so that they do not read each other's
    messages; all ranks must create them in the same order.
    """

    def __init__(self, rank: int, world_size: int, notice: Callable[..., None]) -> None:
        self.rank, self.world_size = rank, world_size
        self._notice, self._notes = notice, dict[str, None]()
        self.role = WHOLE
        """Which part of the job's work this rank does."""
        self.role_is_due = True
        """Whether `find_role` is to be called in the next forward pass."""
        self.job = JobView(world_size, notice=notice) if self.is_first and world_size > 1 else None
        exchange = RowExchange(
            f"truemfu/monitor/{next(_created)}/rows",
            rank,
            world_size=world_size,
            take=None if self.job is None else self.job.take,
        )
        self.store = StoreThread(exchange, world_size=world_size)
        self.reporter: RankReporter | None = None
        """What this rank reports; None in a run of one process."""
        self._folder, self._began_at_s = Path(), time.time()
        self._last_messages: LastMessages | None = None

    @classmethod
    def current(cls, notice: Callable[..., None]) -> ThisRank:
        """The rank from torch.distributed, else from RANK and WORLD_SIZE (torchrun), else 0 of 1."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), notice)
        return cls(*launched(notice), notice)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes the log."""
        return self.rank == 0

    def note(self, text: str) -> None:
        """Add a note without a warning: for ranks that write no log."""
        if len(self._notes) < _MAX_NOTES:
            self._notes[text] = None

    @property
    def notes(self) -> list[str]:
        """For the summary: all notes so far, and on rank 0 after the end of the run what became of others."""
        of_others = [] if self.job is None or self._last_messages is None else self.job.notes()
        return [*self._notes.copy(), *of_others]

    def join(
        self,
        folder: Path,
        *,
        device: torch.device,
        reads_gpu: bool,
        clock_hz: Callable[[], float | None],
        memory_bytes: Callable[[], int | None],
    ) -> None:
        """Begin to report, in a job of several ranks."""
        if self.world_size == 1:
            return
        self._folder = folder
        own = Identity.current(self.rank, self.world_size, device)
        file = Lane(
            RankFile(folder / FOLDER / file_name(own.host, own.device)),
            "the rank's rows",
            notice=self._notice if self.is_first else self.note,
        )
        file.start({})
        on_gpu = device.type == "cuda"
        self.reporter = RankReporter(
            own,
            role_name=lambda: self.role.name,
            memory_bytes=memory_bytes,
            send=self.store.send if self.job is None else self.job.take_own,
            file=file,
            sources=RowSources(
                gpu=RankGpu(own.device, _processors(device)) if on_gpu and reads_gpu else None,
                clock_hz=clock_hz,
                collectives=CollectiveTimes() if on_gpu else None,
                host_time=None if on_gpu else HostTime(threading.get_native_id()),
                outside=None if on_gpu else OutsideTime(),
            ),
        )
        self.store.wake()

    @property
    def files(self) -> list[Lane]:
        """The file of this rank's rows, in a job."""
        return [] if self.reporter is None or self.reporter.file is None else [self.reporter.file]

    def find_role(self, models: Iterable[nn.Module]) -> None:
        """Find the role: in a forward pass, when pipeline stages and split sequences are there."""
        self.role_is_due = False
        if self.world_size == 1:
            return
        try:
            self.role = role_of(models)
        except Exception as error:
            self.role = UNKNOWN
            self._notice(f"the job's samples and tokens are unknown: {one_line(error)}")

    @property
    def collective_share(self) -> float | None:
        """The share of time in the collectives of the busiest group, in the last row."""
        return None if self.reporter is None else self.reporter.sources.collective_share

    @property
    def is_connected(self) -> bool:
        """Whether reports of other ranks arrive: by the store, or at the end by files."""
        return self._last_messages is not None or self.store.is_connected

    @property
    def expects_reports(self) -> bool:
        """The same, or by files later: many programs destroy the group some time before the run's end."""
        return self.is_connected or self.store.was_connected

    def expect_last_reports(self) -> None:
        """The run has ended: rank 0 also reads what other ranks have left in the folder."""
        if self.job is not None:
            take = functools.partial(self.job.take, from_store=False)
            self._last_messages = LastMessages(self._folder, since_s=self._began_at_s, take=take)
            self.job.expect_all()

    def leave(self, ends_s: float) -> None:
        """Send this rank's last row; on rank 0, wait until `ends_s` for those of the others."""
        if self.reporter is None:
            return
        self.reporter.close()
        while self.job is not None and self.job.unfinished() and time.monotonic() < ends_s:
            self.store.read_soon()
            time.sleep(_POLL_S)
        if self._last_messages is not None:
            self._last_messages.close()
        if not self.is_first:  # rank 0's file is closed with its output
            for file in self.files:
                file.close({}, _FILE_TIMEOUT_S)

    def figures(self) -> dict[str, Any] | None:
        """On rank 0, the figures of the job so far."""
        if self.job is None or self.reporter is None:
            return None
        totals = self.job.totals(self.reporter)
        tokens, useful_tokens = totals["tokens"], totals["useful_tokens"]
        is_known = tokens and useful_tokens is not None
        return {
            "totals": totals,
            "padding_lost": 1 - useful_tokens / tokens if is_known else None,
            "ranks": self.job.table(),
            "stragglers": self.job.stragglers(),
        }


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


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
