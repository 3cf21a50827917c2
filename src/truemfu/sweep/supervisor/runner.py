"""A whole sweep: reuse existing results, run the rest, return the outcome.

    claim the folder ─► end what a killed supervisor left ─► reuse results with the same content hash
        ─► a thread for each slot: next case ─► worker ─► result           (failures are isolated)
        ─► after an out-of-memory: find what fits in memory
        ─► SweepOutcome

Ctrl-C (or SIGTERM, or the end of the terminal) ends the workers gracefully, a second one at once;
finished results are on disk, and the same call continues where it stopped.
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
from ...errors import UsageError, one_line
from ...records import OUT_OF_MEMORY, CaseResult, Memory, Phase, Status, SweepCase, SweepRecord
from ..cases import cases_of, resolved
from ..config import SweepConfig, as_mapping, parse
from ..content_hash import content_hash, hashed_environment
from ..launchers.device import device_name_of, device_of
from ..launchers.engines import engine_of
from ..launchers.local import WORKER, Slot, slots
from ..launchers.settings import request_of
from ..order import WorkerOrder
from ..paths import FolderLock, SweepFolder, claim, repair
from .case_log import last_lines
from .memory_fit import Probe, propose
from .outcome import CaseState, Listener, SweepOutcome, covered_s
from .placed import Board, Placed, launchers_in_use
from .resume import check_rerun, end_leftovers, reusable
from .stored import stored_result
from .supervise import Stop, Watched, not_started, run_case, save, watch


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

    `rerun` is one of `resume.RERUN`. `start_over`: whether a sweep with other settings in the folder is
    replaced; None: only with rerun "all". `command` starts a worker.
    """
    began = time.monotonic()
    check_rerun(rerun)
    config = parse(as_mapping(config))
    device = device_of(config)
    config = resolved(config, device)
    cases = cases_of(config, device)
    own_folder = SweepFolder(folder.absolute())
    _refuse_jobs_elsewhere(own_folder, config.launcher, rerun)
    all_slots: dict[int, list[Slot]] = {}
    placed = None
    if config.launcher == "local":
        all_slots = {
            gpus: slots(config, device, own_folder, command, gpus_per_experiment=gpus)
            for gpus in sorted(config.gpus_per_experiment)
        }
    else:
        placed = _placed(config, device, own_folder, command)
    sweep_folder, record, lock = claim(
        folder, config, cases, start_over=rerun == "all" if start_over is None else start_over
    )
    try:
        sweep = _Sweep(config, cases, sweep_folder, record, lock, listener)
        with _stopped_by_signals(sweep.stop):
            sweep.run(all_slots, rerun, placed)
        wall_s = time.monotonic() - began
        return SweepOutcome(
            results=sweep.ordered_results(),
            interrupted=sweep.stop.requested,
            by_ctrl_c=sweep.stop.by_ctrl_c,
            on_cluster=len(placed.names) if placed is not None else 0,
            wall_s=wall_s,
            harness_s=max(wall_s - covered_s(sweep.own_work), 0.0),
        )
    finally:
        lock.release()


def _placed(config: SweepConfig, device: str, folder: SweepFolder, command: Sequence[str]) -> Placed:
    """The engine and the request of each experiment; a UsageError if it cannot be satisfied."""
    engine = engine_of(config.launcher, config.cluster)
    requests = {
        gpus: request_of(config.cluster, device, config.timeout_s, gpus)
        for gpus in config.gpus_per_experiment
    }
    if not launchers_in_use(folder):  # else it has been found to work
        for request in requests.values():
            engine.check(request)
    return Placed(
        engine,
        config.launcher,
        config.cluster,
        requests,
        folder,
        timeout_s=config.timeout_s,
        command=command,
    )


def _refuse_jobs_elsewhere(folder: SweepFolder, launcher: str, rerun: str) -> None:
    """Experiments that another engine may still run must not run here too."""
    for used in sorted(launchers_in_use(folder)):
        if used != launcher or rerun == "all":
            raise UsageError(
                f"experiments of {folder.root} are still on {used}: wait for them with --launcher {used}, or "
                "cancel them with --cancel"
            )


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
        environment = hashed_environment(device_name_of(config, config.device), self._memory_limit_bytes)
        self._hashes = {name: content_hash(case, environment) for name, case in self._cases.items()}
        self._commit = git_commit()
        self._results: dict[str, CaseResult] = {}
        self._pending: deque[str] = deque()
        self._lock = threading.RLock()
        self._failure: BaseException | None = None

    def run(self, all_slots: Mapping[int, list[Slot]], rerun: str, placed: Placed | None = None) -> None:
        """`all_slots`: the slots for experiments on this many GPUs; none if they are placed on a cluster."""
        say = self._listener.message
        on_cluster = placed.find(say) if placed is not None else set()
        end_leftovers(self._folder, self._cases, self._record, say, on_cluster=on_cluster)
        hashes = {name: known for name, known in self._hashes.items() if name not in on_cluster}
        self._results = reusable(self._folder, hashes, rerun=rerun, timeout_s=self._config.timeout_s, say=say)
        self._listener.started(list(self._cases), list(self._results.values()))
        pending = [name for name in self._cases if name not in self._results and name not in on_cluster]
        if placed is not None:
            placed.run([name for name in pending if not self._pruned(name)], self._board())
        for gpus, same_size in all_slots.items():
            self._pending.extend(name for name in pending if self._cases[name].gpus == gpus)
            self._serve_all(same_size)
        if not self.stop.requested:
            self._find_memory_fits({gpus: same_size[0] for gpus, same_size in all_slots.items()})
        self._write_missing_files()

    def _board(self) -> Board:
        return Board(
            order=lambda name: self._order(name, self._cases[name], self._hashes[name]),
            ended=self._ended,
            changed=self._listener.changed,
            prunes=self._pruned_result,
            repair=self._repair_folder,
            say=self._listener.message,
            stop=self.stop,
        )

    def _serve_all(self, same_size: list[Slot]) -> None:
        """A thread for each slot, until no experiment is left."""
        threads = [threading.Thread(target=self._serve, args=(slot,), name=slot.name) for slot in same_size]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def ordered_results(self) -> list[CaseResult]:
        return [self._results[name] for name in self._cases if name in self._results]

    def _serve(self, slot: Slot) -> None:
        """One slot: run cases one after another until none is left."""
        try:
            name = self._next()
            while name is not None:
                name = self._run_one(slot, name)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self.stop.request()
        finally:
            slot.close()

    def _run_one(self, slot: Slot, name: str) -> str | None:
        """Run a case, start the next worker when that does not disturb it; the name of the next case."""
        upcoming: list[str] = []

        def on_progress(phase: Phase, elapsed_s: float) -> None:
            limit_s = self._config.timeout_s
            state = CaseState(slot=slot.name, phase=phase, elapsed_s=elapsed_s, time_limit_s=limit_s)
            with self._lock:
                self._listener.changed(name, state)
            if (
                phase in (Phase.COUNT, Phase.DONE)
                and not upcoming
                and (following := self._next()) is not None
            ):
                upcoming.append(following)
                slot.make_ready(self._cases[following])
            slot.let_measure(phase)

        try:
            worker = slot.worker_for(self._cases[name])
        except OSError as error:
            order = self._order(name, self._cases[name], self._hashes[name])
            self._ended(save(self._folder, not_started(order, error)))
            return self._next()
        result = run_case(
            worker,
            self._order(name, self._cases[name], self._hashes[name]),
            self._folder,
            time_limit_s=self._config.timeout_s,
            stop=self.stop,
            on_progress=on_progress,
        )
        self._repair_folder()
        if result is not None:
            self._ended(result)
        if upcoming and not self.stop.requested and not self._pruned(upcoming[0]):
            return upcoming[0]
        return self._next()

    def _repair_folder(self) -> None:
        """An experiment's changes to the folder itself must not affect the next one."""
        with self._lock:
            for line in repair(self._folder, self._record, self._folder_lock):
                self._listener.message(line)

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
        """The next case to run; None if there is none or a stop was requested."""
        with self._lock:
            while self._pending and not self.stop.requested:
                name = self._pending.popleft()
                if not self._pruned(name):
                    return name
        return None

    def _pruned(self, name: str) -> bool:
        """Whether the same case with a smaller batch ran out of memory; its result is then `pruned`."""
        pruned = self._pruned_result(name)
        if pruned is not None:
            self._ended(save(self._folder, pruned))
        return pruned is not None

    def _pruned_result(self, name: str) -> CaseResult | None:
        case = self._cases.get(name)
        if case is None or not self._config.prune:  # a case of an earlier call may not be in this matrix
            return None
        with self._lock:
            smaller = [
                result
                for result in self._results.values()
                if result.end in OUT_OF_MEMORY
                and result.case.batch_size < case.batch_size
                and msgspec.structs.replace(result.case, batch_size=case.batch_size) == case
            ]
        if not smaller:
            return None
        return CaseResult(
            name=name,
            sweep_id=self._sweep_id,
            content_hash=self._hashes[name],
            case=case,
            end=Status.PRUNED,
            phase=Phase.START,
            message=f"not run: {smaller[0].name} already ran out of memory",
        )

    def _ended(self, result: CaseResult) -> None:
        if result.name not in self._cases:  # of an earlier call, and not in this matrix
            return
        with self._lock:
            self._results[result.name] = result
            if result.began_at_s is not None and result.wall_s is not None:
                done = [entry.began_at_s for entry in result.phases if entry.phase is Phase.DONE]
                self.own_work.append(
                    (result.began_at_s, done[0] if done else result.began_at_s + result.wall_s)
                )
            self._listener.ended(result)

    def _find_memory_fits(self, slot_by_gpus: Mapping[int, Slot]) -> None:
        """By probes in a slot; on a cluster from finished experiments alone."""
        prober = partial(self._probe, slot_by_gpus) if self._config.find_fit and slot_by_gpus else None
        try:
            for name, answer in propose(list(self._results.values()), prober):
                result = msgspec.structs.replace(self._results[name], fits=answer)
                self._results[name] = save(self._folder, result)
                self._listener.message(f"{name}: {answer}")
        except _Interrupted:
            # The next call searches for the rest.
            return
        finally:
            for slot in slot_by_gpus.values():
                slot.close()

    def _probe(self, slot_by_gpus: Mapping[int, Slot], case: SweepCase) -> Probe:
        """Run two steps of a case in a fresh worker: do they fit in memory?"""
        slot = slot_by_gpus[case.gpus]
        name = f"probe-{slot.name}"
        log = self._folder.slot_log(name)
        order = msgspec.structs.replace(self._order(name, case, ""), purpose="probe", log_path=str(log))
        self._listener.message(
            f"trying {case.trainer}, {case.model}, batch {case.batch_size}, sequence {case.seq_len}"
        )
        try:
            plain_files.remove(self._folder.progress(name))
            worker = slot.worker_for(case)
        except OSError as error:
            return Probe(fits=None, reason=f"could not be started: {one_line(error)}")
        seen = watch(worker, order, time_limit_s=self._config.timeout_s, stop=self.stop)
        last_line = last_lines(log)[-1:]
        for path in (log, self._folder.progress(name)):
            with contextlib.suppress(OSError):  # a folder that cannot be written
                plain_files.remove(path)
        self._repair_folder()
        if seen.interrupted:
            raise _Interrupted
        self.own_work.append((seen.began_at_s, seen.working_until_s))
        return _probe_answer(seen, worker.signal_name, last_line)

    def _write_missing_files(self) -> None:
        """A full disk may have space again by now, and an experiment may have removed files."""
        for name, result in self._results.items():
            stored = stored_result(name, self._folder.result(name), self._folder.log(name))
            if stored.result != result or stored.faults or not self._folder.result(name).exists():
                written = save(self._folder, result)
                for note in written.notes[len(result.notes) :]:
                    self._listener.message(f"{name}: {note}")


class _Interrupted(Exception):
    """Ctrl-C between probes."""


def _probe_answer(seen: Watched, signal_name: str | None, last_line: list[str]) -> Probe:
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
    return Probe(fits=None, reason=": ".join([how, *last_line]))


@contextmanager
def _stopped_by_signals(stop: Stop) -> Iterator[None]:
    """While a sweep runs in the main thread, Ctrl-C, SIGTERM and SIGHUP request its stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.by_ctrl_c = number == signal.SIGINT
        stop.request()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the sweep outlives its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
