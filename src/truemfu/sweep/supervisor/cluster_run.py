"""The experiments of a sweep on a cluster: submit, wait for their files, ask the engine where one is missing.

    pending ─► batch: orders, sbatch or a Ray driver ─┐
    found from an earlier call ───────────────────────┴─► poll with back-off
        its node has written its result ──────────────────► that
        the engine reports the job as over, and nobody had claimed it ─► lost, with the engine's reason
        …claimed, and after `stale_view_s` no result ─► lost; host_oom or timeout if that is the reason

Files are the truth; the engine is asked rarely. A poll is one listing for each batch, so its cost does not
grow with finished experiments.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from ... import plain_files
from ...errors import UsageError
from ...records import OUT_OF_MEMORY, CaseResult, Status
from ...text import counted
from ..config import SweepConfig
from ..launchers.jobs import Batch, Claim, JobsFolder, JobState
from ..launchers.settings import request_of
from ..order import WorkerOrder, last_phase, read_progress
from ..paths import SweepFolder
from .cluster_batches import (
    SubmittedBatch,
    end_on_this_host,
    engine_of,
    launchers_in_use,
    result_of,
    submitted_batches,
)
from .state import CaseState, SweepState
from .stored import last_lines, save, without_answer

_FIRST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0
_FIRST_QUESTION_S, _LONGEST_QUESTION_S = 5.0, 60.0
_MISSING_QUESTION_S = 1.0
"""Where a job is over, and only its last file is missing."""
_BACK_OFF = 1.3
_SUBMIT_AGAIN_S = 60.0
_LARGEST_BATCH = 1_000
"""Experiments in a batch: the jobs that an array of Slurm may have unless it is configured otherwise."""


class ClusterRun:
    """The experiments of one sweep on one engine."""

    def __init__(self, config: SweepConfig, device: str, folder: SweepFolder, command: Sequence[str]) -> None:
        """A UsageError if the engine cannot satisfy the request of each experiment. `command`: a worker."""
        self._config = config
        self._settings = config.cluster
        self._folder = folder
        self._command = list(command)
        self._engine = engine_of(config.launcher, config.cluster)
        self._requests = {
            gpus: request_of(config.cluster, device, config.timeout_s, gpus)
            for gpus in config.gpus_per_experiment
        }
        self._batches: list[SubmittedBatch] = []
        self._unsubmitted: list[str] = []
        if not launchers_in_use(folder):  # else it has been found to work
            for request in self._requests.values():
                self._engine.check(request)

    @property
    def names(self) -> set[str]:
        """The experiments on the cluster."""
        return {found.batch.names[number] for found in self._batches for number in found.left}

    def take_over(self, report: Callable[[str], None]) -> set[str]:
        """Take over what earlier calls have submitted and what has not ended; its names."""
        for found in submitted_batches(self._folder):
            self._batches.append(found)
            self._recover(found)
            number = counted(len(found.left), "experiment")
            report(f"{number} already submitted to {self._engine.name}: job {found.batch.engine_job}")
        return self.names

    def run(self, pending: Sequence[str], state: SweepState) -> None:
        """Submit these, and wait for them and for those that were taken over."""
        self._unsubmitted = list(pending)
        self._submit(state)
        poll_s, question_s = _FIRST_POLL_S, _FIRST_QUESTION_S
        asked = submitted = time.monotonic()
        while (self._batches or self._unsubmitted) and not state.stop.requested:
            moved = self._read_files(state)
            now = time.monotonic()
            is_missing = any(found.over_since for found in self._batches)
            if now - asked >= (_MISSING_QUESTION_S if is_missing else question_s):
                asked = now
                moved = self._ask_engine(state) or moved
                question_s = _FIRST_QUESTION_S if moved else min(question_s * _BACK_OFF, _LONGEST_QUESTION_S)
            if self._unsubmitted and (not self._batches or now - submitted >= _SUBMIT_AGAIN_S):
                submitted = now
                self._submit(state)
            poll_s = _FIRST_POLL_S if moved else min(poll_s * _BACK_OFF, _LONGEST_POLL_S)
            if self._batches:
                state.stop.wait(poll_s)

    def _submit(self, state: SweepState) -> None:
        """Submit as much as the engine takes; a UsageError if it takes nothing and nothing is on it."""
        size = _LARGEST_BATCH
        while self._unsubmitted and not state.stop.requested:
            orders = [state.order(name) for name in self._unsubmitted[:size]]
            # The jobs of a batch have one request.
            orders = [order for order in orders if order.case.gpus == orders[0].case.gpus]
            try:
                submitted = self._submit_batch(orders)
            except UsageError as error:
                if len(orders) > 1:  # the engine may limit the jobs of an array, or of one user
                    size = len(orders) // 2
                    continue
                if not self._batches:
                    raise
                state.message(
                    f"{counted(len(self._unsubmitted), 'experiment')} will be submitted later: {error}"
                )
                return
            names = set(submitted.batch.names)
            self._unsubmitted = [name for name in self._unsubmitted if name not in names]
            self._batches.append(submitted)
            number, job = counted(len(names), "experiment"), submitted.batch.engine_job
            state.message(f"{number} submitted to {self._engine.name}: job {job}")

    def _submit_batch(self, orders: Sequence[WorkerOrder]) -> SubmittedBatch:
        request = self._requests[orders[0].case.gpus]
        batch = Batch(
            id=uuid.uuid4().hex[:12],
            launcher=self._config.launcher,
            names=[order.name for order in orders],
            request=request,
            settings=self._settings,
            working_folder=os.getcwd(),
            created_at_s=time.time(),
            time_limit_s=self._config.timeout_s,
            command=self._command,
        )
        jobs = JobsFolder(self._folder.jobs(batch.id))
        left = dict(enumerate(orders))
        after = self._before(len(self._batches))
        try:
            plain_files.make_folder(jobs.root)
            for number, order in left.items():
                jobs.write(number, order)
            jobs.write_batch(batch)
            engine_job = self._engine.submit(batch, jobs, list(left), after)
            batch = msgspec.structs.replace(batch, engine_job=engine_job)
            jobs.write_batch(batch)
        except OSError as error:
            jobs.remove()
            raise UsageError(f"cannot write to {jobs.root}: {error.strerror}") from error
        except UsageError:
            jobs.remove()
            raise
        return SubmittedBatch(batch=batch, jobs=jobs, left=left)

    def _before(self, at: int) -> Batch | None:
        """The batch that has to end before the one at this position begins."""
        in_turn = self._engine.runs_batches_in_turn or self._settings.max_jobs is not None
        return self._batches[at - 1].batch if in_turn and at > 0 else None

    def _recover(self, found: SubmittedBatch) -> None:
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

    def _read_files(self, state: SweepState) -> bool:
        """Read once what nodes have written; whether something has changed."""
        moved = False
        for found in list(self._batches):
            present = found.jobs.listing()
            for number in [number for number in found.left if number in present[".claim"]]:
                if number not in found.claims or not found.claims[number].at_s:
                    moved = moved or number not in found.claims
                    found.claims[number] = found.jobs.read_claim(number)
                result = result_of(self._folder, found.left[number], found.claims[number])
                if result is not None:
                    self._finish(found, number, result, state)
                    moved = True
                else:
                    self._show(found, number, state)
            for number in [number for number in found.left if number not in present[".order"]]:
                _restore(found, number)
            self._drop_if_over(found)
        return moved

    def _show(self, found: SubmittedBatch, number: int, state: SweepState) -> None:
        claim, name = found.claims[number], found.batch.names[number]
        if claim.at_s and not claim.withdrawn:
            running = CaseState(
                slot=claim.host,
                phase=last_phase(read_progress(self._folder.progress(name))),
                elapsed_s=max(time.time() - claim.at_s, 0.0),
                time_limit_s=found.batch.time_limit_s,
            )
            state.changed(name, running)

    def _ask_engine(self, state: SweepState) -> bool:
        """Ask the engine about what has no result; whether something has ended by that."""
        moved = False
        for found in list(self._batches):
            claimed = {number: found.claims.get(number, Claim()).engine_job for number in found.left}
            job_states = self._engine.job_states(found.batch, found.jobs, claimed)
            for number, job_state in job_states.items():
                has_run = job_state.over or (job_state.waits and number in found.claims)
                if number in found.left and has_run and _has_no_result(found, number):
                    self._lose(found, number, job_state, state)
                    moved = True
            self._drop_if_over(found)
        return moved

    def _lose(self, found: SubmittedBatch, number: int, job_state: JobState, state: SweepState) -> None:
        """An experiment whose job is over and which left no result gets one here."""
        name, order = found.batch.names[number], found.left[number]
        claim = found.claims.get(number, Claim())
        end_on_this_host(self._folder, name, claim)
        printed = last_lines(found.jobs.output(number))[-1:]
        tail = last_lines(self._folder.log(name)) if claim.at_s else []
        where = f"on {claim.host}" if claim.at_s else "before it started"
        result = without_answer(
            self._folder,
            order,
            job_state.status,
            f"its job ended {where}; {self._engine.name}: {job_state.reason}",
            log_tail=tail or printed,
            wall_s=found.batch.time_limit_s if job_state.status is Status.TIMEOUT else None,  # at least
            began_at_s=claim.at_s or None,
        )
        self._finish(found, number, save(self._folder, result), state)

    def _finish(self, found: SubmittedBatch, number: int, result: CaseResult, state: SweepState) -> None:
        self._folder.remove_running(result.name)
        found.jobs.forget(number)
        found.forget(number)
        state.repair_folder()
        state.ended(result)
        if result.end in OUT_OF_MEMORY:
            self._prune(state)

    def _prune(self, state: SweepState) -> None:
        """Withdraw what need not run any more; its job finds it claimed and ends."""
        self._unsubmitted = [name for name in self._unsubmitted if not state.prune(name)]
        for found in self._batches:
            for number in [number for number in found.left if number not in found.claims]:
                pruned = state.pruned_result(found.batch.names[number])
                with contextlib.suppress(OSError):  # then it runs
                    if pruned is not None and found.jobs.try_claim(number, withdraw=True):
                        found.jobs.forget(number, present=(".order",))
                        found.forget(number)
                        state.ended(save(self._folder, pruned))

    def _drop_if_over(self, found: SubmittedBatch) -> None:
        if not found.left:
            self._batches.remove(found)
            with contextlib.suppress(OSError):  # the next call removes it
                found.jobs.remove()


def _has_no_result(found: SubmittedBatch, number: int) -> bool:
    """Whether there will be no result of an experiment whose job is over: it is withdrawn if not claimed."""
    if number not in found.claims:
        with contextlib.suppress(OSError):  # the folder was removed: it is restored first
            return found.jobs.try_claim(number, withdraw=True)
        return False
    since = found.over_since.setdefault(number, time.monotonic())
    return time.monotonic() - since >= found.batch.settings.stale_view_s


def _restore(found: SubmittedBatch, number: int) -> None:
    """An experiment may have removed the folder; its node needs the order, and a late one the claim."""
    with contextlib.suppress(OSError):  # cannot be written now: tried again with the next reading
        plain_files.make_folder(found.jobs.root)
        found.jobs.write_batch(found.batch)
        if number in found.claims:
            found.jobs.try_claim(number, engine_job=found.claims[number].engine_job)
        found.jobs.write(number, found.left[number])
