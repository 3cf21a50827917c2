"""One experiment from its order to its result, inside the worker's process.

gate ─► build ─► warm_up ─► timed ─► count ─► profiled ─► done
  │        any of them may raise:       │      the status names the failure, the log has the traceback, and
  │                                     │      the result has all values so far (gradient check, memory, …)
  ├─► incorrect: never timed            │
  └─► incorrect: the timed steps did not train ◄┘
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from ...errors import UsageError, one_line
from ...records import (
    CaseResult,
    Environment,
    Flops,
    GradientCheck,
    Measured,
    Memory,
    Phase,
    PhaseTime,
    Status,
    SweepCase,
)
from ..failures import is_out_of_memory, status_of
from ..order import WorkerOrder
from ..paths import SweepFolder
from ..progress import Progress, append_progress
from ..trainers.base import Trainer, TrainerSettings, load_trainer
from .case_model import Batch, CaseModel, build_case_model, endless_batches, samples_of
from .environment import environment, memory, reset_peaks
from .gradient_check import NAN_RELATIVE_ERROR, check_trainer
from .measure import count_work, time_steps, warm_up
from .memory_limit import limit_memory
from .models import parameter_count
from .run_files import clear_run_folder, write_events, write_trace

PROBE_STEPS = 2

LEAST_WORK = 0.5
"""Share of the model's FLOPs that a step must execute: forward alone is a third."""


class Experiment:
    """Runs one order; what it measures until a failure is still in the result."""

    def __init__(
        self, order: WorkerOrder, say: Callable[[str], None], *, started_at_s: float, began_at_s: float
    ) -> None:
        self._order = order
        self._say = say
        self._case = order.case
        self._device = (
            torch.device("cuda", 0) if order.case.device == "cuda" else torch.device(order.case.device)
        )
        self._began_at_s = began_at_s
        self._phases = [PhaseTime(phase=Phase.START, began_at_s=started_at_s)]
        self._notes: list[str] = []
        self._environment: Environment | None = None
        self._gradient_check: GradientCheck | None = None
        self._parameters: int | None = None
        self._measured: Measured | None = None
        self._memory: Memory | None = None
        self._append_progress(Phase.START)

    def run(self) -> CaseResult:
        """The whole experiment."""
        try:
            limit_memory(self._order.memory_limit_bytes)
            status, message = self._run()
        except BaseException as error:  # anything a trainer raises, also KeyboardInterrupt
            status, message = status_of(error)
            limit_memory(None)  # so that writing the result has memory
            self._memory = self._memory or memory(self._device)
            self._show(error)
        return CaseResult(
            name=self._order.name,
            sweep_id=self._order.sweep_id,
            content_hash=self._order.content_hash,
            case=self._case,
            end=status,
            phase=self._phases[-1].phase,
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

    def probe(self) -> bool | None:
        """Whether a few steps fit in memory; None after any other failure."""
        fits: bool | None = True
        try:
            limit_memory(self._order.memory_limit_bytes)
            self._check_device()
            trainer, built = self._build(load_trainer(self._case.trainer))
            self._begin(Phase.WARM_UP)
            batches = endless_batches(built, self._case, self._device)
            warm_up(trainer, batches, PROBE_STEPS, self._device)
        except BaseException as error:
            fits = False if is_out_of_memory(error) else None
            limit_memory(None)
            self._show(error)
        self._begin(Phase.DONE, fits=fits)
        return fits

    def _run(self) -> tuple[Status, str | None]:
        case, device = self._case, self._device
        files = SweepFolder(Path(self._order.folder))
        run_folder, trace = files.run(self._order.name), files.trace(self._order.name)
        self._note(clear_run_folder(run_folder))
        self._check_device()
        trainer_class = load_trainer(case.trainer)
        self._begin(Phase.GRADIENT_CHECK)
        self._gradient_check = check_trainer(trainer_class, case, device)
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
        batches = endless_batches(built, case, device)
        self._begin(Phase.WARM_UP)
        warm_up(trainer, batches, case.warm_up_steps, device)
        self._begin(Phase.TIMED)
        timed = time_steps(trainer, batches, case, device)
        self._memory = memory(device)

        self._begin(Phase.COUNT)
        flops = None
        try:
            flops = count_work(trainer, next(batches), case, device, timed.steps.median_s)
        except Exception as error:  # the timed steps stay valid
            self._note(f"no FLOPs: {one_line(error)}")
            self._show(error)
        idle = why_untrained(timed.losses, flops)
        if idle is not None:
            return Status.INCORRECT, f"the steps of {case.trainer} do not train: {idle}"

        self._begin(Phase.PROFILED)
        steps, trace_note = write_trace(trainer, batches, case, device, trace)
        samples, tokens = _samples_and_tokens(built.example)
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
        )
        self._begin(Phase.DONE)
        self._note(write_events(run_folder, self._order.name, self._measured, timed.losses))
        return Status.OK, None

    def _check_device(self) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("no CUDA device is visible to this process: use device 'cpu', or see nvidia-smi")
        self._environment = environment(self._device, self._order.git_commit)

    def _build(self, trainer_class: type[Trainer]) -> tuple[Trainer, CaseModel]:
        case = self._case
        self._begin(Phase.BUILD)
        built = build_case_model(case, self._device)
        self._parameters = parameter_count(built.model)
        settings = TrainerSettings(
            optimizer=case.optimizer,
            learning_rate=case.learning_rate,
            max_grad_norm=case.max_grad_norm,
            noise_multiplier=case.noise_multiplier,
            compile=case.compile,
        )
        trainer = trainer_class(built.model, settings)
        reset_peaks(self._device)  # temporary memory of the build does not count
        return trainer, built

    def _note(self, text: str | None) -> None:
        if text is not None:
            self._notes.append(text)

    def _begin(self, phase: Phase, *, fits: bool | None = None) -> None:
        self._phases.append(PhaseTime(phase=phase, began_at_s=time.time()))
        self._append_progress(phase, fits)
        self._say(f"[{phase.value}]")

    def _append_progress(self, phase: Phase, fits: bool | None = None) -> None:
        path = Path(self._order.progress_path)
        try:
            append_progress(path, self._progress(phase, fits))
        except OSError as error:  # without it the experiment still runs
            self._say(f"note: {path} cannot be written: {error.strerror}")

    def _progress(self, phase: Phase, fits: bool | None = None) -> Progress:
        peaks = memory(self._device)
        return Progress(
            phase=phase,
            at_s=time.time(),
            allocated_bytes=peaks.allocated_bytes,
            reserved_bytes=peaks.reserved_bytes,
            process_bytes=peaks.process_bytes,
            fits=fits,
        )

    def _show(self, error: BaseException) -> None:
        """Write the traceback to the log, and release its frames, which hold tensors."""
        with contextlib.suppress(Exception):  # formatting the exception may fail
            self._say("".join(traceback.format_exception(error)).rstrip())
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
        f"the step of {case.trainer} differs from the mean {loop} by {check.relative_error:.1e} "
        f"(allowed: {check.tolerance:.0e}) {where}"
    )
