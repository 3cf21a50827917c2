"""The batches of experiments that a sweep has given to a cluster and that have not all ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...errors import RecordError, UsageError
from ...records import CaseResult, read_record
from ..folder_claim import FolderLock
from ..launchers.engine import Engine
from ..launchers.jobs import Batch, Claim, JobsFolder
from ..launchers.ray_engine import Ray
from ..launchers.settings import ClusterSettings
from ..launchers.slurm import Slurm
from ..order import WorkerOrder
from ..paths import RunningCase, SweepFolder
from ..process import kill_leftovers

_CANCEL_TIMEOUT_S = 120.0
_CANCEL_POLL_S = 0.5


def engine_of(launcher: str, settings: ClusterSettings) -> Engine:
    """The engine of this launcher, slurm or ray."""
    return Slurm(settings) if launcher == "slurm" else Ray(settings)


@dataclass
class SubmittedBatch:
    """A batch, and what of it has not ended."""

    batch: Batch
    jobs: JobsFolder
    left: dict[int, WorkerOrder]
    claims: dict[int, Claim] = field(default_factory=dict)
    over_since: dict[int, float] = field(default_factory=dict)
    """When the engine first reported the job as over, for claimed experiments without a result."""

    def forget(self, number: int) -> None:
        """An experiment has ended."""
        del self.left[number]
        self.over_since.pop(number, None)


def submitted_batches(folder: SweepFolder, *, tidy: bool = True) -> list[SubmittedBatch]:
    """What earlier calls have submitted and what has not ended, oldest first; `tidy` removes what is over.

    A UsageError if a batch cannot be read: its experiments may be running.
    """
    found = []
    for path in folder.all_jobs():
        jobs, left = JobsFolder(path), {}
        try:
            batch = jobs.read_batch()
        except RecordError as error:
            raise UsageError(
                f"{error}; its experiments may be running: restore the file, or remove {path} once they have "
                "ended"
            ) from None
        if batch is not None:  # else its supervisor was killed before it submitted, or all had ended
            orders = {number: jobs.read(number, WorkerOrder) for number in jobs.listing()[".order"]}
            left = {n: order for n, order in sorted(orders.items()) if order and n < len(batch.names)}
        if batch is not None and left:
            found.append(SubmittedBatch(batch=batch, jobs=jobs, left=left))
        elif tidy:
            with contextlib.suppress(OSError):  # a folder that cannot be written
                jobs.remove()
    return sorted(found, key=lambda each: each.batch.created_at_s)


def result_of(folder: SweepFolder, order: WorkerOrder, claim: Claim) -> CaseResult | None:
    """What the node with this claim wrote of its order; both times are of the node's clock."""
    path = folder.result(order.name)
    if not claim.at_s or not os.path.lexists(path):
        return None
    try:
        result = read_record(path, CaseResult)
    except RecordError:
        return None
    own = (result.sweep_id, result.content_hash) == (order.sweep_id, order.content_hash)
    return result if own and (result.began_at_s or 0.0) >= claim.at_s else None


def launchers_in_use(folder: SweepFolder) -> set[str]:
    """The engines that experiments of this sweep were given to and have not all come back from."""
    return {found.batch.launcher for found in submitted_batches(folder, tidy=False)}


def cancel_all(root: Path) -> int:
    """Cancel every job of a sweep and wait until all are over; how many experiments had not ended.

    They have no result, as after Ctrl-C: the next call runs them. Results that were finished are kept.
    """
    folder = SweepFolder(root.absolute())
    if not os.path.lexists(folder.record):
        raise UsageError(f"{folder.root} does not contain a sweep: nothing to cancel")
    lock = None
    try:
        lock = FolderLock(folder)
        return sum(_cancel(folder, found) for found in submitted_batches(folder))
    except OSError as error:
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}") from error
    finally:
        if lock is not None:
            lock.release()


def _cancel(folder: SweepFolder, found: SubmittedBatch) -> int:
    engine = engine_of(found.batch.launcher, found.batch.settings)
    running = [number for number in found.left if not found.jobs.try_claim(number, withdraw=True)]
    engine_job = engine.find(found.batch, found.jobs)
    if engine_job is not None:
        found.batch = msgspec.structs.replace(found.batch, engine_job=engine_job)
        engine.cancel(found.batch, found.jobs)
    finished = 0
    until = time.monotonic() + _CANCEL_TIMEOUT_S
    while running and time.monotonic() < until:
        claims = {number: found.jobs.read_claim(number) for number in running}
        states = engine.job_states(found.batch, found.jobs, {n: claims[n].engine_job for n in running})
        for number in [number for number, state in states.items() if state.over]:
            finished += result_of(folder, found.left[number], claims[number]) is not None
            name = found.batch.names[number]
            end_on_this_host(folder, name, claims[number])
            folder.remove_running(name)
            running.remove(number)
        if running:
            time.sleep(_CANCEL_POLL_S)
    if running:
        raise UsageError(
            f"{len(running)} jobs have not ended {_CANCEL_TIMEOUT_S:.0f} s after {engine.name} was asked to "
            "cancel them: run --cancel again later"
        )
    count = len(found.left) - finished
    found.jobs.remove()
    return count


def end_on_this_host(folder: SweepFolder, name: str, claim: Claim) -> None:
    """End what a killed node agent left running, where that was on this machine."""
    if claim.host == socket.gethostname():
        with contextlib.suppress(RecordError):
            kill_leftovers(read_record(folder.marker(name), RunningCase).token)
