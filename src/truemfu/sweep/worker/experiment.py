"""One experiment from its order to its result, inside the worker's process.

gate ─► build ─► warm_up ─► timed ─► count ─► profiled ─► done
  │        any of them may raise:       │      the status names the failure, the log has the traceback, and
  │                                     │      the result has all values so far (gradient check, memory, …)
  ├─► incorrect: never timed            │
  └─► incorrect: the timed steps did not train ◄┘

On several GPUs each rank runs these phases. Figures are of all ranks together: FLOPs, tokens and peaks are
added up, so MFU is over all devices. The step time is that of the slowest rank, by the median of its own
steps. No barrier is needed for that: a step cannot end before the gradients of every rank have arrived, so
all ranks do the same number of steps in the same time, and a barrier would only add its own.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from ...errors import UsageError, one_line
from ...private.batches import samples_of
from ...private.check import NAN_RELATIVE_ERROR
from ...records import (
    CaseResult,
    Environment,
    Flops,
    GradientCheck,
    Measured,
    Memory,
    Phase,
    PhaseTime,
    RankFigures,
    Status,
    SweepCase,
)
from ..failures import status_of
from ..order import Progress, WorkerOrder, append_progress
from ..paths import SweepFolder
from ..trainers.base import Trainer, load_trainer
from .case_model import Batch, CaseModel, build_case_model, endless_batches
from .environment import environment, memory, reset_peaks
from .gradient_check import check_trainer
from .measure import TimedPass, count_needed, count_work, summed, time_steps, together, warm_up
from .memory_limit import limit_memory
from .models import parameter_count
from .rank_group import ALONE, RankGroup, Value, cause_of, is_lost_peer
from .run_files import clear_run_folder, write_events, write_trace
from .worker_process import write_line

PROBE_STEPS = 2

LEAST_WORK = 0.5
"""Share of the model's FLOPs that a step must execute: forward alone is a third."""


class CaseRun:
    """Runs one order; what it measures until a failure is still in the result."""

    def __init__(
        self,
        order: WorkerOrder,
        *,
        started_at_s: float,
        began_at_s: float,
        group: RankGroup = ALONE,
    ) -> None:
        self.failure: BaseException | None = None
        """What ended it; None unless something was raised."""
        self._order = order
        self._case = order.case
        self._group = group
        self._device = group.device(order.case.device)
        self._began_at_s = began_at_s
        self._phases = [PhaseTime(phase=Phase.START, began_at_s=started_at_s)]
        self._notes: list[str] = []
        self._environment: Environment | None = None
        self._own_environment: Environment | None = None
        self._gradient_check: GradientCheck | None = None
        self._parameters: int | None = None
        self._measured: Measured | None = None
        self._memory: Memory | None = None
        self._append_progress(Phase.START)

    def run(self) -> CaseResult:
        """The whole experiment; of a probe a few steps, and a result without a measurement."""
        try:
            limit_memory(self._order.memory_limit_bytes)
            status, message = self._measure() if self._order.purpose == "measure" else self._try_steps()
        except BaseException as raised:  # anything a trainer raises, also KeyboardInterrupt
            error = self.failure = cause_of(raised)
            status, message = status_of(error)
            limit_memory(None)  # so that writing the result has memory
            self._memory = self._memory or memory(self._device)
            self._show(error)
        return self._order.result(
            status,
            self._phases[-1].phase,
            message=message,
            began_at_s=self._began_at_s,
            phases=self._phases,
            parameters=self._parameters,
            measured=self._measured if status is Status.OK else None,
            memory=self._memory,
            gate=self._gradient_check,
            environment=self._environment,
            notes=self._notes,
        )

    def _try_steps(self) -> tuple[Status, str | None]:
        self._check_device()
        trainer, built = self._build(load_trainer(self._case.trainer))
        self._begin(Phase.WARM_UP)
        batches = endless_batches(built, self._data_case, self._device)
        warm_up(trainer, batches, PROBE_STEPS, self._device)
        self._memory = self._highest(memory(self._device))
        self._begin(Phase.DONE)
        return Status.OK, None

    def _measure(self) -> tuple[Status, str | None]:
        case, device, group = self._case, self._device, self._group
        files = SweepFolder(Path(self._order.folder))
        run_folder, trace = files.run(self._order.name), files.trace(self._order.name)
        if group.rank == 0:
            self._note(clear_run_folder(run_folder))
        self._check_device()
        trainer_class = load_trainer(case.trainer)
        self._begin(Phase.GRADIENT_CHECK)
        self._gradient_check = check_trainer(trainer_class, case, device, group)
        if not self._gradient_check.passed:
            self._memory = memory(device)
            return Status.INCORRECT, _why_incorrect(case, self._gradient_check)
        if self._gradient_check.clipped and self._gradient_check.stands_in:
            self._note(
                f"per-sample gradients were checked on a different model: {self._gradient_check.model}"
            )
        trainer, built = self._build(trainer_class)
        if built.brought_batch:
            self._note(f"{case.model} provides its own batch: batch size and sequence length are not used")
        batches = endless_batches(built, self._data_case, device)
        self._begin(Phase.WARM_UP)
        warm_up(trainer, batches, case.warm_up_steps, device)
        self._begin(Phase.TIMED)
        timed = time_steps(trainer, batches, case, device, agree=lambda steps: max(group.gather(steps)))
        own_memory = memory(device)
        self._memory = self._highest(own_memory)
        ranks = group.gather(self._figures(timed, own_memory)) if group.size > 1 else []
        timed = together(group.gather(timed))

        self._begin(Phase.COUNT)
        flops = self._count(trainer, next(batches), timed.steps.median_s)
        idle = next((why for why in group.gather(why_untrained(timed.losses, flops)) if why), None)
        if idle is not None:
            return Status.INCORRECT, f"the steps of {case.trainer} do not train: {idle}"

        self._begin(Phase.PROFILED)
        steps, trace_note = write_trace(trainer, batches, case, device, trace, group)
        samples, tokens = map(sum, zip(*group.gather(_samples_and_tokens(built.example)), strict=True))
        self._measured = Measured(
            steps=timed.steps,
            tokens_per_step=tokens,
            tokens_per_s=tokens / timed.steps.median_s,
            samples_per_s=samples / timed.steps.median_s,
            flops=flops,
            data_wait_s=timed.data_wait_s,
            final_loss=timed.losses[-1],
            trace=str(trace.relative_to(files.root)) if steps else None,
            trace_note=trace_note,
            ranks=ranks,
        )
        self._begin(Phase.DONE)
        if group.rank == 0:
            self._note(write_events(run_folder, self._order.name, self._measured, timed.losses))
        return Status.OK, None

    def _count(self, trainer: Trainer, batch: Batch, step_time_s: float) -> Flops | None:
        """The FLOPs of a step of all ranks; None and a note if a rank could not count its own."""
        case, device = self._case, self._device
        needed = self._on_all_ranks(lambda: count_needed(case))
        if needed is None:  # no rank may take a step that another one does not take
            return None
        flops = self._on_all_ranks(
            lambda: count_work(trainer, batch, case, device, step_time_s, needed=needed)
        )
        return None if flops is None else summed(self._group.gather(flops), step_time_s)

    def _on_all_ranks(self, count: Callable[[], Value]) -> Value | None:
        """What this rank counts; None and a note with the first rank's reason if one of them could not."""
        value = why = None
        try:
            value = count()
        except Exception as error:  # the timed steps stay valid
            self._show(error)
            why = f"no FLOPs: {one_line(error)}"
        reason = next((reason for reason in self._group.gather(why) if reason is not None), None)
        self._note(reason)
        return value if reason is None else None

    def _figures(self, timed: TimedPass, own_memory: Memory) -> RankFigures:
        assert self._own_environment is not None
        return RankFigures(
            rank=self._group.rank,
            host=self._own_environment.host,
            device_name=self._own_environment.device_name,
            step_time_s=timed.steps.median_s,
            memory=own_memory,
        )

    def _highest(self, own: Memory) -> Memory:
        """The memory of the rank with the highest peak."""
        return max(
            self._group.gather(own), key=lambda rank: (rank.allocated_bytes or 0, rank.process_bytes or 0)
        )

    @property
    def _data_case(self) -> SweepCase:
        """Each rank draws its own data."""
        return msgspec.structs.replace(self._case, seed=self._case.seed + self._group.rank)

    def _check_device(self) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                "no CUDA device is visible to this process: use device 'cpu', or check nvidia-smi"
            )
        self._own_environment = environment(self._device, self._order.git_commit)
        names = {rank.device_name for rank in self._group.gather(self._own_environment)}
        self._environment = msgspec.structs.replace(
            self._own_environment, device_name=" + ".join(sorted(names))
        )

    def _build(self, trainer_class: type[Trainer]) -> tuple[Trainer, CaseModel]:
        case = self._case
        self._begin(Phase.BUILD)
        built = build_case_model(case, self._group.build_device(case.device))
        self._parameters = parameter_count(built.model)
        model = self._group.wrapped(built.model, self._device)
        trainer = self._group.guarded(trainer_class(model, case))
        reset_peaks(self._device)  # temporary memory of the build does not count
        return trainer, built

    def _note(self, text: str | None) -> None:
        if text is not None:
            self._notes.append(text)

    def _begin(self, phase: Phase) -> None:
        self._phases.append(PhaseTime(phase=phase, began_at_s=time.time()))
        self._append_progress(phase)
        if self._group.rank == 0:
            write_line(f"[{phase.value}]")

    def _append_progress(self, phase: Phase) -> None:
        if self._group.rank > 0:
            return
        progress = Progress(
            phase=phase, at_s=time.time(), memory=memory(self._device), environment=self._environment
        )
        path = Path(self._order.progress_path)
        try:
            append_progress(path, progress)
        except OSError as error:  # without it the experiment still runs
            write_line(f"note: {path} cannot be written: {error.strerror}")

    def _show(self, error: BaseException) -> None:
        """Write the traceback to the log, and release its frames, which hold tensors."""
        if self._group.size > 1 and is_lost_peer(error):
            return  # the log shows the rank that failed first
        with contextlib.suppress(Exception):  # formatting the exception may fail
            text = "".join(traceback.format_exception(error)).rstrip()
            write_line(text if self._group.size == 1 else f"rank {self._group.rank}: {text}")
        traceback.clear_frames(error.__traceback__)


def why_untrained(losses: list[float], flops: Flops | None) -> str | None:
    """Why these timed steps cannot have trained the model; None if there is no such evidence.

    The gradient check covers one step on a small model. This covers the timed steps: a loss that is
    always NaN or infinite, or far less work than forward and backward need. If an operator was not counted,
    the executed work is a lower bound, and nothing is concluded from it.
    """
    reasons = []
    if not any(map(math.isfinite, losses)):
        reasons.append(f"the loss is {losses[-1]} in all {len(losses)} timed steps")
    if flops is not None and not flops.uncounted and flops.hardware_flops < LEAST_WORK * flops.model_flops:
        reasons.append(
            f"a step executes {flops.hardware_flops:,} FLOPs, but forward and backward of the model need "
            f"{flops.model_flops:,}"
        )
    return "; ".join(reasons) or None


def _samples_and_tokens(batch: Batch) -> tuple[int, int]:
    """How many samples and tokens a batch holds; where there are no tokens, each sample counts as one."""
    samples = samples_of(batch)
    ids = batch.get("input_ids")
    return samples, ids.numel() if isinstance(ids, torch.Tensor) else samples


def _why_incorrect(case: SweepCase, check: GradientCheck) -> str:
    where = f"on {check.model}, {check.batch_size} × {check.seq_len}"
    if check.relative_error == NAN_RELATIVE_ERROR:
        return f"the step of {case.trainer} produces NaN or infinite parameters {where}"
    loop = "clipped per-sample gradient" if check.clipped else "per-sample gradient"
    return (
        f"the step of {case.trainer} differs from the mean {loop} by a relative error of "
        f"{check.relative_error:.1e} (allowed: {check.tolerance:.0e}) {where}"
    )
