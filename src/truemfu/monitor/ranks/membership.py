"""This rank as a member of its job: what it reports, where its rows are kept, and rank 0's view of all ranks.

    reporter ──► store, or on rank 0 the job itself
        └──────► file of this device's rows in the run's folder
    job (rank 0 alone) ◄── store, and at the end also the files

A run of one process has none of this.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...trackers.lane import Lane
from ..notices import Notices
from .collective_times import CollectiveTimes
from .job import Job
from .outside_time import OutsideTime
from .rank_file import FOLDER, LastMessages, RankFile, file_name
from .rank_gpu import RankGpu
from .rank_link import RankLink
from .reporter import HostTime, Identity, RankReporter

_FILE_TIMEOUT_S = 1.0
_POLL_S = 0.02


class Membership:
    """Made on the training thread, in a job of several ranks."""

    def __init__(
        self,
        ranks: RankLink,
        folder: Path,
        *,
        device: torch.device,
        reads_gpu: bool,
        clock_hz: Callable[[], float | None],
        role_name: Callable[[], str],
        memory_bytes: Callable[[], int | None],
        notices: Notices,
    ) -> None:
        self._ranks, self._folder, self._began_at_s = ranks, folder, time.time()
        own = Identity.current(ranks.rank, ranks.world_size, device)
        self.file = Lane(
            RankFile(folder / FOLDER / file_name(own.host, own.device)),
            "the rank's rows",
            notice=notices if ranks.is_first else ranks.note,
        )
        self.file.start({})
        self.job = Job(ranks.world_size, notice=notices) if ranks.is_first else None
        on_gpu = device.type == "cuda"
        self.reporter = RankReporter(
            own,
            role_name=role_name,
            memory_bytes=memory_bytes,
            send=ranks.send_message if self.job is None else self._take_own,
            file=self.file,
            gpu=RankGpu(own.device, _processors(device)) if on_gpu and reads_gpu else None,
            clock_hz=clock_hz,
            collectives=CollectiveTimes() if on_gpu else None,
            host_time=None if on_gpu else HostTime(threading.get_native_id()),
            outside=None if on_gpu else OutsideTime(threading.get_ident()),
        )
        ranks.exchange_rows(None if self.job is None else self.job.take)
        self._last_messages: LastMessages | None = None

    def expect_last_reports(self) -> None:
        """The run has ended: rank 0 also reads what other ranks have left in the folder."""
        if self.job is not None:
            take = functools.partial(self.job.take, from_store=False)
            self._last_messages = LastMessages(self._folder, since_s=self._began_at_s, take=take)
            self.job.expect_all()

    def is_connected(self) -> bool:
        """Whether reports of other ranks arrive: by the store, or at the end by files."""
        return self._ranks.is_connected or self._last_messages is not None

    def expects_reports(self) -> bool:
        """The same, or by files later: many programs destroy the group some time before the run's end."""
        return self.is_connected() or self._ranks.was_connected

    def leave(self, ends_s: float) -> None:
        """Send this rank's last row; on rank 0, wait until `ends_s` for those of the others."""
        self.reporter.close()
        while self.job is not None and self.job.unfinished() and time.monotonic() < ends_s:
            self._ranks.read_soon()
            time.sleep(_POLL_S)
        if self._last_messages is not None:
            self._last_messages.close()
        if self.job is None:  # rank 0's file is closed with its output
            self.file.close({}, _FILE_TIMEOUT_S)

    def figures(self) -> dict[str, Any] | None:
        """On rank 0, the figures of the job so far."""
        if self.job is None:
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

    def last_notes(self) -> list[str]:
        """On rank 0, after the end of the run: what the summary says of the ranks."""
        return [] if self.job is None or self._last_messages is None else self.job.notes()

    def _take_own(self, message: bytes) -> None:
        assert self.job is not None
        self.job.take([message], from_store=False)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
