"""The node agent: one experiment of a batch, on the node that an engine chose for it.

    python -c … <jobs folder> <number>

    claim it ─► still wanted? ─► the same supervision as on one machine (`supervise.run_case`) ─► its result
       │ taken, or withdrawn: nothing to do

It does not import torch. SIGTERM, or the end of the process that started it, ends the experiment: the
supervisor then asks the engine for the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ...errors import RecordError
from ...records import Phase
from ..launchers.engine import ENGINE_JOB_VARIABLE
from ..launchers.jobs import Batch, JobsFolder
from ..launchers.local import imports_of
from ..order import WorkerOrder
from ..paths import SweepFolder
from ..process import WorkerProcess
from .stored import is_stored, save
from .supervise import Stop, run_case

_CHECK_INTERVAL_S = 10.0
_CHECKS = 3
"""An order that an experiment removed with its folder is written again in between."""
_WRITE_FOR_S = 300.0
"""How long writing the result is tried: a full disk or a file server may come back."""


def main(arguments: Sequence[str]) -> int:
    jobs, number = JobsFolder(Path(arguments[0])), int(arguments[1])
    stop = Stop()

    def request_stop(signal_number: int, frame: FrameType | None) -> None:
        stop.request()

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, request_stop)
    batch = order = None
    with contextlib.suppress(FileNotFoundError, RecordError):  # the folder was removed
        if not jobs.try_claim(number, engine_job=os.environ.get(ENGINE_JOB_VARIABLE)):
            print("not run: the experiment was already started once, or withdrawn")
            return 0
        batch, order = jobs.read_batch(), jobs.read(number, WorkerOrder)
    if batch is None or order is None:
        jobs.drop_claim(number)
        print("not run: the sweep no longer waits for this experiment")
    elif not stop.requested:
        _run(batch, order, jobs, number, stop)
    return 0


def _run(batch: Batch, order: WorkerOrder, jobs: JobsFolder, number: int, stop: Stop) -> None:
    """Run it; its result is written, unless it was interrupted."""
    folder = SweepFolder(Path(order.folder))
    parent = os.getppid()
    missing, checked_at_s = 0, 0.0

    def end_with_parent(phase: Phase, elapsed_s: float) -> None:
        """Also when a sweep that gave this node up has withdrawn the order."""
        nonlocal missing, checked_at_s
        if elapsed_s - checked_at_s > _CHECK_INTERVAL_S:
            checked_at_s = elapsed_s
            withdrawn = folder.lock.exists() and jobs.read(number, WorkerOrder) is None
            missing = missing + 1 if withdrawn else 0
        if (os.getppid() != parent or missing >= _CHECKS) and not stop.requested:
            stop.request()

    command = [*batch.command, *imports_of(order.case)]
    # What the engine set, with no GPU for an experiment that requested none.
    environment = dict(os.environ) if batch.request.gpus else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = run_case(
        lambda: WorkerProcess(command, environment=environment),
        order,
        folder,
        time_limit_s=batch.time_limit_s,
        stop=stop,
        on_progress=end_with_parent,
    )
    until = time.monotonic() + _WRITE_FOR_S
    while result is not None and not is_stored(folder, result) and time.monotonic() < until:
        time.sleep(1.0)
        save(folder, result)


def start() -> NoReturn:
    """Run as the agent's process, then exit."""
    sys.exit(main(sys.argv[1:]))
