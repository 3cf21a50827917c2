"""An experiment on several GPUs: its ranks, started by torchrun inside the worker, and their common result.

    order ─► torchrun: `start` × GPUs ──► a report of each rank ─► rank 0's result, with the figures of all
                         │
                         └► one ends early: torchrun ends the others at once
                              it wrote why ──────────► that is the result, with the rank's number
                              it did not (a signal) ─► this process ends in the same way: the supervisor
                                                       finds the status as it does for a single process

Every rank runs all phases. Rank 0 writes progress, trace and events, and its result has the figures of all
ranks. A rank that fails reports why and exits at once, without waiting for the others. Reports stay in
memory, so that a full disk does not lose them.

A rank that ends makes collectives of the others fail, and they report that. The cause is therefore, in this
order: the first report of anything else; a rank that ended without a report; the first report of a lost rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...records import CaseResult, Phase, Status
from ..failures import status_of
from ..order import Progress, WorkerOrder, append_progress, decode_order, encode_order, read_progress
from ..process import start_command
from ..trainers.base import Unsupported, load_trainer
from .environment import environment
from .experiment import CaseRun
from .rank_group import is_lost_peer, join
from .worker_process import die_with_parent, exit_at_once, find_modules_here, write_line

_RANK_GRACE_S = 3
"""How long a rank may ignore SIGTERM after another one failed; the supervisor gives the worker longer."""
_STORE_TIMEOUT = timedelta(minutes=1)


def run_ranks(order: WorkerOrder) -> CaseResult:
    """Run the order in as many ranks as its case has GPUs.

    It does not return if a rank ended without a report: this process then ends in the same way.
    """
    try:
        _refuse_private(order)
        store = _store()
        exit_codes = _torchrun(order, store.port)
        written = [rank for rank in range(order.case.gpus) if store.check([str(rank)])]
        reports = {rank: msgspec.json.decode(store.get(str(rank)), type=RankReport) for rank in written}
    except SignalException as stop:  # torchrun has ended the ranks
        _end_by(-stop.sigval)
    except Exception as error:
        traceback.print_exception(error)
        has_device = order.case.device == "cpu" or torch.cuda.is_available()
        found = environment(torch.device(order.case.device), order.git_commit) if has_device else None
        return msgspec.structs.replace(failed_result(order, error), environment=found)
    if set(reports) == set(range(order.case.gpus)) and not exit_codes:
        return reports[0].result
    if 0 in reports and reports[0].result.end is Status.OK:
        # Its result needs all ranks, so they failed when everything was measured.
        notes = [f"rank {rank} ended with code {code} after the result" for rank, code in exit_codes.items()]
        return msgspec.structs.replace(reports[0].result, notes=[*reports[0].result.notes, *notes])
    first = _first_report(reports)
    if first is not None and not first.has_lost_peer:
        return _of_rank(first)
    silent = [rank for rank in range(order.case.gpus) if rank not in reports]
    # SIGTERM is how torchrun ends the others.
    by_themselves = [rank for rank in silent if exit_codes.get(rank, 0) != -signal.SIGTERM]
    if by_themselves or first is None:
        rank = (by_themselves or silent)[0]
        _end_like(order, rank, exit_codes.get(rank, 0))
    return _of_rank(first)


def _refuse_private(order: WorkerOrder) -> None:
    """Clipping, summing and noise over ranks would need a check of their own, which does not exist."""
    trainer = load_trainer(order.case.trainer)
    if trainer.private and not getattr(trainer, "supports_ranks", False):
        raise Unsupported(
            f"{order.case.trainer} runs on one GPU: per-sample clipping and noise over several ranks are not "
            "supported; set gpus_per_experiment to 1"
        )


def _torchrun(order: WorkerOrder, port: int) -> Mapping[int, int]:
    """Run all ranks to their end: the exit code of each that failed, negative for a signal."""
    case = order.case
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // case.gpus)))
    # Its own lines would end the log, where the supervisor looks for what the experiment said last.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    limit = order.memory_limit_bytes
    of_rank = msgspec.structs.replace(order, memory_limit_bytes=None if limit is None else limit // case.gpus)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=case.gpus,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks write to this worker's log
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.13; before, 30 s
        config.shutdown_timeout = _RANK_GRACE_S
    python, *start = start_command("truemfu.sweep.worker.ranks")
    try:
        elastic_launch(config, python)(*start, encode_order(of_rank).decode().strip(), str(port))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _first_report(reports: Mapping[int, RankReport]) -> RankReport | None:
    """The first failure that was reported; one that another rank caused only if there is no other."""
    failed = [report for report in reports.values() if report.result.end is not Status.OK]
    return min(failed, key=lambda report: (report.has_lost_peer, report.ended_at_s), default=None)


def _of_rank(report: RankReport) -> CaseResult:
    result = report.result
    return msgspec.structs.replace(result, message=f"rank {report.rank}: {result.message}", measured=None)


def _end_like(order: WorkerOrder, rank: int, exit_code: int) -> NoReturn:
    """End this process as the rank ended, and leave the rank's number for the supervisor."""
    path = Path(order.progress_path)
    seen = read_progress(path)
    last = seen[-1] if seen else Progress(phase=Phase.START, at_s=time.time())
    with contextlib.suppress(OSError):  # the message then has no rank
        append_progress(path, msgspec.structs.replace(last, at_s=time.time(), rank=rank))
    _end_by(exit_code)


def _end_by(exit_code: int) -> NoReturn:
    """End with this exit code; a negative one is a signal."""
    if exit_code < 0:
        number = signal.Signals(-exit_code)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    exit_at_once(exit_code)


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended."""

    rank: int
    result: CaseResult
    ended_at_s: float
    has_lost_peer: bool = False
    """Whether it failed because another rank had ended."""


def _store(port: int = 0) -> TCPStore:
    """Where ranks leave their reports: in the memory of the worker, whose own end is given no port."""
    is_worker = port == 0
    return TCPStore("127.0.0.1", port, is_master=is_worker, timeout=_STORE_TIMEOUT, wait_for_workers=False)


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
    order, store, rank = decode_order(sys.argv[1].encode()), _store(int(sys.argv[2])), os.environ["RANK"]
    failure: BaseException | None
    try:
        group = join(order.case)
    except Exception as error:
        write_line(f"rank {rank}: {error}")
        result, failure = failed_result(order, error), error
    else:
        experiment = CaseRun(order, started_at_s=started_at_s, began_at_s=started_at_s, group=group)
        result = experiment.run()
        failure = experiment.failure
    report = RankReport(
        rank=int(rank),
        result=result,
        ended_at_s=time.time(),
        has_lost_peer=failure is not None and is_lost_peer(failure),
    )
    store.set(rank, msgspec.json.encode(report).decode())
    store.wait([rank])  # until the worker has it
    exit_at_once(0 if failure is None else 1)
