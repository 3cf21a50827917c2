"""What the experiments of a running sweep share: their orders and results, the folder and the listener.

Threads of several slots use it at once; the listener is called by one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...commit import git_commit
from ...records import OUT_OF_MEMORY, CaseResult, Phase, Status, SweepCase, SweepRecord
from ..config import SweepConfig
from ..content_hash import content_hash, hashed_environment
from ..folder_claim import FolderLock, repair
from ..gpus import device_name_of
from ..order import WorkerOrder
from ..paths import SweepFolder
from .stored import save, stored_result
from .supervise import Stop


@dataclass(frozen=True, kw_only=True)
class CaseState:
    """A running experiment."""

    slot: str
    """Where it runs: gpu0, gpu1, …, or cpu."""
    phase: Phase
    elapsed_s: float
    time_limit_s: float


class SweepListener(Protocol):
    """Receives the events of a sweep; called by one thread at a time."""

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        """All experiments in order, and the results that are reused."""

    def changed(self, name: str, state: CaseState) -> None:
        """Called several times a second for each running experiment."""

    def ended(self, result: CaseResult) -> None:
        """An experiment has its result, which is on disk."""

    def message(self, text: str) -> None:
        """One line of text for the user."""


class SweepState:
    """A running sweep."""

    def __init__(
        self,
        config: SweepConfig,
        cases: Mapping[str, SweepCase],
        folder: SweepFolder,
        record: SweepRecord,
        folder_lock: FolderLock,
        listener: SweepListener,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.cases = cases
        self.folder = folder
        self.record = record
        self.clock = clock
        self.stop = Stop()
        self.results: dict[str, CaseResult] = {}
        self._folder_lock = folder_lock
        self._listener = listener
        self._lock = threading.RLock()
        limit = config.memory_limit_gib
        self._memory_limit_bytes = None if limit is None else int(limit * 2**30)
        environment = hashed_environment(device_name_of(config, config.device), self._memory_limit_bytes)
        self.hashes = {name: content_hash(case, environment) for name, case in cases.items()}
        self._commit = git_commit()

    def begin(self, reused: Mapping[str, CaseResult]) -> None:
        """These experiments have a valid result already."""
        self.results = dict(reused)
        self._listener.started(list(self.cases), list(reused.values()))

    def order(self, name: str) -> WorkerOrder:
        """The order to measure an experiment."""
        return self._order(name, self.cases[name], self.hashes[name])

    def probe_order(self, case: SweepCase, slot: str) -> WorkerOrder:
        """The order to find out whether a case fits in memory."""
        name = f"probe-{slot}"
        log = str(self.folder.probe_log(slot))
        return msgspec.structs.replace(self._order(name, case, ""), purpose="probe", log_path=log)

    def _order(self, name: str, case: SweepCase, case_hash: str) -> WorkerOrder:
        return WorkerOrder(
            case=case,
            name=name,
            sweep_id=self.record.sweep_id,
            content_hash=case_hash,
            folder=str(self.folder.root),
            progress_path=str(self.folder.progress(name)),
            log_path=str(self.folder.log(name)),
            memory_limit_bytes=self._memory_limit_bytes,
            git_commit=self._commit,
        )

    def message(self, text: str) -> None:
        """One line for the user."""
        with self._lock:
            self._listener.message(text)

    def changed(self, name: str, state: CaseState) -> None:
        """A running experiment has got this far."""
        with self._lock:
            self._listener.changed(name, state)

    def ended(self, result: CaseResult) -> None:
        """An experiment has its result, which is written."""
        if result.name not in self.cases:  # of an earlier call, and not in this matrix
            return
        with self._lock:
            self.results[result.name] = result
            self._listener.ended(result)

    def prune(self, name: str) -> bool:
        """Whether an experiment need not run any more; its result is then written."""
        pruned = self.pruned_result(name)
        if pruned is not None:
            self.ended(save(self.folder, pruned))
        return pruned is not None

    def pruned_result(self, name: str) -> CaseResult | None:
        """The result of an experiment that need not run, because a smaller batch ran out of memory."""
        case = self.cases.get(name)
        if case is None or not self.config.prune:  # a case of an earlier call may not be in this matrix
            return None
        with self._lock:
            smaller = [
                result
                for result in self.results.values()
                if result.end in OUT_OF_MEMORY
                and result.case.batch_size < case.batch_size
                and msgspec.structs.replace(result.case, batch_size=case.batch_size) == case
            ]
        if not smaller:
            return None
        message = f"not run: {smaller[0].name} already ran out of memory"
        return self.order(name).result(Status.PRUNED, Phase.START, message=message)

    def add_fit(self, name: str, fits: str) -> None:
        """Add to the result of an experiment that ran out of memory what fits."""
        result = msgspec.structs.replace(self.results[name], fits=fits)
        self.results[name] = save(self.folder, result)
        self.message(f"{name}: {fits}")

    def repair_folder(self) -> None:
        """An experiment's changes to the folder itself must not affect the next one."""
        with self._lock:
            for line in repair(self.folder, self.record, self._folder_lock):
                self._listener.message(line)

    def write_missing_files(self) -> None:
        """A full disk may have space again by now, and an experiment may have removed files."""
        for name, result in self.results.items():
            stored = stored_result(name, self.folder.result(name), self.folder.log(name))
            if stored.result != result or stored.faults or not self.folder.result(name).exists():
                written = save(self.folder, result)
                for note in written.notes[len(result.notes) :]:
                    self.message(f"{name}: {note}")
