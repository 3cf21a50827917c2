"""A whole sweep: reuse existing results, run the rest, return the outcome.

    claim the folder ─► end what a killed supervisor left ─► reuse results with the same content hash
        ─► the rest on this machine (`local_run.py`) or on a cluster (`cluster_run.py`)
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...errors import UsageError
from ...records import CaseResult
from ..cases import cases_of, resolved
from ..config import SweepConfig, as_mapping, parse
from ..folder_claim import claim
from ..gpus import device_of
from ..launchers.local import WORKER, Slot, slots
from ..paths import SweepFolder
from .cluster_batches import launchers_in_use
from .cluster_run import ClusterRun
from .local_run import Interrupted, LocalRun
from .memory_fit import propose
from .resume import check_rerun, end_leftovers, reusable
from .state import SweepListener, SweepState
from .supervise import Stop


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """The results and times of a sweep."""

    results: list[CaseResult]
    """In the order of the matrix; without those that an interruption left unfinished."""
    interrupted: bool
    by_ctrl_c: bool = False
    """Whether it was Ctrl-C that interrupted it."""
    on_cluster: int = 0
    """Experiments that are left on a cluster."""
    wall_s: float


def run_sweep(
    config: SweepConfig,
    folder: Path,
    *,
    rerun: str = "none",
    start_over: bool | None = None,
    listener: SweepListener,
    command: Sequence[str] = WORKER,
    clock: Callable[[], float] = time.monotonic,
) -> SweepOutcome:
    """Run every experiment of the matrix that has no result yet; a UsageError before anything has started.

    `rerun` is one of `resume.RERUN`. `start_over`: whether a sweep with other settings in the folder is
    replaced; None: only with rerun "all". `command` starts a worker.
    """
    began = clock()
    check_rerun(rerun)
    config = parse(as_mapping(config))
    device = device_of(config)
    config = resolved(config, device)
    cases = cases_of(config, device)
    own_folder = SweepFolder(folder.absolute())
    _refuse_jobs_elsewhere(own_folder, config.launcher, rerun)
    slots_by_gpus: dict[int, list[Slot]] = {}
    cluster = None
    if config.launcher == "local":
        slots_by_gpus = {
            gpus: slots(config, device, command, gpus_per_experiment=gpus)
            for gpus in sorted(config.gpus_per_experiment)
        }
    else:
        cluster = ClusterRun(config, device, own_folder, command)
    sweep_folder, record, lock = claim(
        folder, config, cases, start_over=rerun == "all" if start_over is None else start_over
    )
    try:
        state = SweepState(config, cases, sweep_folder, record, lock, listener, clock)
        with _stopped_by_signals(state.stop):
            _run(state, rerun, slots_by_gpus, cluster)
        return SweepOutcome(
            results=[state.results[name] for name in cases if name in state.results],
            interrupted=state.stop.requested,
            by_ctrl_c=state.stop.by_ctrl_c,
            on_cluster=len(cluster.names) if cluster is not None else 0,
            wall_s=clock() - began,
        )
    finally:
        lock.release()


def _refuse_jobs_elsewhere(folder: SweepFolder, launcher: str, rerun: str) -> None:
    """Experiments that another engine may still run must not run here too."""
    for used in sorted(launchers_in_use(folder)):
        if used != launcher or rerun == "all":
            raise UsageError(
                f"experiments of {folder.root} are still on {used}: wait for them with --launcher {used}, or "
                "cancel them with --cancel"
            )


def _run(
    state: SweepState, rerun: str, slots_by_gpus: Mapping[int, list[Slot]], cluster: ClusterRun | None
) -> None:
    on_cluster = cluster.take_over(state.message) if cluster is not None else set()
    end_leftovers(state.folder, state.cases, state.record, state.message, on_cluster=on_cluster)
    hashes = {name: known for name, known in state.hashes.items() if name not in on_cluster}
    limit_s = state.config.timeout_s
    state.begin(reusable(state.folder, hashes, rerun=rerun, timeout_s=limit_s, report=state.message))
    pending = [name for name in state.cases if name not in state.results and name not in on_cluster]
    local = LocalRun(state, slots_by_gpus)
    if cluster is not None:
        cluster.run([name for name in pending if not state.prune(name)], state)
    else:
        local.run(pending)
    if not state.stop.requested:
        has_probes = cluster is None and state.config.find_fit
        with contextlib.suppress(Interrupted):  # the next call searches for the rest
            for name, fits in propose(list(state.results.values()), local.probe if has_probes else None):
                state.add_fit(name, fits)
    state.write_missing_files()


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
