"""The files of an experiment in runs/<name>/: the profiler's trace and TensorBoard's events.

Both are written when everything has been timed. If one cannot be written, the experiment still
succeeds, with a note.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ... import plain_files
from ...errors import UsageError, one_line
from ...hardware.ceiling.products import synchronize
from ...records import Measured, SweepCase
from ...trackers.table import make_tracker
from ...utilization import share_of_peak
from ..trainers.base import Trainer
from .case_model import Batch
from .measure import warm_up
from .rank_group import ALONE, RankGroup


def clear_run_folder(folder: Path) -> str | None:
    """Remove files of an earlier run of the same experiment; a note if that fails."""
    try:
        plain_files.remove(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        return f"{folder.name} cannot be written to: {error.strerror or error}"
    return None


def write_trace(
    trainer: Trainer,
    batches: Iterator[Batch],
    case: SweepCase,
    device: torch.device,
    path: Path,
    group: RankGroup = ALONE,
) -> tuple[int, str | None]:
    """Profile some steps and write the gzipped trace: its number of steps, and a note if it has fewer.

    The limit is on the JSON inside, which is what a viewer has to load. A larger trace is made again with
    fewer steps. Of several ranks the first is profiled, and the others take its steps with it.
    """
    if group.rank > 0:
        while steps := group.of_first(0):
            warm_up(trainer, batches, steps, device)
        return 0, None
    plain = path.with_name(path.name.removesuffix(".gz"))
    written, steps, note = 0, case.profiled_steps, None
    try:
        while steps > 0 and not written:
            _profile(trainer, batches, steps, device, plain, group)
            size = plain.stat().st_size
            if size <= case.max_trace_bytes:
                _compress(plain, path)
                written = steps
            else:
                fewer = min(steps - 1, steps * case.max_trace_bytes // size)
                note = (
                    f"{fewer or 'no'} of {case.profiled_steps} steps in the trace: {steps} take "
                    f"{size:,} bytes, more than {case.max_trace_bytes:,}"
                )
                steps = fewer
    except Exception as error:  # the timed steps stay valid
        with contextlib.suppress(OSError):
            plain_files.remove(path)
        note = f"no trace: {one_line(error)}"
    finally:
        with contextlib.suppress(OSError):
            plain_files.remove(plain)
    group.of_first(0)
    return written, note


def _profile(
    trainer: Trainer, batches: Iterator[Batch], steps: int, device: torch.device, path: Path, group: RankGroup
) -> None:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        group.of_first(steps)  # not before: if no profiler can be started, the other ranks take no steps
        for step in range(steps):
            with record_function(f"ProfilerStep#{step}"):  # the name by which tools find steps
                trainer.step(next(batches))
        synchronize(device)
    profiler.export_chrome_trace(str(path))


def _compress(plain: Path, path: Path) -> None:
    """Gzip the trace. torch does not report a full disk, but a complete trace ends with a brace."""
    with plain.open("rb") as source:
        source.seek(-min(64, plain.stat().st_size), 2)
        if not source.read().rstrip().endswith(b"}"):
            raise OSError(f"{plain.name} is incomplete")
        source.seek(0)
        with gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)


def write_events(folder: Path, name: str, measured: Measured, losses: list[float]) -> str | None:
    """One row of scalars per timed step, for TensorBoard; a note if they cannot be written."""
    try:
        tracker = make_tracker("tensorboard", folder)
        tracker.start({"experiment": name})
        flops = measured.flops
        for step, (seconds, loss) in enumerate(zip(measured.steps.times_s, losses, strict=True), start=1):
            mfu = None if flops is None else share_of_peak(flops.model_flops, seconds, flops.peak_flops_per_s)
            hfu = (
                None
                if flops is None
                else share_of_peak(flops.hardware_flops, seconds, flops.peak_flops_per_s)
            )
            tracker.log(
                step,
                {
                    "training/loss": loss,
                    "perf/step_time": seconds,
                    "perf/tokens_per_second": measured.tokens_per_step / seconds,
                    "perf/mfu": mfu,
                    "perf/hfu": hfu,
                },
            )
        tracker.finish({"median_step_time_s": measured.steps.median_s})
    except UsageError as error:
        return f"no TensorBoard events: {error}"
    except Exception as error:  # the measurement stays valid
        return f"TensorBoard events cannot be written: {one_line(error)}"
    return None
