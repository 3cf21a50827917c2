"""One experiment, supervised: an order to a worker, and a result in any case.

    order ─► worker ─► progress … ─► its process is gone ─► what it left is ended ─► CaseResult
                │                          ▲
                └── time limit, Ctrl-C ────┘  TERM, then KILL

What is believed, in this order: the result the worker handed over, which no file system can lose; the one it
wrote in this very run; the one at the end of its log; how its process ended, and how far its progress says it
came. An experiment may do anything to the files here: what is in their place is replaced, and named.
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
from ...errors import RecordError
from ...records import CaseResult, End, Memory, Phase, PhaseTime, decode, read_record, write_record
from ..order import WorkerOrder, encode_order
from ..paths import RunningCase, SweepFolder
from ..process import GRACE_S, WorkerProcess, kernel_oom_kills
from ..progress import Progress, read_progress
from .case_log import last_lines, read_log_end, seal_log

_LOOK_EVERY_S = 0.25
_LINGER_S = 60.0
"""How long a worker may take to end once it has written its result."""


class Stop:
    """Ctrl-C, for whoever waits: once to end in order, twice to end at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._at_once = threading.Event()

    def ask(self) -> None:
        if self._asked.is_set():
            self._at_once.set()
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def at_once(self) -> bool:
        return self._at_once.is_set()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a worker's process ended, and the trail it left."""

    began_at_s: float
    wall_s: float
    progress: list[Progress]
    timed_out: bool = False
    interrupted: bool = False
    kernel_killed: bool = False
    """Whether the kernel killed a process for want of memory meanwhile."""
    stuck: list[int]
    """Processes that could not be killed."""

    @property
    def phase(self) -> Phase:
        return self.progress[-1].phase if self.progress else Phase.START

    @property
    def working_until_s(self) -> float:
        """When its own work ended: at phase done, or with its process."""
        done = [entry.at_s for entry in self.progress if entry.phase is Phase.DONE]
        return done[0] if done else self.began_at_s + self.wall_s


def watch(
    worker: WorkerProcess,
    order: WorkerOrder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_look: Callable[[Phase, float], None] = lambda phase, elapsed_s: None,
) -> Watched:
    """Give the worker its order and stay until it, and all it has started, is gone."""
    trail = Path(order.progress_path)
    kills_before = kernel_oom_kills()
    began_at_s, began = time.time(), time.monotonic()
    done_since: float | None = None
    timed_out = interrupted = False
    seen: list[Progress] = []
    try:
        worker.send(encode_order(order))
        while not worker.wait(_LOOK_EVERY_S):
            elapsed_s = time.monotonic() - began
            seen = _longer(read_progress(trail), seen)
            phase = seen[-1].phase if seen else Phase.START
            on_look(phase, elapsed_s)
            if phase is Phase.DONE and done_since is None:
                done_since = elapsed_s
            interrupted = stop.asked
            timed_out = elapsed_s > time_limit_s
            if interrupted or timed_out or (done_since is not None and elapsed_s - done_since > _LINGER_S):
                break
    finally:
        stuck = worker.end(GRACE_S, hurry=lambda: stop.at_once)
    kills = kernel_oom_kills()
    return Watched(
        began_at_s=began_at_s,
        wall_s=time.monotonic() - began,
        progress=_longer(read_progress(trail), seen),
        timed_out=timed_out,
        interrupted=interrupted,
        kernel_killed=kills is not None and kills_before is not None and kills > kills_before,
        stuck=stuck,
    )


def _longer(trail: list[Progress], before: list[Progress]) -> list[Progress]:
    """The trail, or what was seen of it before its file was lost."""
    return trail if len(trail) >= len(before) else before


def run_case(
    worker: WorkerProcess,
    order: WorkerOrder,
    folder: SweepFolder,
    *,
    time_limit_s: float,
    stop: Stop,
    on_look: Callable[[Phase, float], None] = lambda phase, elapsed_s: None,
) -> CaseResult | None:
    """Run one experiment to its end and write its result; None where it was interrupted without one."""
    name = order.name
    before = _signature(folder.result(name))
    notes = _prepare(worker, order, folder)
    seen = watch(worker, order, time_limit_s=time_limit_s, stop=stop, on_look=on_look)
    answer = _answer(worker, folder, order, before)
    if answer is not None and answer.end is not End.OK and (seen.timed_out or seen.interrupted):
        # What it wrote when it was asked to end is not what became of it.
        answer = None
    if answer is None and seen.interrupted:
        result = None
        _seal_interrupted(folder, name)
    else:
        result = _conclude(order, worker, seen, answer, folder)
        notes += [f"process {pid} could not be killed" for pid in seen.stuck]
        result = save(folder, msgspec.structs.replace(result, notes=result.notes + notes))
    for path in (folder.marker(name), folder.progress(name)):
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next call clears it
            plain_files.remove(path)
    return result


def save(folder: SweepFolder, result: CaseResult) -> CaseResult:
    """Write a result to its file and the end of its log; what was in the way, or failed, is in its notes."""
    file, log = folder.result(result.name), folder.log(result.name)
    found = _make_way(folder, file, log)
    if found:
        result = msgspec.structs.replace(result, notes=[*result.notes, *found])
    problems = []
    try:
        write_record(file, result)
    except OSError as error:
        problems.append(f"{file.relative_to(folder.root)} could not be written: {error.strerror}")
    try:
        seal_log(log, result)
    except OSError as error:
        problems.append(f"{log.relative_to(folder.root)} could not be written: {error.strerror}")
    return msgspec.structs.replace(result, notes=result.notes + problems) if problems else result


def _make_way(folder: SweepFolder, *files: Path) -> list[str]:
    """Make folders that are missing, and remove what stands in the place of files; what that was."""
    found = []
    try:
        if made := folder.make():
            found.append(f"{', '.join(f'{name}/' for name in made)} had been removed, and was made again")
        for path in files:
            if (instead := plain_files.what_is_there(path)) is not None:
                plain_files.remove(path)
                found.append(f"{path.parent.name}/{path.name} had become {instead}, and was replaced")
    except OSError:
        pass  # writing the files says why
    return found


def _prepare(worker: WorkerProcess, order: WorkerOrder, folder: SweepFolder) -> list[str]:
    """Clear what an earlier run left, and leave a mark for whoever comes after a killed supervisor."""
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
    """What changes when a file is written anew under its name."""
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
    with contextlib.suppress(RecordError):  # it ended before it had handed all of it over
        found.append(decode(worker.answer, CaseResult, "the worker's answer"))
    if _signature(path) not in (None, before):
        with contextlib.suppress(RecordError):  # not ours, or half of one
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
        # It never took its order: what it printed until then explains why.
        tail = last_lines(worker.log)
    if answer is None:
        end, message = _cause(worker, seen, tail, folder)
        answer = CaseResult(
            name=order.name,
            sweep_id=order.sweep_id,
            content_hash=order.content_hash,
            case=order.case,
            end=end,
            phase=seen.phase,
            message=message,
            phases=[PhaseTime(phase=entry.phase, began_at_s=entry.at_s) for entry in seen.progress],
            memory=peaks(seen.progress, worker.peak_bytes),
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
        log_tail=[] if answer.end is End.OK else tail,
        memory=answer.memory or peaks(seen.progress, worker.peak_bytes),
    )


def _cause(worker: WorkerProcess, seen: Watched, tail: list[str], folder: SweepFolder) -> tuple[End, str]:
    """The end of a worker that left no result, and why in one line."""
    where = f"in phase {seen.phase.value}"
    last = f": {tail[-1]}" if tail else ""
    if seen.timed_out:
        return End.TIMEOUT, f"not done within its time limit, after {seen.wall_s:.1f} s {where}"
    if worker.signal_name == "SIGKILL" and seen.kernel_killed:
        held = "" if worker.peak_bytes is None else f"; it held at least {worker.peak_bytes / 2**30:.1f} GiB"
        return End.HOST_OOM, f"the kernel killed it for want of memory {where}{held}"
    if worker.signal_name == "SIGABRT" and any("bad_alloc" in line for line in tail):
        return End.HOST_OOM, f"a native library ran out of memory {where}{last}"
    if worker.signal_name is not None:
        return End.SIGNAL, f"ended by {worker.signal_name} {where}"
    if _disk_is_full(folder.root):
        last += f"; the disk of {folder.root} is full: {os.strerror(errno.ENOSPC)}"
    return End.ERROR, f"exited with code {worker.exit_code} {where} without a result{last}"


def _disk_is_full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def peaks(trail: list[Progress], process_bytes: int | None = None) -> Memory:
    """The peaks that were seen: the GPU's from the trail, the host's from whoever saw more."""

    def most(values: list[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return Memory(
        allocated_bytes=most([entry.allocated_bytes for entry in trail]),
        reserved_bytes=most([entry.reserved_bytes for entry in trail]),
        process_bytes=most([*(entry.process_bytes for entry in trail), process_bytes]),
    )


def _seal_interrupted(folder: SweepFolder, name: str) -> None:
    """The log says so; an earlier result still holds, and goes to its end again."""
    try:
        _make_way(folder, folder.log(name))
        plain_files.append(folder.log(name), b"interrupted before it was done\n")
        if os.path.lexists(folder.result(name)):
            seal_log(folder.log(name), read_record(folder.result(name), CaseResult))
    except (OSError, RecordError):
        # The result's file itself is untouched; only the log stays without its last line.
        return
