"""The experiments of a sweep on this machine: a thread for each slot, one size of slots after another.

next case ─► worker ─► result ─► next case …          a failure ends its own experiment alone
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ... import plain_files
from ...records import CaseResult, Phase, SweepCase
from ..launchers.local import Slot
from ..order import WorkerOrder
from .state import CaseState, SweepState
from .supervise import OnProgress, run_case


class Interrupted(Exception):
    """Ctrl-C during a probe."""


class LocalRun:
    """Runs experiments in slots; `slots_by_gpus`: those for experiments on this many GPUs."""

    def __init__(self, state: SweepState, slots_by_gpus: Mapping[int, list[Slot]]) -> None:
        self._state = state
        self._slots_by_gpus = slots_by_gpus
        self._pending: deque[str] = deque()
        self._lock = threading.Lock()

    def run(self, pending: Sequence[str]) -> None:
        """Run these experiments."""
        for gpus, slots in self._slots_by_gpus.items():
            self._pending.extend(name for name in pending if self._state.cases[name].gpus == gpus)
            with ThreadPoolExecutor(len(slots), thread_name_prefix="truemfu-slot") as threads:
                for served in as_completed([threads.submit(self._serve, slot) for slot in slots]):
                    served.result()  # the first failure is raised, once all have ended

    def probe(self, case: SweepCase) -> CaseResult:
        """The result of a few steps of a case in a fresh worker: do they fit in memory?"""
        state, slot = self._state, self._slots_by_gpus[case.gpus][0]
        order = state.probe_order(case, slot.name)
        state.message(
            f"trying {case.trainer}, {case.model}, batch {case.batch_size}, sequence {case.seq_len}"
        )
        result = self._supervised(slot, order)
        with contextlib.suppress(OSError):  # a folder that cannot be written
            plain_files.remove(Path(order.log_path))
        slot.close()
        if result is None:
            raise Interrupted
        return result

    def _serve(self, slot: Slot) -> None:
        """One slot: run cases one after another until none is left."""
        try:
            name = self._next()
            while name is not None:
                name = self._run_one(slot, name)
        except BaseException:
            self._state.stop.request()
            raise
        finally:
            slot.close()

    def _next(self) -> str | None:
        """The next case to run; None if there is none or a stop was requested."""
        with self._lock:
            while self._pending and not self._state.stop.requested:
                name = self._pending.popleft()
                if not self._state.prune(name):
                    return name
        return None

    def _run_one(self, slot: Slot, name: str) -> str | None:
        """Run a case, start the next worker when that does not disturb it; the name of the next case."""
        state, limit_s = self._state, self._state.config.timeout_s
        upcoming: list[str] = []

        def on_progress(phase: Phase, elapsed_s: float) -> None:
            state.changed(
                name, CaseState(slot=slot.name, phase=phase, elapsed_s=elapsed_s, time_limit_s=limit_s)
            )
            may_start = phase in (Phase.COUNT, Phase.DONE) and not upcoming
            if may_start and (following := self._next()) is not None:
                upcoming.append(following)
                slot.make_ready(state.cases[following])

        result = self._supervised(slot, state.order(name), on_progress)
        if result is not None:
            state.ended(result)
        if upcoming and not state.stop.requested and not state.prune(upcoming[0]):
            return upcoming[0]
        return self._next()

    def _supervised(
        self, slot: Slot, order: WorkerOrder, on_progress: OnProgress = lambda phase, elapsed_s: None
    ) -> CaseResult | None:
        """Run an order in this slot; None if it was interrupted without a result."""
        state = self._state
        result = run_case(
            lambda: slot.worker_for(order.case),
            order,
            state.folder,
            time_limit_s=state.config.timeout_s,
            stop=state.stop,
            on_progress=on_progress,
            clock=state.clock,
        )
        state.repair_folder()
        return result
