"""One rank of an experiment on several GPUs, started by torchrun.

    order, port (arguments) ─► join the other ranks ─► the experiment ─► report to the worker's store

Every rank runs all phases. Rank 0 writes progress, trace and events, and its result has the figures of all
ranks. A rank that fails reports why and exits at once, without waiting for the others. Reports stay in
memory, so that a full disk does not lose them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from typing import NoReturn

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...records import CaseResult, Phase
from ..failures import status_of
from ..order import WorkerOrder, decode_order
from .experiment import CaseRun
from .lifetime import die_with_parent, exit_at_once, find_modules_here
from .rank_group import is_lost_peer, join
from .worker_report import WorkerOutput

_STORE_TIMEOUT = timedelta(minutes=1)


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended."""

    rank: int
    result: CaseResult
    ended_at_s: float
    has_lost_peer: bool = False
    """Whether it failed because another rank had ended."""


class ReportStore:
    """Where ranks leave their reports: in the memory of the worker that started them."""

    def __init__(self, port: int | None = None) -> None:
        """Without a port: the worker's own end, on a free one."""
        self._store = TCPStore(
            "127.0.0.1", port or 0, is_master=port is None, timeout=_STORE_TIMEOUT, wait_for_workers=False
        )
        self.port: int = self._store.port

    def write(self, report: RankReport) -> None:
        """Returns when the worker has it."""
        key = str(report.rank)
        self._store.set(key, msgspec.json.encode(report).decode())
        self._store.wait([key])

    def read(self, ranks: int) -> dict[int, RankReport]:
        """The reports so far, by rank."""
        written = [rank for rank in range(ranks) if self._store.check([str(rank)])]
        return {rank: msgspec.json.decode(self._store.get(str(rank)), type=RankReport) for rank in written}


def failed_result(order: WorkerOrder, error: BaseException) -> CaseResult:
    """The result of an experiment that failed before its first phase."""
    status, message = status_of(error)
    return order.result(status, Phase.START, message=message)


def start() -> NoReturn:
    """Run as a rank's process, then exit: 0 if nothing was raised."""
    started_at_s = time.time()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so any KeyboardInterrupt was raised by a trainer
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    find_modules_here()
    order, store = decode_order(sys.argv[1].encode()), ReportStore(int(sys.argv[2]))
    output = WorkerOutput()
    failure: BaseException | None
    try:
        group = join(order.case)
    except Exception as error:
        output.write_line(f"rank {os.environ['RANK']}: {error}")
        result, failure = failed_result(order, error), error
    else:
        experiment = CaseRun(
            order, output.write_line, started_at_s=started_at_s, began_at_s=started_at_s, group=group
        )
        result = experiment.run()
        failure = experiment.failure
    report = RankReport(
        rank=int(os.environ["RANK"]),
        result=result,
        ended_at_s=time.time(),
        has_lost_peer=failure is not None and is_lost_peer(failure),
    )
    store.write(report)
    exit_at_once(0 if failure is None else 1)
