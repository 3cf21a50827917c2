"""One supervised experiment: an order to a worker, and always a result.

    order ─► worker ─► progress … ─► its process ends ─► its descendants are killed ─► WorkerEnd
                │                          ▲
                └── time limit, Ctrl-C ────┘  TERM, then KILL

    WorkerEnd ─► the result that the worker sent ─────────────────────────┐
                 none: how its process ended (`failures.status_of_exit`) ─┴─► CaseResult

What a worker sends does not depend on a file system. An experiment may do anything to the files of its sweep:
they are replaced, and a note names the change.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ... import plain_files
from ...errors import RecordError, one_line
from ...records import CaseResult, Phase, PhaseTime, Status, decode, write_record
from ..failures import WorkerEnd, status_of_exit
from ..order import Progress, WorkerOrder, encode_order, environment_of, last_phase, peaks, read_progress
from ..paths import RunningCase, SweepFolder
from ..process import GRACE_S, WorkerProcess, kernel_oom_kills
from .stored import last_lines, save, stored_result, tail_of

_POLL_INTERVAL_S = 0.25

OnProgress = Callable[[Phase, float], None]
"""Called several times a second with the phase, and the seconds since the order."""


class Stop:
    """A request to stop (Ctrl-C): the first ends gracefully, the second at once."""

    def __init__(self) -> None:
        self.by_ctrl_c = False
        self.at_once = False
        self._requested = threading.Event()

    def request(self) -> None:
        self.at_once = self._requested.is_set()
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleep this long, or until a stop is requested."""
        self._requested.wait(timeout_s)


def run_case(
    start: Callable[[], WorkerProcess],
    order: WorkerOrder,
    folder: SweepFolder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_progress: OnProgress = lambda phase, elapsed_s: None,
    clock: Callable[[], float] = time.monotonic,
) -> CaseResult | None:
    """Run one order in a worker to its end; None if it was interrupted without a result.

    The result of an experiment is written, that of a probe is not.
    """
    is_probe = order.purpose == "probe"
    result: CaseResult | None = None
    try:
        worker = start()
    except OSError as error:
        message = f"its process could not be started: {one_line(error)}"
        result = order.result(Status.ERROR, Phase.START, message=message)
    else:
        notes = _prepare(worker, order, folder)
        end = watch(worker, order, time_limit_s=time_limit_s, stop=stop, on_progress=on_progress, clock=clock)
        answer = _answer(worker, order)
        if answer is not None and answer.end is not Status.OK and (end.timed_out or end.interrupted):
            # A failure written after the request to stop is caused by it.
            answer = None
        if answer is not None or not end.interrupted:
            result = _completed(answer, order, worker, end, folder, notes)
    if not is_probe:
        if result is not None:
            result = save(folder, result)
        else:
            _seal_interrupted(folder, order.name)
    folder.remove_running(order.name)
    return result


def _prepare(worker: WorkerProcess, order: WorkerOrder, folder: SweepFolder) -> list[str]:
    """Remove files of an earlier run, and write a marker for the case that this supervisor is killed."""
    log, marker = Path(order.log_path), folder.marker(order.name)
    try:
        folder.make()
        for path in (folder.progress(order.name), log, marker):
            plain_files.remove(path)
        plain_files.append(log, b"")
        mark = RunningCase(
            token=worker.token,
            began_at_s=time.time(),
            content_hash=order.content_hash,
            case=order.case,
        )
        write_record(marker, mark)
    except OSError as error:
        return [f"the sweep's folder could not be written at the start: {error.strerror}"]
    return []


def _answer(worker: WorkerProcess, order: WorkerOrder) -> CaseResult | None:
    """The worker's own result of this order; None if it ended before it had sent all of it."""
    try:
        own = decode(worker.answer, CaseResult, "the worker's answer")
    except RecordError:
        return None
    this = (order.name, order.sweep_id, order.content_hash)
    return own if (own.name, own.sweep_id, own.content_hash) == this else None


def _completed(
    answer: CaseResult | None,
    order: WorkerOrder,
    worker: WorkerProcess,
    end: WorkerEnd,
    folder: SweepFolder,
    notes: list[str],
) -> CaseResult:
    """The worker's answer, or a result from how it ended; with what only its supervisor knows."""
    log_tail = last_lines(Path(order.log_path))
    if not log_tail and not end.progress:
        # It never read its order: its output until then explains why.
        log_tail = tail_of(worker.first_output)
    notes = notes + [f"process {pid} could not be killed" for pid in end.unkillable]
    if answer is None:
        status, reason = status_of_exit(end, log_tail, folder.root)
        began = [entry for entry in end.progress if entry.rank is None]
        answer = order.result(
            status,
            end.phase,
            message=reason if end.rank is None else f"rank {end.rank}: {reason}",
            phases=[PhaseTime(phase=entry.phase, began_at_s=entry.at_s) for entry in began],
            environment=environment_of(end.progress),
        )
    elif end.signal_name is not None and not end.interrupted:
        notes.append(f"ended by {end.signal_name} after its result was written")
    return msgspec.structs.replace(
        answer,
        exit_code=end.exit_code,
        signal=end.signal_name,
        began_at_s=end.began_at_s,
        wall_s=end.wall_s,
        log_tail=[] if answer.end is Status.OK else log_tail,
        memory=answer.memory or peaks(end.progress, end.peak_bytes),
        notes=answer.notes + notes,
    )


def _seal_interrupted(folder: SweepFolder, name: str) -> None:
    """Note the interruption in the log; an earlier result stays valid and becomes its last line again."""
    with contextlib.suppress(OSError):  # only the log stays without this line
        plain_files.append(folder.log(name), b"interrupted before it finished\n")
    earlier = stored_result(name, folder.result(name), folder.log(name)).result
    if earlier is not None:
        save(folder, earlier)


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
    timed_out = interrupted = False
    seen: list[Progress] = []
    try:
        worker.send(encode_order(order))
        while not worker.wait(_POLL_INTERVAL_S):
            elapsed_s = clock() - began
            seen = _longer(read_progress(progress_file), seen)
            on_progress(last_phase(seen), elapsed_s)
            interrupted = stop.requested
            timed_out = elapsed_s > time_limit_s
            if interrupted or timed_out:
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
