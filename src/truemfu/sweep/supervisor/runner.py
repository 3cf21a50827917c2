"""A whole sweep: what is there already, what is left to run, and what became of it.

    claim the folder ─► end what a killed supervisor left ─► reuse results with the same content hash
        ─► a thread for each slot: next case ─► worker ─► result           (one failure never touches another)
        ─► after an out-of-memory: what would fit
        ─► SweepOutcome

Ctrl-C (or SIGTERM, or the end of the terminal) ends the workers in order, a second one at once; whatever has
finished is on disk, and the same call goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from ... import plain_files
from ...commit import git_commit
from ...errors import one_line
from ...records import CaseResult, End, Memory, Phase, SweepCase, SweepRecord
from ..cases import cases_of, resolved
from ..config import SweepConfig, as_mapping, parse
from ..content_hash import content_hash, surroundings
from ..gpus import device_name, resolve_device
from ..launchers.local import WORKER, Slot, slots
from ..order import WorkerOrder
from ..paths import FolderLock, SweepFolder, claim, mend
from .case_log import last_lines
from .memory_fit import OUT_OF_MEMORY, Probe, propose
from .outcome import CaseState, Listener, SweepOutcome, covered_s
from .resume import check_rerun, end_leftovers, reusable
from .stored import stored_result
from .supervise import Stop, Watched, run_case, save, watch


def run_sweep(
    config: SweepConfig,
    folder: Path,
    *,
    rerun: str = "none",
    start_over: bool | None = None,
    listener: Listener,
    command: Sequence[str] = WORKER,
) -> SweepOutcome:
    """Run every experiment of the matrix that has no result yet; a UsageError before anything has started.

    `rerun` is one of `resume.RERUN`. `start_over` is whether a sweep of other settings in the folder is
    replaced; None: with rerun "all" it is. `command` starts a worker.
    """
    began = time.monotonic()
    check_rerun(rerun)
    config = parse(as_mapping(config))
    device = resolve_device(config.device, config.gpus)
    config = resolved(config, device)
    cases = cases_of(config, device)
    places = slots(config, device, SweepFolder(folder.absolute()), command)
    there, record, lock = claim(
        folder, config, cases, start_over=rerun == "all" if start_over is None else start_over
    )
    try:
        sweep = _Sweep(config, cases, there, record, lock, listener)
        with _stopped_by_signals(sweep.stop):
            sweep.run(places, rerun)
        wall_s = time.monotonic() - began
        return SweepOutcome(
            results=sweep.ordered_results(),
            interrupted=sweep.stop.asked,
            wall_s=wall_s,
            harness_s=max(wall_s - covered_s(sweep.own_work), 0.0),
        )
    finally:
        lock.release()


class _Sweep:
    """The state that slots share."""

    def __init__(
        self,
        config: SweepConfig,
        cases: Mapping[str, SweepCase],
        folder: SweepFolder,
        record: SweepRecord,
        folder_lock: FolderLock,
        listener: Listener,
    ) -> None:
        self.stop = Stop()
        self.own_work: list[tuple[float, float]] = []
        self._config = config
        self._folder = folder
        self._record = record
        self._folder_lock = folder_lock
        self._sweep_id = record.sweep_id
        self._listener = listener
        self._cases = cases
        limit = config.memory_limit_gib
        self._memory_limit_bytes = None if limit is None else int(limit * 2**30)
        around = surroundings(device_name(config.device), self._memory_limit_bytes)
        self._hashes = {name: content_hash(case, around) for name, case in self._cases.items()}
        self._commit = git_commit()
        self._results: dict[str, CaseResult] = {}
        self._pending: deque[str] = deque()
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    def run(self, places: list[Slot], rerun: str) -> None:
        say = self._listener.said
        end_leftovers(self._folder, self._cases, self._record, say)
        self._results = reusable(
            self._folder, self._hashes, rerun=rerun, timeout_s=self._config.timeout_s, say=say
        )
        self._listener.started(list(self._cases), list(self._results.values()))
        self._pending.extend(name for name in self._cases if name not in self._results)
        threads = [threading.Thread(target=self._serve, args=(place,), name=place.name) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        if not self.stop.asked:
            self._say_what_fits(places[0])
        self._write_what_is_missing()

    def ordered_results(self) -> list[CaseResult]:
        return [self._results[name] for name in self._cases if name in self._results]

    def _serve(self, place: Slot) -> None:
        """One slot: a case after the other until none is left."""
        try:
            name = self._next()
            while name is not None:
                name = self._run_one(place, name)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self.stop.ask()
        finally:
            place.close()

    def _run_one(self, place: Slot, name: str) -> str | None:
        """Run a case, make the next one ready when that disturbs nothing, and name it."""
        upcoming: list[str] = []

        def look(phase: Phase, elapsed_s: float) -> None:
            limit_s = self._config.timeout_s
            state = CaseState(slot=place.name, phase=phase, elapsed_s=elapsed_s, time_limit_s=limit_s)
            with self._lock:
                self._listener.changed(name, state)
            if (
                phase in (Phase.COUNT, Phase.DONE)
                and not upcoming
                and (following := self._next()) is not None
            ):
                upcoming.append(following)
                place.make_ready(self._cases[following])
            place.let_measure(phase)

        try:
            worker = place.worker_for(self._cases[name])
        except OSError as error:
            self._ended(save(self._folder, self._not_started(name, error)))
            return self._next()
        result = run_case(
            worker,
            self._order(name, self._cases[name], self._hashes[name]),
            self._folder,
            time_limit_s=self._config.timeout_s,
            stop=self.stop,
            on_look=look,
        )
        self._mend()
        if result is not None:
            self._ended(result)
        if upcoming and not self.stop.asked and not self._pruned(upcoming[0]):
            return upcoming[0]
        return self._next()

    def _not_started(self, name: str, error: OSError) -> CaseResult:
        return CaseResult(
            name=name,
            sweep_id=self._sweep_id,
            content_hash=self._hashes[name],
            case=self._cases[name],
            end=End.ERROR,
            phase=Phase.START,
            message=f"its process could not be started: {one_line(error)}",
        )

    def _mend(self) -> None:
        """What an experiment has done to the folder itself must not touch the next one."""
        with self._lock:
            for line in mend(self._folder, self._record, self._folder_lock):
                self._listener.said(line)

    def _order(self, name: str, case: SweepCase, case_hash: str) -> WorkerOrder:
        return WorkerOrder(
            case=case,
            name=name,
            sweep_id=self._sweep_id,
            content_hash=case_hash,
            folder=str(self._folder.root),
            progress_path=str(self._folder.progress(name)),
            log_path=str(self._folder.log(name)),
            memory_limit_bytes=self._memory_limit_bytes,
            git_commit=self._commit,
        )

    def _next(self) -> str | None:
        """The next case to run, if there is one and nobody has asked to stop."""
        with self._lock:
            while self._pending and not self.stop.asked:
                name = self._pending.popleft()
                if not self._pruned(name):
                    return name
        return None

    def _pruned(self, name: str) -> bool:
        """Whether a smaller batch of the same kind was out of memory; then that is its result."""
        case = self._cases[name]
        with self._lock:
            smaller = [
                result
                for result in self._results.values()
                if self._config.prune
                and result.end in OUT_OF_MEMORY
                and result.case.batch_size < case.batch_size
                and msgspec.structs.replace(result.case, batch_size=case.batch_size) == case
            ]
        if not smaller:
            return False
        pruned = CaseResult(
            name=name,
            sweep_id=self._sweep_id,
            content_hash=self._hashes[name],
            case=case,
            end=End.PRUNED,
            phase=Phase.START,
            message=f"not run: {smaller[0].name} was out of memory already",
        )
        self._ended(save(self._folder, pruned))
        return True

    def _ended(self, result: CaseResult) -> None:
        with self._lock:
            self._results[result.name] = result
            if result.began_at_s is not None and result.wall_s is not None:
                done = [entry.began_at_s for entry in result.phases if entry.phase is Phase.DONE]
                self.own_work.append(
                    (result.began_at_s, done[0] if done else result.began_at_s + result.wall_s)
                )
            self._listener.ended(result)

    def _say_what_fits(self, place: Slot) -> None:
        prober = partial(self._probe, place) if self._config.find_fit else None
        try:
            for name, answer in propose(list(self._results.values()), prober):
                result = msgspec.structs.replace(self._results[name], fits=answer)
                self._results[name] = save(self._folder, result)
                self._listener.said(f"{name}: {answer}")
        except _Interrupted:
            # What is not answered yet is asked again by the next call.
            return
        finally:
            place.close()

    def _probe(self, place: Slot, case: SweepCase) -> Probe:
        """Two steps of a case in a fresh worker: do they fit?"""
        name = f"probe-{place.name}"
        log = self._folder.slot_log(name)
        order = msgspec.structs.replace(self._order(name, case, ""), purpose="probe", log_path=str(log))
        self._listener.said(
            f"trying {case.trainer}, {case.model}, batch {case.batch_size}, sequence {case.seq_len}"
        )
        try:
            plain_files.remove(self._folder.progress(name))
            worker = place.worker_for(case)
        except OSError as error:
            return Probe(fits=None, reason=f"could not be started: {one_line(error)}")
        seen = watch(worker, order, time_limit_s=self._config.timeout_s, stop=self.stop)
        last_words = last_lines(log)[-1:]
        for path in (log, self._folder.progress(name)):
            with contextlib.suppress(OSError):  # a folder that cannot be written
                plain_files.remove(path)
        self._mend()
        if seen.interrupted:
            raise _Interrupted
        self.own_work.append((seen.began_at_s, seen.working_until_s))
        return _probe_answer(seen, worker.signal_name, last_words)

    def _write_what_is_missing(self) -> None:
        """A disk that was full may have room again by now, and an experiment may have removed files."""
        for name, result in self._results.items():
            stored = stored_result(name, self._folder.result(name), self._folder.log(name))
            if stored.result != result or stored.faults or not self._folder.result(name).exists():
                written = save(self._folder, result)
                for note in written.notes[len(result.notes) :]:
                    self._listener.said(f"{name}: {note}")


class _Interrupted(Exception):
    """Ctrl-C between probes."""


def _probe_answer(seen: Watched, signal_name: str | None, last_words: list[str]) -> Probe:
    last = seen.progress[-1] if seen.progress else None
    if last is not None and last.fits is not None:
        memory = Memory(
            allocated_bytes=last.allocated_bytes,
            reserved_bytes=last.reserved_bytes,
            process_bytes=last.process_bytes,
        )
        return Probe(fits=last.fits, memory=memory)
    if signal_name == "SIGKILL" and seen.kernel_killed:
        return Probe(fits=False)
    if seen.timed_out:
        return Probe(fits=None, reason="took too long")
    how = f"ended by {signal_name}" if signal_name else "failed"
    return Probe(fits=None, reason=": ".join([how, *last_words]))


@contextmanager
def _stopped_by_signals(stop: Stop) -> Iterator[None]:
    """While a sweep runs in the main thread, Ctrl-C, SIGTERM and SIGHUP ask it to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the sweep is to outlive its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
