"""One experiment, supervised: an order to a worker, and a result in any case.

    order ─► worker ─► progress … ─► its process is gone ─► what it left is ended ─► CaseResult
                │                          ▲
                └── time limit, Ctrl-C ────┘  TERM, then KILL

What is believed, in this order: the result the worker wrote in this very run; the result at the end of its
log (where the disk was too full for the file); how its process ended, and how far its progress says it came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import RecordError
from ..records import CaseResult, End, Memory, Phase, PhaseTime, read_record, write_record
from .case_log import last_lines, result_in_log, seal_log
from .order import WorkerOrder, encode_order
from .paths import RunningCase, SweepFolder
from .process import GRACE_S, WorkerProcess, kernel_oom_kills
from .progress import Progress, read_progress

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
    try:
        worker.send(encode_order(order))
        while not worker.wait(_LOOK_EVERY_S):
            elapsed_s = time.monotonic() - began
            seen = read_progress(trail)
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
        progress=read_progress(trail),
        timed_out=timed_out,
        interrupted=interrupted,
        kernel_killed=kills is not None and kills_before is not None and kills > kills_before,
        stuck=stuck,
    )


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
    answer = _answer(folder, order, before)
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
    folder.marker(name).unlink(missing_ok=True)
    folder.progress(name).unlink(missing_ok=True)
    return result


def save(folder: SweepFolder, result: CaseResult) -> CaseResult:
    """Write a result to its file and to the end of its log; where that fails, its notes say so."""
    problems = []
    try:
        write_record(folder.result(result.name), result)
    except OSError as error:
        problems.append(f"results/{result.name}.json could not be written: {error.strerror}")
    try:
        seal_log(folder.log(result.name), result)
    except OSError as error:
        problems.append(f"logs/{result.name}.log could not be written: {error.strerror}")
    return msgspec.structs.replace(result, notes=result.notes + problems) if problems else result


def _prepare(worker: WorkerProcess, order: WorkerOrder, folder: SweepFolder) -> list[str]:
    """Clear what an earlier run left, and leave a mark for whoever comes after a killed supervisor."""
    try:
        folder.progress(order.name).unlink(missing_ok=True)
        folder.log(order.name).write_bytes(b"")
        mark = RunningCase(
            pid=worker.pid,
            token=worker.token,
            began_at_s=time.time(),
            content_hash=order.content_hash,
            case=order.case,
        )
        write_record(folder.marker(order.name), mark)
    except OSError as error:
        return [f"the sweep's folder could not be written at the start: {error.strerror}"]
    return []


def _signature(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew under its name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _answer(folder: SweepFolder, order: WorkerOrder, before: tuple[int, int] | None) -> CaseResult | None:
    """The worker's own result of this run, from its file or from the end of its log."""
    path = folder.result(order.name)
    found: CaseResult | None = None
    if _signature(path) not in (None, before):
        try:
            found = read_record(path, CaseResult)
        except RecordError:
            # Not ours, or half of one: how the process ended says more.
            found = None
    if found is None:
        found = result_in_log(folder.log(order.name))
    if found is None or (found.sweep_id, found.content_hash) != (order.sweep_id, order.content_hash):
        return None
    return found


def _conclude(
    order: WorkerOrder, worker: WorkerProcess, seen: Watched, answer: CaseResult | None, folder: SweepFolder
) -> CaseResult:
    tail = last_lines(folder.log(order.name))
    if not tail and not seen.progress:
        # It never took its order: what it printed until then explains why.
        tail = last_lines(worker.log)
    if answer is None:
        end, message = _cause(worker, seen, tail)
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


def _cause(worker: WorkerProcess, seen: Watched, tail: list[str]) -> tuple[End, str]:
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
    return End.ERROR, f"exited with code {worker.exit_code} {where} without a result{last}"


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
        with folder.log(name).open("a") as log:
            log.write("interrupted before it was done\n")
        if folder.result(name).exists():
            seal_log(folder.log(name), read_record(folder.result(name), CaseResult))
    except (OSError, RecordError):
        # The result's file itself is untouched; only the log stays without its last line.
        return
