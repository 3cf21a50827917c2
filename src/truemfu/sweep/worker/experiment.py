"""One experiment from its order to its result, inside the worker's process.

gate ─► build ─► warm_up ─► timed ─► count ─► profiled ─► done
  │        any of them may raise:       │      the end is typed, the traceback is in the log, and what was
  │                                     │      found so far (gate, parameters, memory) is in the result
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
    End,
    Environment,
    Flops,
    Gate,
    Measured,
    Memory,
    Phase,
    PhaseTime,
    SweepCase,
)
from ..failures import end_of, is_out_of_memory
from ..order import WorkerOrder
from ..paths import SweepFolder
from ..progress import Progress, append_progress
from ..trainers.base import Trainer, TrainerSettings, load_trainer
from .case_model import Batch, CaseModel, build_case_model, endless_batches, samples_of
from .environment import environment, forget_peaks, memory
from .gradient_check import NO_NUMBER, check_trainer
from .measure import count_work, time_steps, warm_up
from .memory_limit import limit_memory
from .models import parameter_count
from .run_files import clear_run_folder, write_events, write_trace

PROBE_STEPS = 2

LEAST_WORK = 0.5
"""Of the model's FLOPs, what a step must execute: forward alone is a third of them."""


class Experiment:
    """Runs one order; what it finds on the way is kept for the result, however it ends."""

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
        self._gate: Gate | None = None
        self._parameters: int | None = None
        self._measured: Measured | None = None
        self._memory: Memory | None = None
        self._leave_trail(Phase.START)

    def run(self) -> CaseResult:
        """The whole experiment."""
        try:
            limit_memory(self._order.memory_limit_bytes)
            end, message = self._run()
        except BaseException as error:  # whatever a trainer raises, KeyboardInterrupt included
            end, message = end_of(error)
            limit_memory(None)  # the report must not fail for what the experiment took
            self._memory = self._memory or memory(self._device)
            self._show(error)
        return CaseResult(
            name=self._order.name,
            sweep_id=self._order.sweep_id,
            content_hash=self._order.content_hash,
            case=self._case,
            end=end,
            phase=self._phases[-1].phase,
            message=message,
            began_at_s=self._began_at_s,
            phases=self._phases,
            parameters=self._parameters,
            measured=self._measured if end is End.OK else None,
            memory=self._memory,
            gate=self._gate,
            environment=self._environment,
            notes=self._notes,
        )

    def probe(self) -> bool | None:
        """Whether a few steps fit into memory; None where something else went wrong."""
        fits: bool | None = True
        try:
            limit_memory(self._order.memory_limit_bytes)
            self._look_around()
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

    def _run(self) -> tuple[End, str | None]:
        case, device = self._case, self._device
        files = SweepFolder(Path(self._order.folder))
        run_folder, trace = files.run(self._order.name), files.trace(self._order.name)
        self._note(clear_run_folder(run_folder))
        self._look_around()
        trainer_class = load_trainer(case.trainer)
        self._begin(Phase.GATE)
        self._gate = check_trainer(trainer_class, case, device)
        if not self._gate.passed:
            self._memory = memory(device)
            return End.INCORRECT, _why_incorrect(case, self._gate)
        if self._gate.clipped and self._gate.stands_in:
            self._note(f"per-sample gradients were checked on another model than its own: {self._gate.model}")
        trainer, built = self._build(trainer_class)
        if built.brought_batch:
            self._note(f"{case.model} brings its own batch: batch size and sequence length are not used")
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
        except Exception as error:  # what has been timed stays timed
            self._note(f"no FLOPs: {one_line(error)}")
            self._show(error)
        idle = why_untrained(timed.losses, flops)
        if idle is not None:
            return End.INCORRECT, f"the steps of {case.trainer} do not train: {idle}"

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
        return End.OK, None

    def _look_around(self) -> None:
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
        forget_peaks(self._device)  # what building took for a moment is not what training needs
        return trainer, built

    def _note(self, text: str | None) -> None:
        if text is not None:
            self._notes.append(text)

    def _begin(self, phase: Phase, *, fits: bool | None = None) -> None:
        self._phases.append(PhaseTime(phase=phase, began_at_s=time.time()))
        self._leave_trail(phase, fits)
        self._say(f"[{phase.value}]")

    def _leave_trail(self, phase: Phase, fits: bool | None = None) -> None:
        path = Path(self._order.progress_path)
        try:
            append_progress(path, self._progress(phase, fits))
        except OSError as error:  # costs the trail, not the experiment
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
        """The traceback into the log; its frames, which hold tensors, are let go."""
        with contextlib.suppress(Exception):  # an exception may fail at being shown
            self._say("".join(traceback.format_exception(error)).rstrip())
        traceback.clear_frames(error.__traceback__)


def why_untrained(losses: list[float], flops: Flops | None) -> str | None:
    """Why these timed steps cannot have trained the model; None where nothing speaks against it.

    The gate has seen one step on a small model. Here are the steps that were timed: a loss that is never a
    number, or far less work than forward and backward take. Where an operator was not counted, the executed
    work is a lower bound, and nothing is concluded from it.
    """
    reasons = []
    if not any(map(math.isfinite, losses)):
        reasons.append(f"the loss is {losses[-1]} in all {len(losses)} timed steps")
    if flops is not None and not flops.uncounted and flops.hardware_flops < LEAST_WORK * flops.model_flops:
        reasons.append(
            f"one executes {flops.hardware_flops:,} FLOPs, where forward and backward of the model take "
            f"{flops.model_flops:,}"
        )
    return "; ".join(reasons) or None


def _samples_and_tokens(batch: Batch) -> tuple[int, int]:
    """How many samples and tokens a batch holds; where there are no tokens, each sample counts as one."""
    samples = samples_of(batch)
    ids = batch.get("input_ids")
    return samples, ids.numel() if isinstance(ids, torch.Tensor) else samples


def _why_incorrect(case: SweepCase, gate: Gate) -> str:
    where = f"on {gate.model}, {gate.batch_size} × {gate.seq_len}"
    if gate.relative_error == NO_NUMBER:
        return f"the step of {case.trainer} makes parameters that are no numbers {where}"
    loop = "clipped per-sample gradient" if gate.clipped else "per-sample gradient"
    return (
        f"the step of {case.trainer} differs from the mean {loop} by {gate.relative_error:.1e} "
        f"(allowed: {gate.tolerance:.0e}) {where}"
    )
