"""One process of a trial: starts the command with its order, waits for its result, ends all that it started.

    order ─► environment ─► the command, in its own session ─► results of all ranks ─► it ends by itself,
        or is ended shortly after ─► TrialRun

What it prints goes to a file. Trackers in it are offline, and have their folder beside that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from ..integrations.run_settings import RunSettings
from ..plain_files import read_end
from ..records import LOG_FILE, read_record
from ..remedies.facts import ORDER, RUN_FOLDER, Evidence, TrialOrder, TrialResult, result_file
from ..report.compare.intervals import FEWEST_STEPS
from ..report.run.log_rows import LogRow, LogRows, read_log
from ..sweep.process import GRACE_S, WorkerProcess, kernel_oom_kills
from ..text import on_one_line, shortened
from .record import TrialRun

OUTPUT_FILE = "output.txt"
_POLL_S = 0.1
_AFTER_RESULTS_S = 20.0
"""For launchers to end by themselves, once each rank has its result."""
_SUMMARY = "\ntruemfu\n"
"""How the summary of a monitor begins."""
_TAIL_BYTES, _TAIL_LINES = 20_000, 15


def run_process(
    command: Sequence[str],
    order: TrialOrder,
    *,
    number: int,
    name: str,
    limit_s: float,
    waiting: Callable[[], None],
) -> tuple[TrialRun, Evidence | None]:
    """Run the command once; `waiting` is called several times a second."""
    folder = Path(order.folder)
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    began_s, kills = time.monotonic(), kernel_oom_kills()
    with open(folder / OUTPUT_FILE, "wb") as output:
        process = WorkerProcess(command, environment=_environment(order, name), output=output.fileno())
        process.send(b"")  # its standard input is empty
        is_late = False
        try:
            is_late = not _waited(process, folder, began_s, limit_s, waiting)
        finally:
            process.end(0.0 if is_late else GRACE_S)
    seconds = time.monotonic() - began_s
    results = _results(folder)
    failure = None
    if not results or not all(one.is_complete for one in results):
        failure = _failure(
            process, folder, results, limit_s if is_late else None, kernel_oom_kills() != kills
        )
    run = TrialRun(number=number, name=name, seconds=seconds, failure=failure)
    if results:
        run = _measured(run, order, results)
    if run.failure is not None:
        tail = _tail(folder)
        last = f": {tail[-1]}" if tail and not results else ""
        run = msgspec.structs.replace(run, failure=f"{run.failure}{last}", output_tail=tail)
    return run, results[0].evidence if results else None


def _environment(order: TrialOrder, name: str) -> dict[str, str]:
    folder = Path(order.folder)
    scratch = str(folder / "scratch")
    settings = RunSettings(output=str(folder / RUN_FOLDER), mode="estimate", trackers=(), began_s=time.time())
    offline = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": scratch,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db",
        "COMET_OFFLINE_DIRECTORY": scratch,
        "COMET_START_ONLINE": "0",
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": scratch,
    }
    own = {ORDER: order.as_text(), "TRUEMFU_TRY": name, "TRUEMFU_TRY_FOLDER": scratch}
    return settings.environment({**os.environ, **offline}) | own


def _waited(
    process: WorkerProcess, folder: Path, began_s: float, limit_s: float, waiting: Callable[[], None]
) -> bool:
    """Wait for its end, or some time after its results; whether it kept the limit."""
    results_s: float | None = None
    while not process.wait(_POLL_S):
        waiting()
        now_s = time.monotonic()
        if results_s is None and _has_all_results(folder):
            results_s = now_s
        if results_s is not None and now_s > results_s + _AFTER_RESULTS_S:
            return True
        if results_s is None and now_s > began_s + limit_s:
            return False
    return True


def _has_all_results(folder: Path) -> bool:
    first = result_file(folder, 0)
    if not first.exists():
        return False
    world_size = read_record(first, TrialResult).world_size
    return all(result_file(folder, rank).exists() for rank in range(world_size))


def _results(folder: Path) -> list[TrialResult]:
    """Of all ranks that left one, by rank."""
    return sorted(
        (read_record(file, TrialResult) for file in folder.glob("rank-*.json")),
        key=lambda result: result.rank,
    )


def _failure(
    process: WorkerProcess,
    folder: Path,
    results: Sequence[TrialResult],
    limit_s: float | None,
    was_killed: bool,
) -> str | None:
    """Why a process did not do all of its steps; None if it ended by itself after fewer."""
    failed = [result for result in results if result.error is not None]
    if failed:  # the first in time: other ranks fail since it did
        first = min(failed, key=lambda result: result_file(folder, result.rank).stat().st_mtime_ns)
        rank = f"rank {first.rank}: " if first.world_size > 1 else ""
        return f"{rank}{'out of memory: ' if first.is_out_of_memory else ''}{first.error}"
    if limit_s is not None:
        return f"no result within {limit_s:.0f} s: ended"
    if process.signal_name is not None:
        because = ", since memory ran out" if was_killed and process.signal_name == "SIGKILL" else ""
        return f"ended by {process.signal_name}{because}"
    if process.exit_code:
        return f"exit code {process.exit_code}"
    return None if results else "no training step was seen"


def _measured(run: TrialRun, order: TrialOrder, results: Sequence[TrialResult]) -> TrialRun:
    """The run with its figures; a failure if they are too few."""
    rows = _measured_rows(order)
    useful = [row.padding_efficiency for row in rows if row.padding_efficiency is not None]
    peaks = [result.peak_memory_bytes for result in results]
    is_known = len(results) >= results[0].world_size and None not in peaks
    too_few = f"too few steps: {len(rows)} of at least {FEWEST_STEPS} after {order.warm_up_steps} of warm-up"
    return msgspec.structs.replace(
        run,
        step_times_s=[row.step_time_s for row in rows if row.step_time_s is not None],
        data_waits_s=[row.data_wait_s for row in rows if row.data_wait_s is not None],
        losses=results[0].losses,
        non_finite_losses=results[0].non_finite_losses,
        padding=1 - fmean(useful) if useful else None,
        peak_memory_bytes=max(filter(None, peaks), default=None) if is_known else None,
        world_size=results[0].world_size,
        failure=run.failure or (too_few if len(rows) < FEWEST_STEPS else None),
    )


def _measured_rows(order: TrialOrder) -> list[LogRow]:
    """Of the monitor's log, which rank 0 writes; none if there is no log."""
    logs = sorted(Path(order.folder, RUN_FOLDER).glob(f"**/{LOG_FILE}"))
    rows = read_log(logs[0]).rows if logs else LogRows()
    return [
        row
        for row in map(rows.__getitem__, range(len(rows)))
        if order.warm_up_steps < row.global_step <= order.all_steps and not row.is_warmup and row.step_time_s
    ]


def _tail(folder: Path) -> list[str]:
    """The last lines that it printed before the monitor's summary."""
    text = read_end(folder / OUTPUT_FILE, _TAIL_BYTES)[0].decode(errors="replace")
    text = text.partition(_SUMMARY)[0]
    return [shortened(on_one_line(line)) for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
