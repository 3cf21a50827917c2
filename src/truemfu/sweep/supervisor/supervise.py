"""One supervised experiment: an order to a worker, and always a result.

    order ─► worker ─► progress … ─► its process ends ─► its descendants are killed ─► CaseResult
                │                          ▲
                └── time limit, Ctrl-C ────┘  TERM, then KILL

Sources of the result, in this order: the one the worker sent, which does not depend on a file system; the one
it wrote in this run; the one at the end of its log; how its process ended, and the last phase in its progress
file. An experiment may do anything to these files: they are replaced, and a note names the change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ... import plain_files
from ...errors import RecordError, one_line
from ...records import (
    CaseResult,
    Environment,
    Memory,
    Phase,
    PhaseTime,
    Status,
    decode,
    read_record,
    write_record,
)
from ..order import WorkerOrder, encode_order
from ..paths import RunningCase, SweepFolder
from ..process import GRACE_S, WorkerProcess, kernel_oom_kills
from ..progress import Progress, read_progress
from .case_log import last_lines, read_log_end, seal_log

_POLL_INTERVAL_S = 0.25
_EXIT_TIMEOUT_S = 60.0
"""How long a worker may take to end once it has written its result."""


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


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a worker's process ended, and its progress."""

    began_at_s: float
    wall_s: float
    progress: list[Progress]
    timed_out: bool = False
    interrupted: bool = False
    kernel_killed: bool = False
    """Whether the kernel's OOM killer killed a process meanwhile."""
    stuck: list[int]
    """Processes that could not be killed."""

    @property
    def phase(self) -> Phase:
        return self.progress[-1].phase if self.progress else Phase.START

    @property
    def rank(self) -> int | None:
        """The rank of several that ended without a result, and the worker with it."""
        return self.progress[-1].rank if self.progress else None

    @property
    def working_until_s(self) -> float:
        """The end of its own work: at phase done, or with its process."""
        done = [entry.at_s for entry in self.progress if entry.phase is Phase.DONE]
        return done[0] if done else self.began_at_s + self.wall_s


def watch(
    worker: WorkerProcess,
    order: WorkerOrder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_progress: Callable[[Phase, float], None] = lambda phase, elapsed_s: None,
) -> Watched:
    """Send the worker its order and wait until it and all its descendants have ended."""
    progress_file = Path(order.progress_path)
    kills_before = kernel_oom_kills()
    began_at_s, began = time.time(), time.monotonic()
    done_since: float | None = None
    timed_out = interrupted = False
    seen: list[Progress] = []
    try:
        worker.send(encode_order(order))
        while not worker.wait(_POLL_INTERVAL_S):
            elapsed_s = time.monotonic() - began
            seen = _longer(read_progress(progress_file), seen)
            phase = seen[-1].phase if seen else Phase.START
            on_progress(phase, elapsed_s)
            if phase is Phase.DONE and done_since is None:
                done_since = elapsed_s
            interrupted = stop.requested
            timed_out = elapsed_s > time_limit_s
            if (
                interrupted
                or timed_out
                or (done_since is not None and elapsed_s - done_since > _EXIT_TIMEOUT_S)
            ):
                break
    finally:
        stuck = worker.end(GRACE_S, hurry=lambda: stop.at_once)
    kills = kernel_oom_kills()
    return Watched(
        began_at_s=began_at_s,
        wall_s=time.monotonic() - began,
        progress=_longer(read_progress(progress_file), seen),
        timed_out=timed_out,
        interrupted=interrupted,
        kernel_killed=kills is not None and kills_before is not None and kills > kills_before,
        stuck=stuck,
    )


def _longer(now: list[Progress], before: list[Progress]) -> list[Progress]:
    """The progress now, or as read before its file was lost."""
    return now if len(now) >= len(before) else before


def run_case(
    worker: WorkerProcess,
    order: WorkerOrder,
    folder: SweepFolder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_progress: Callable[[Phase, float], None] = lambda phase, elapsed_s: None,
) -> CaseResult | None:
    """Run one experiment to its end and write its result; None if it was interrupted without one."""
    name = order.name
    before = _signature(folder.result(name))
    notes = _prepare(worker, order, folder)
    seen = watch(worker, order, time_limit_s=time_limit_s, stop=stop, on_progress=on_progress)
    answer = _answer(worker, folder, order, before)
    if answer is not None and answer.end is not Status.OK and (seen.timed_out or seen.interrupted):
        # A failure written after the request to stop is caused by it.
        answer = None
    if answer is None and seen.interrupted:
        result = None
        _seal_interrupted(folder, name)
    else:
        result = _conclude(order, worker, seen, answer, folder)
        notes += [f"process {pid} could not be killed" for pid in seen.stuck]
        result = save(folder, msgspec.structs.replace(result, notes=result.notes + notes))
    for path in (folder.marker(name), folder.progress(name)):
        with contextlib.suppress(OSError):  # not writable: the next call removes it
            plain_files.remove(path)
    return result


def not_started(order: WorkerOrder, error: OSError) -> CaseResult:
    """The result of an experiment whose worker could not be started."""
    return CaseResult(
        name=order.name,
        sweep_id=order.sweep_id,
        content_hash=order.content_hash,
        case=order.case,
        end=Status.ERROR,
        phase=Phase.START,
        message=f"its process could not be started: {one_line(error)}",
    )


def save(folder: SweepFolder, result: CaseResult) -> CaseResult:
    """Write a result to its file and the end of its log; replaced files and errors are in its notes."""
    file, log = folder.result(result.name), folder.log(result.name)
    found = _clear_paths(folder, file, log)
    if found:
        result = msgspec.structs.replace(result, notes=[*result.notes, *found])
    problems = []
    try:
        write_record(file, result, durable=True)
    except OSError as error:
        problems.append(f"{file.relative_to(folder.root)} could not be written: {error.strerror}")
    try:
        seal_log(log, result)
    except OSError as error:
        problems.append(f"{log.relative_to(folder.root)} could not be written: {error.strerror}")
    return msgspec.structs.replace(result, notes=result.notes + problems) if problems else result


def _clear_paths(folder: SweepFolder, *files: Path) -> list[str]:
    """Create missing folders, and remove anything that is not a file at these paths; a note for each."""
    found = []
    try:
        if made := folder.make():
            found.append(f"{', '.join(f'{name}/' for name in made)} was removed and has been created again")
        for path in files:
            if (instead := plain_files.what_is_there(path)) is not None:
                plain_files.remove(path)
                found.append(f"{path.parent.name}/{path.name} became {instead} and has been replaced")
    except OSError:
        pass  # writing the files reports the error
    return found


def _prepare(worker: WorkerProcess, order: WorkerOrder, folder: SweepFolder) -> list[str]:
    """Remove files of an earlier run, and write a marker for the case that this supervisor is killed."""
    log, marker = folder.log(order.name), folder.marker(order.name)
    try:
        folder.make()
        for path in (folder.progress(order.name), log, marker):
            plain_files.remove(path)
        plain_files.append(log, b"")
        mark = RunningCase(
            pid=worker.pid,
            token=worker.token,
            began_at_s=time.time(),
            content_hash=order.content_hash,
            case=order.case,
        )
        write_record(marker, mark)
    except OSError as error:
        return [f"the sweep's folder could not be written at the start: {error.strerror}"]
    return []


def _signature(path: Path) -> tuple[int, int] | None:
    """Changes when a file is rewritten."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _answer(
    worker: WorkerProcess, folder: SweepFolder, order: WorkerOrder, before: tuple[int, int] | None
) -> CaseResult | None:
    """The worker's own result of this run."""
    path = folder.result(order.name)
    found: list[CaseResult | None] = []
    with contextlib.suppress(RecordError):  # it ended before it had sent all of it
        found.append(decode(worker.answer, CaseResult, "the worker's answer"))
    if _signature(path) not in (None, before):
        with contextlib.suppress(RecordError):  # not a result, or an incomplete one
            found.append(read_record(path, CaseResult))
    found.append(read_log_end(folder.log(order.name)).result)
    this = (order.name, order.sweep_id, order.content_hash)
    for result in found:
        if result is not None and (result.name, result.sweep_id, result.content_hash) == this:
            return result
    return None


def _conclude(
    order: WorkerOrder, worker: WorkerProcess, seen: Watched, answer: CaseResult | None, folder: SweepFolder
) -> CaseResult:
    tail = last_lines(folder.log(order.name))
    if not tail and not seen.progress:
        # It never read its order: its output until then explains why.
        tail = last_lines(worker.log)
    if answer is None:
        status, message = _cause(worker, seen, tail, folder)
        if seen.rank is not None:
            message = f"rank {seen.rank}: {message}"
        answer = CaseResult(
            name=order.name,
            sweep_id=order.sweep_id,
            content_hash=order.content_hash,
            case=order.case,
            end=status,
            phase=seen.phase,
            message=message,
            phases=[
                PhaseTime(phase=entry.phase, began_at_s=entry.at_s)
                for entry in seen.progress
                if entry.rank is None
            ],
            memory=peaks(seen.progress, worker.peak_bytes),
            environment=environment_of(seen.progress),
        )
    elif worker.signal_name is not None and not seen.interrupted:
        note = f"ended by {worker.signal_name} after its result was written"
        answer = msgspec.structs.replace(answer, notes=[*answer.notes, note])
    return msgspec.structs.replace(
        answer,
        exit_code=worker.exit_code,
        signal=worker.signal_name,
        began_at_s=seen.began_at_s,
        wall_s=seen.wall_s,
        log_tail=[] if answer.end is Status.OK else tail,
        memory=answer.memory or peaks(seen.progress, worker.peak_bytes),
    )


def _cause(worker: WorkerProcess, seen: Watched, tail: list[str], folder: SweepFolder) -> tuple[Status, str]:
    """The status of a worker that left no result, and the reason in one line."""
    where = f"in phase {seen.phase.value}"
    last = f": {tail[-1]}" if tail else ""
    if seen.timed_out:
        return (
            Status.TIMEOUT,
            f"did not finish within its time limit, ended after {seen.wall_s:.1f} s {where}",
        )
    if worker.signal_name == "SIGKILL" and seen.kernel_killed:
        peak = worker.peak_bytes if seen.rank is None else None  # that of the worker is not the rank's
        held = "" if peak is None else f"; it used at least {peak / 2**30:.1f} GiB"
        return Status.HOST_OOM, f"killed by the kernel because memory ran out {where}{held}"
    if worker.signal_name == "SIGABRT" and any("bad_alloc" in line for line in tail):
        return Status.HOST_OOM, f"a native library ran out of memory {where}{last}"
    if worker.signal_name is not None:
        return Status.SIGNAL, f"ended by {worker.signal_name} {where}"
    if _disk_is_full(folder.root):
        last += f"; the disk of {folder.root} is full: {os.strerror(errno.ENOSPC)}"
    return Status.ERROR, f"exited with code {worker.exit_code} {where} without a result{last}"


def _disk_is_full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def peaks(progress: list[Progress], process_bytes: int | None = None) -> Memory:
    """Peak memory: of the GPU from the progress, of the host the larger of progress and `process_bytes`."""

    def most(values: list[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return Memory(
        allocated_bytes=most([entry.allocated_bytes for entry in progress]),
        reserved_bytes=most([entry.reserved_bytes for entry in progress]),
        process_bytes=most([*(entry.process_bytes for entry in progress), process_bytes]),
    )


def environment_of(progress: list[Progress]) -> Environment | None:
    """Where an experiment ran that left no result; None if it ended before that was known."""
    return next((entry.environment for entry in reversed(progress) if entry.environment), None)


def _seal_interrupted(folder: SweepFolder, name: str) -> None:
    """Note the interruption in the log; an earlier result stays valid and becomes its last line again."""
    try:
        _clear_paths(folder, folder.log(name))
        plain_files.append(folder.log(name), b"interrupted before it finished\n")
        if os.path.lexists(folder.result(name)):
            seal_log(folder.log(name), read_record(folder.result(name), CaseResult))
    except (OSError, RecordError):
        # The result's file itself is untouched; only the log stays without its last line.
        return
