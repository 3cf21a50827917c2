"""Experiments on a cluster: submit, wait for their files, ask the engine where a file is missing.

    pending ─► batch: orders, sbatch or a Ray driver ─┐
    found from an earlier call ───────────────────────┴─► poll with back-off
        <n>.end has a result ─────────────────────────────► that
        the engine says the job is over, and nobody had claimed it ─► lost, with the engine's reason
        …claimed, and after `stale_view_s` no result ─► lost; host_oom or timeout if that is the reason

Files are the truth; the engine is asked rarely. A poll is one listing for each batch, so its cost does not
grow with finished experiments.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ... import plain_files
from ...errors import RecordError, UsageError
from ...records import OUT_OF_MEMORY, CaseResult, Phase, Status, read_record
from ...text import counted
from ..launchers.engine import Engine
from ..launchers.engines import engine_of
from ..launchers.jobs import Batch, Claim, EngineWord, Job, JobsFolder
from ..launchers.settings import ClusterSettings, Request
from ..order import WorkerOrder
from ..paths import FolderLock, RunningCase, SweepFolder
from ..process import kill_leftovers
from ..progress import read_progress
from .case_log import last_lines
from .outcome import CaseState
from .supervise import Stop, environment_of, peaks, save

_FIRST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0
_FIRST_QUESTION_S, _LONGEST_QUESTION_S = 5.0, 60.0
_MISSING_QUESTION_S = 1.0
"""Where a job is over or was interrupted, and only the engine's reason or the last file is missing."""
_BACK_OFF = 1.3
_NO_ANSWER_S = 600.0
"""How long the reason of an interruption is awaited from an engine that does not know it."""
_SUBMIT_AGAIN_S = 60.0
_CANCEL_TIMEOUT_S = 120.0


@dataclass
class _OnCluster:
    """A batch, and what of it has not ended."""

    batch: Batch
    jobs: JobsFolder
    left: dict[int, Job]
    claims: dict[int, Claim] = field(default_factory=dict)
    interrupted: dict[int, float] = field(default_factory=dict)
    """When their nodes have said that they were interrupted."""
    over_since: dict[int, float] = field(default_factory=dict)
    """When the engine first said that the job is over, for claimed experiments without a result."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """What a sweep provides: its orders, and where events go."""

    order: Callable[[str], WorkerOrder]
    ended: Callable[[CaseResult], None]
    changed: Callable[[str, CaseState], None]
    prunes: Callable[[str], CaseResult | None]
    """The result of an experiment that need not run, because a smaller one ran out of memory."""
    repair: Callable[[], None]
    say: Callable[[str], None]
    stop: Stop


class Placed:
    """The experiments of one sweep on one engine."""

    def __init__(
        self,
        engine: Engine,
        launcher: str,
        settings: ClusterSettings,
        requests: Mapping[int, Request],
        folder: SweepFolder,
        *,
        timeout_s: float,
        command: Sequence[str],
    ) -> None:
        """`requests`: that of an experiment on this many GPUs."""
        self._engine = engine
        self._launcher = launcher
        self._settings = settings
        self._requests = requests
        self._folder = folder
        self._timeout_s = timeout_s
        self._command = list(command)
        self._batches: list[_OnCluster] = []
        self._unsubmitted: list[str] = []

    def find(self, say: Callable[[str], None]) -> set[str]:
        """Take over what earlier calls have submitted and what has not ended; its names."""
        for found in _batches_in(self._folder):
            self._batches.append(found)
            self._recover(found, say)
        return self.names

    @property
    def names(self) -> set[str]:
        """The experiments on the cluster."""
        return {found.batch.names[number] for found in self._batches for number in found.left}

    def run(self, pending: Sequence[str], board: Board) -> None:
        """Submit these, and wait for them and for those that were found."""
        self._unsubmitted = list(pending)
        self._submit(board)
        poll_s, question_s = _FIRST_POLL_S, _FIRST_QUESTION_S
        asked = submitted = time.monotonic()
        while (self._batches or self._unsubmitted) and not board.stop.requested:
            moved = self._look(board)
            now = time.monotonic()
            wanted_s = (
                _MISSING_QUESTION_S
                if any(b.interrupted or b.over_since for b in self._batches)
                else question_s
            )
            if now - asked >= wanted_s:
                asked = now
                moved = self._ask(board) or moved
                question_s = _FIRST_QUESTION_S if moved else min(question_s * _BACK_OFF, _LONGEST_QUESTION_S)
            if self._unsubmitted and (not self._batches or now - submitted >= _SUBMIT_AGAIN_S):
                submitted = now
                self._submit(board)
            poll_s = _FIRST_POLL_S if moved else min(poll_s * _BACK_OFF, _LONGEST_POLL_S)
            if self._batches:
                board.stop.wait(poll_s)

    def _submit(self, board: Board) -> None:
        """Submit as much as the engine takes; a UsageError if it takes nothing and nothing is on it."""
        size = self._engine.batch_size() if self._unsubmitted else 1
        while self._unsubmitted and not board.stop.requested:
            orders = [board.order(name) for name in self._unsubmitted[:size]]
            # The jobs of a batch have one request.
            orders = [order for order in orders if order.case.gpus == orders[0].case.gpus]
            try:
                placed = self._submit_batch(orders)
            except UsageError as error:
                if len(orders) > 1:  # the engine may limit how many jobs one user has
                    size = len(orders) // 2
                    continue
                if not self._batches:
                    raise
                board.say(f"{counted(len(self._unsubmitted), 'experiment')} submitted later: {error}")
                return
            names = set(placed.batch.names)
            self._unsubmitted = [name for name in self._unsubmitted if name not in names]
            self._batches.append(placed)
            number, job = counted(len(names), "experiment"), placed.batch.engine_job
            board.say(f"{number} submitted to {self._engine.name}: job {job}")

    def _submit_batch(self, orders: Sequence[WorkerOrder]) -> _OnCluster:
        request = self._requests[orders[0].case.gpus]
        batch = Batch(
            id=uuid.uuid4().hex[:12],
            launcher=self._launcher,
            names=[order.name for order in orders],
            request=request,
            settings=self._settings,
            working_folder=os.getcwd(),
            created_at_s=time.time(),
        )
        jobs = JobsFolder(self._folder.jobs(batch.id))
        left = {
            number: Job(order=order, time_limit_s=self._timeout_s, gpus=request.gpus, command=self._command)
            for number, order in enumerate(orders)
        }
        after = self._before(len(self._batches))
        try:
            plain_files.make_folder(jobs.root)
            for number, job in left.items():
                jobs.write_order(number, job)
            jobs.write_batch(batch)
            batch = msgspec.structs.replace(
                batch, engine_job=self._engine.submit(batch, jobs, list(left), after)
            )
            jobs.write_batch(batch)
        except OSError as error:
            jobs.remove()
            raise UsageError(f"cannot write to {jobs.root}: {error.strerror}") from error
        except UsageError:
            jobs.remove()
            raise
        return _OnCluster(batch=batch, jobs=jobs, left=left)

    def _before(self, at: int) -> Batch | None:
        """The batch that has to end before the one at this position begins."""
        in_turn = self._engine.runs_batches_in_turn or self._settings.max_jobs is not None
        return self._batches[at - 1].batch if in_turn and at > 0 else None

    def _recover(self, found: _OnCluster, say: Callable[[str], None]) -> None:
        """A supervisor may have died before it had submitted a batch, or before it had noted that."""
        engine_job = self._engine.find(found.batch, found.jobs)
        present = found.jobs.listing()
        waiting = [number for number in found.left if number not in present[".claim"]]
        if engine_job is None and waiting:
            before = self._before(self._batches.index(found))
            engine_job = self._engine.submit(found.batch, found.jobs, waiting, before)
        if engine_job != found.batch.engine_job and engine_job is not None:
            found.batch = msgspec.structs.replace(found.batch, engine_job=engine_job)
            found.jobs.write_batch(found.batch)
        number = counted(len(found.left), "experiment")
        say(f"{number} on {self._engine.name} already: job {found.batch.engine_job}")

    def _look(self, board: Board) -> bool:
        """One look at the files; whether something has changed."""
        moved = False
        for found in list(self._batches):
            present = found.jobs.listing()
            for number in [number for number in found.left if number in present[".end"]]:
                moved = self._collect(found, number, board) or moved
            for number in [number for number in found.left if number in present[".claim"]]:
                if number not in found.claims or not found.claims[number].at_s:
                    moved = moved or number not in found.claims
                    found.claims[number] = found.jobs.read_claim(number)
                self._show(found, number, board)
            for number in [number for number in found.left if number not in present[".order"]]:
                self._restore(found, number)
            if not found.left:
                self._drop(found)
        return moved

    def _collect(self, found: _OnCluster, number: int, board: Board) -> bool:
        ended = found.jobs.read_end(number)
        if ended is None or number in found.interrupted:
            return False
        if ended.result is None:
            found.interrupted[number] = time.monotonic()
            return True
        if not os.path.lexists(self._folder.result(ended.result.name)):
            save(self._folder, ended.result)
        self._finish(found, number, ended.result, board)
        return True

    def _show(self, found: _OnCluster, number: int, board: Board) -> None:
        claim, name = found.claims[number], found.batch.names[number]
        if claim.at_s and not claim.withdrawn:
            progress = read_progress(self._folder.progress(name))
            state = CaseState(
                slot=claim.host,
                phase=progress[-1].phase if progress else Phase.START,
                elapsed_s=max(time.time() - claim.at_s, 0.0),
                time_limit_s=found.left[number].time_limit_s,
            )
            board.changed(name, state)

    def _restore(self, found: _OnCluster, number: int) -> None:
        """An experiment may have removed the folder; its node needs the order, and a late one the claim."""
        with contextlib.suppress(OSError):  # cannot be written now: tried again with the next look
            plain_files.make_folder(found.jobs.root)
            found.jobs.write_batch(found.batch)
            if number in found.claims:
                found.jobs.try_claim(number, engine_job=found.claims[number].engine_job)
            found.jobs.write_order(number, found.left[number])

    def _ask(self, board: Board) -> bool:
        """Ask the engine about what has no result; whether something has ended by that."""
        moved = False
        for found in list(self._batches):
            claimed = {
                number: found.claims[number].engine_job if number in found.claims else None
                for number in found.left
            }
            words = self._engine.words(found.batch, found.jobs, claimed)
            for number, word in words.items():
                if word.over and number in found.left:
                    moved = self._over(found, number, word, board) or moved
            for number, since in list(found.interrupted.items()):
                known = words.get(number)
                if known is None and time.monotonic() - since > _NO_ANSWER_S:
                    known = EngineWord(over=False, waits=True, reason="gives no reason")
                if known is not None and known.waits:  # requeued: its only run is over
                    self._lose(found, number, known, board)
                    moved = True
            if not found.left:
                self._drop(found)
        return moved

    def _over(self, found: _OnCluster, number: int, word: EngineWord, board: Board) -> bool:
        """The engine says that a job is over, and there is no result yet."""
        if number in found.interrupted:
            self._lose(found, number, word, board)
            return True
        if number not in found.claims:
            with contextlib.suppress(OSError):  # the folder was removed: it is restored first
                if found.jobs.try_claim(number, withdraw=True):
                    self._lose(found, number, word, board)
                    return True
            return False
        since = found.over_since.setdefault(number, time.monotonic())
        if time.monotonic() - since < found.batch.settings.stale_view_s:
            return False
        self._lose(found, number, word, board)
        return True

    def _lose(self, found: _OnCluster, number: int, word: EngineWord, board: Board) -> None:
        """An experiment whose job is over and which left no result gets one here."""
        name, job = found.batch.names[number], found.left[number]
        claim = found.claims.get(number, Claim())
        _end_marked(self._folder, name, claim)
        result = self._written(job.order, claim)
        if result is None:
            progress = read_progress(self._folder.progress(name))
            said = last_lines(found.jobs.output(number))[-1:]
            tail = last_lines(self._folder.log(name)) if claim.at_s else []
            status = {"memory": Status.HOST_OOM, "time": Status.TIMEOUT}.get(word.cause or "", Status.LOST)
            where = f"on {claim.host}" if claim.at_s else "before it started"
            result = CaseResult(
                name=name,
                sweep_id=job.order.sweep_id,
                content_hash=job.order.content_hash,
                case=job.order.case,
                end=status,
                phase=progress[-1].phase if progress else Phase.START,
                message=f"its job ended {where}; {self._engine.name}: {word.reason}",
                log_tail=tail or said,
                memory=peaks(progress),
                environment=environment_of(progress),
                wall_s=job.time_limit_s if status is Status.TIMEOUT else None,  # at least
                began_at_s=claim.at_s or None,
            )
            result = save(self._folder, result)
        _clear_running(self._folder, name)
        self._finish(found, number, result, board)

    def _written(self, order: WorkerOrder, claim: Claim) -> CaseResult | None:
        """The result that its node wrote although its last word is missing; both times are of its clock."""
        try:
            result = read_record(self._folder.result(order.name), CaseResult)
        except RecordError:
            return None
        own = (result.sweep_id, result.content_hash) == (order.sweep_id, order.content_hash)
        return result if own and claim.at_s and (result.began_at_s or 0.0) >= claim.at_s else None

    def _finish(self, found: _OnCluster, number: int, result: CaseResult, board: Board) -> None:
        found.jobs.forget(number)
        del found.left[number]
        found.interrupted.pop(number, None)
        found.over_since.pop(number, None)
        board.repair()
        board.ended(result)
        if result.end in OUT_OF_MEMORY:
            self._prune(board)

    def _prune(self, board: Board) -> None:
        """Withdraw what need not run any more; its job finds it claimed and ends."""
        for name in list(self._unsubmitted):
            if (pruned := board.prunes(name)) is not None:
                self._unsubmitted.remove(name)
                board.ended(save(self._folder, pruned))
        for found in self._batches:
            for number in [number for number in found.left if number not in found.claims]:
                pruned = board.prunes(found.batch.names[number])
                with contextlib.suppress(OSError):  # then it runs
                    if pruned is not None and found.jobs.try_claim(number, withdraw=True):
                        found.jobs.forget(number, present=(".order",))
                        del found.left[number]
                        board.ended(save(self._folder, pruned))

    def _drop(self, found: _OnCluster) -> None:
        self._batches.remove(found)
        with contextlib.suppress(OSError):  # the next call removes it
            found.jobs.remove()


def launchers_in_use(folder: SweepFolder) -> set[str]:
    """The engines that experiments of this sweep were given to and have not all come back from."""
    return {found.batch.launcher for found in _batches_in(folder, tidy=False)}


def cancel_all(root: Path) -> int:
    """Cancel every job of a sweep and wait until all are over; how many experiments had not ended.

    They have no result, as after Ctrl-C: the next call runs them. Results that were finished are kept.
    """
    folder = SweepFolder(root.absolute())
    if not os.path.lexists(folder.record):
        raise UsageError(f"{folder.root} does not contain a sweep: nothing to cancel")
    try:
        lock = FolderLock(folder)
    except OSError as error:
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}") from error
    try:
        return sum(_cancel(folder, found) for found in _batches_in(folder))
    except OSError as error:
        raise UsageError(f"cannot write to {folder.root}: {error.strerror}") from error
    finally:
        lock.release()


def _cancel(folder: SweepFolder, found: _OnCluster) -> int:
    engine = engine_of(found.batch.launcher, found.batch.settings)
    for number in list(found.left):
        if found.jobs.try_claim(number, withdraw=True):
            found.claims[number] = Claim(withdrawn=True)
    engine_job = engine.find(found.batch, found.jobs)
    if engine_job is not None:
        found.batch = msgspec.structs.replace(found.batch, engine_job=engine_job)
        engine.cancel(found.batch, found.jobs)
    until = time.monotonic() + _CANCEL_TIMEOUT_S
    running = [number for number in found.left if number not in found.claims]
    finished = 0
    while running and time.monotonic() < until:
        present = found.jobs.listing()[".end"]
        claims = {number: found.jobs.read_claim(number) for number in running}
        words = engine.words(found.batch, found.jobs, {n: claim.engine_job for n, claim in claims.items()})
        for number in list(running):
            word = words.get(number)
            if number in present or (word is not None and word.over):
                end = found.jobs.read_end(number)
                finished += end is not None and end.result is not None
                _end_marked(folder, found.batch.names[number], claims[number])
                _clear_running(folder, found.batch.names[number])
                running.remove(number)
        if running:
            time.sleep(0.5)
    if running:
        raise UsageError(
            f"{len(running)} jobs have not ended {_CANCEL_TIMEOUT_S:.0f} s after {engine.name} was told to "
            "cancel them: call --cancel again later"
        )
    count = len(found.left) - finished
    found.jobs.remove()
    return count


def _batches_in(folder: SweepFolder, *, tidy: bool = True) -> list[_OnCluster]:
    """What earlier calls have submitted and what has not ended, oldest first; `tidy` removes what is over.

    A UsageError if a batch cannot be read: its experiments may be running.
    """
    found = []
    for path in folder.all_jobs():
        jobs, left = JobsFolder(path), {}
        if jobs.is_described():  # else its supervisor was killed before it submitted, or all had ended
            try:
                batch = jobs.read_batch()
            except RecordError as error:
                raise UsageError(
                    f"{error}; its experiments may be running: restore the file, or remove {path} once they "
                    "have ended"
                ) from None
            orders = {number: jobs.read_order(number) for number in jobs.listing()[".order"]}
            left = {n: job for n, job in sorted(orders.items()) if job is not None and n < len(batch.names)}
        if left:
            found.append(_OnCluster(batch=batch, jobs=jobs, left=left))
        elif tidy:
            with contextlib.suppress(OSError):  # a folder that cannot be written
                jobs.remove()
    return sorted(found, key=lambda each: each.batch.created_at_s)


def _end_marked(folder: SweepFolder, name: str, claim: Claim) -> None:
    """End what a killed node agent left running, where that was on this machine."""
    if claim.host != socket.gethostname():
        return
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        kill_leftovers(msgspec.json.decode(plain_files.read(folder.marker(name)), type=RunningCase).token)


def _clear_running(folder: SweepFolder, name: str) -> None:
    """Remove the files of a running experiment."""
    for path in (folder.marker(name), folder.progress(name)):
        with contextlib.suppress(OSError):  # the next call removes it
            plain_files.remove(path)
