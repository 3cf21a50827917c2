"""A run from its first batch or step on: makes its parts, ends them in order, and knows its figures.

training thread   StepRecorder: a note of each step
row thread        RowThread ──► Rows: notes become rows ──► Output ──► a thread for each tracker
in a job          ThisRank: reports of this rank, and rank 0's view of all
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..convention import Convention
from ..errors import one_line
from ..hardware.counters.executed import executed_method, has_rate
from ..hardware.detect import spec_of
from ..hardware.nsight.audited import AuditedKernels
from ..hardware.nsight.command import COUNT_VARIABLE
from ..torch_private import backward_passes, loading, phase_changes
from . import forks
from .config import AUTO, MonitorConfig
from .generation_servers import GenerationServers
from .hybrid.audit_step import AuditStep
from .hybrid.census_step import CensusStep
from .hybrid.hardware_watch import HardwareWatch, open_watch
from .hybrid.hardware_windows import HardwareWindows
from .hybrid.instruments import Instruments
from .hybrid.step_detail import StepDetails
from .notices import Notices
from .ranks.reporter import ROW_EVERY_S
from .ranks.this_rank import ThisRank
from .rows.frequency import DETAILS_S, StepsOrSeconds
from .rows.output import Output
from .rows.row_thread import RowThread
from .rows.rows import Rows, StepReader, peak_memory_bytes
from .signals import write_at_signals
from .step_flops.generate_calls import GenerationWatch
from .step_flops.known import KnownSteps
from .step_flops.plan import ObservationPlan
from .step_flops.source import FlopsSource
from .step_flops.watch import StepWatch
from .step_recorder import StepRecorder
from .summary import info_of, summary_of
from .timing.between_steps import BetweenSteps
from .timing.clock import StepClock, clock_for
from .timing.phases import StepPhases
from .values.host_values import HostValues
from .values.intake import Intake
from .values.sending import ValueSender
from .watching.batch_notes import BatchNotes
from .watching.measuring import Measuring
from .watching.model_facts import facts_of
from .watching.model_hooks import ModelHooks

_now_s = time.perf_counter
_ROWS_TIMEOUT_S = 5.0
_RANKS_TIMEOUT_S = 2.0
"""At the end, for what other ranks have not reported yet."""
_UNSENT_TIMEOUT_S = 1.0
"""When device values could not be sent: earlier steps may still become rows."""


class LiveRun:
    """Made on the training thread; `save` and `finish` may be called on any."""

    def __init__(
        self,
        config: MonitorConfig,
        folder: Path,
        *,
        device: torch.device,
        hooks: ModelHooks,
        measuring: Measuring,
        between: BetweenSteps,
        audited: AuditedKernels | None,
        output: Output,
        notices: Notices,
        training_lock: threading.RLock,
    ) -> None:
        self._output, self._notices, self._forks = output, notices, forks.number
        self._rank = ThisRank.current(notices)
        # What holds for all ranks of a job is one warning, rank 0's.
        about_figures = notices if self._rank.is_first else self._rank.note
        clock = StepClock(clock_for(device), now_s=_now_s)
        between.mark_with(clock)
        self._leave_torch = contextlib.ExitStack()
        phases = _watched_phases(clock, between, self._leave_torch) if config.step_phases else None
        counters, why_no_hfu = _opened_counters(config, device, about_figures)
        has_hfu = counters is not None and why_no_hfu is None
        self._no_waterfall: list[str] = []
        if config.mode == AUTO:
            if counters is not None and not has_hfu:
                counters.close()
                counters = None
            config = replace(config, mode="hybrid" if has_hfu else "smart")
            if why_no_hfu is not None and device.type == "cuda":
                self._no_waterfall = [f"cannot show where the peak went: no GPU counters ({why_no_hfu})"]
        elif config.mode == "hybrid" and not has_hfu:
            measuring.go_without_counters(why_no_hfu if self._rank.is_first else None)
        is_corrected = audited is not None and audited.executed_over_activity is not None
        executed = executed_method(is_corrected=is_corrected) if has_hfu else "profiler"
        self._instruments = Instruments(
            counters,
            AuditStep.from_environment(self._rank, device, notices),
            _census_step(config, folder, device, self._rank, hooks, notices),
        )
        plan = ObservationPlan(config.flops_profile_freq, _now_s())
        watch = StepWatch(
            plan,
            Convention(attention=config.attention),  # type: ignore[arg-type]
            is_enabled=not config.estimates_only,
            device=device,
            hooks=hooks,
        )
        self._flops = FlopsSource(
            config,
            KnownSteps(watch, notice=about_figures, clock=_now_s),
            hooks=hooks,
            notice=about_figures,
            device=device,
            rank=self._rank,
            executed_method=executed,
        )
        self._rank.join(
            folder,
            device=device,
            reads_gpu=config.hardware_counters_enabled,
            clock_hz=self._clock_hz,
            memory_bytes=lambda: peak_memory_bytes(device),
        )
        if self._rank.is_first:
            output.other_files += self._rank.files
        self._hardware: HardwareWindows | None = None
        if counters is not None:
            tiles = {} if audited is None else audited.tile_factors()
            self._hardware = HardwareWindows(
                counters,
                spec=spec_of(device),
                audited=audited,
                world_size=self._rank.world_size,
                details=StepDetails(self._flops, device, tiles),
                collective_share=lambda: self._rank.collective_share,
                notice=about_figures,
            )
        peak = config.measured_peak_tflops
        reader = StepReader(
            clock=clock.clock,
            flops=self._flops,
            plan=plan,
            rank=self._rank,
            hardware=self._hardware,
            audit=self._instruments.audit,
            measured_peak_flops_per_s=None if peak is None else peak * 1e12,
            has_phases=config.step_phases,
            notices=notices,
        )
        servers = GenerationServers(
            (config.generation_servers or ()) if self._rank.is_first else (),
            device=device,
            configured_flops_per_s=None if config.peak_tflops is None else config.peak_tflops * 1e12,
            notice=notices,
        )
        self._rows = Rows(
            reader,
            output,
            rank=self._rank,
            hardware=self._hardware,
            servers=servers,
            device=device,
            details=StepsOrSeconds(config.detailed_log_freq, DETAILS_S, began_s=_now_s()),
            notices=notices,
        )
        values = HostValues(notices)
        self._sender = ValueSender(values, clock.clock, between, training_lock, notices)
        self._row_thread = RowThread(self._rows, self._sender, device, notices)
        self.steps = StepRecorder(
            hooks=hooks,
            measuring=measuring,
            between=between,
            clock=clock,
            intake=Intake(values, notices),
            batches=BatchNotes(values),
            watch=watch,
            instruments=self._instruments,
            rank=self._rank,
            rows=self._row_thread,
            phases=phases,
            notices=notices,
        )
        self._description = info_of(
            config,
            device=_device_name(device),
            time_source=clock.clock.source,
            world_size=self._rank.world_size,
            rank=self._rank.rank,
            model=facts_of(hooks.models.roots),
        )
        self._leave_torch.callback(loading.listen(between))
        self._leave_torch.callback(GenerationWatch(watch, clock, between, notices).leave)
        if self._rank.is_first:
            output.start(self.info)
        is_held = training_lock._is_owned  # type: ignore[attr-defined]  # as threading.Condition does
        self.leave_signals = (
            write_at_signals(self._write_out, is_held) if self._rank.is_first else lambda: None
        )

    def _clock_hz(self) -> float | None:
        """The clock by the cycle counters of `hybrid`."""
        return None if self._hardware is None else self._hardware.counted_clock_hz(2 * ROW_EVERY_S)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes files and logs to trackers."""
        return self._rank.is_first

    def stop_observing(self) -> None:
        """No step is observed or recorded from now on, nor the rest of this one."""
        self.steps.watch.close()
        self._instruments.stop_recording()

    def save(self, timeout_s: float) -> None:
        """Write every step so far, and wait for that."""
        is_sent = self._sender.send_all()
        if not self._row_thread.finish_pending(timeout_s if is_sent else _UNSENT_TIMEOUT_S):
            self._notices("some steps were not processed in time and are not saved yet")
        self._output.flush(timeout_s)

    def finish(self) -> None:
        """Process the remaining steps, and end everything except the output."""
        in_closing = self._notices.in_closing
        in_closing(self._leave_torch.close)
        in_closing(self.stop_observing)
        if self.steps.logged:
            in_closing(lambda: self.steps.check_models(now=True))
        self._rank.expect_last_reports()
        ends_s = time.monotonic() + _RANKS_TIMEOUT_S
        try:
            in_closing(self._finish_last_rows)
        finally:  # also after a KeyboardInterrupt
            in_closing(self._row_thread.stop, _ROWS_TIMEOUT_S)
            in_closing(self._rank.leave, ends_s)
            in_closing(self._rank.store.stop)
            in_closing(self._rows.servers.stop)
            if (audit := self._instruments.audit) is not None:
                in_closing(audit.close, self.steps.logged)
            if self._hardware is not None:
                in_closing(self._hardware.close)
            if (census := self._instruments.census) is not None:
                in_closing(self._finish_census, census)

    def _finish_census(self, census: CensusStep) -> None:
        found = self.summary()
        census.finish(found["median_step_time_s"], found["padding_lost"])

    def record_census(self) -> None:
        """Record a step soon."""
        if self._instruments.census is not None:
            self._instruments.census.request()

    def _finish_last_rows(self) -> None:
        is_sent = self._sender.send_all()
        audit = self._instruments.audit
        patience_s = 0.0 if audit is None else audit.patience_s
        timeout_s = max(_ROWS_TIMEOUT_S, patience_s) if is_sent else _UNSENT_TIMEOUT_S
        finish = self._row_thread.finish_pending
        if not finish(timeout_s, hold_s=_RANKS_TIMEOUT_S) and not finish(timeout_s, hold_s=0.0):
            self._notices("the last steps were not processed in time and are lost")

    def _write_out(self, timeout_s: float) -> None:
        """On a monitor thread: write all steps so far to disk, as far as the time allows."""
        ends_s = time.perf_counter() + timeout_s
        if forks.number != self._forks:
            return
        with contextlib.suppress(Exception):  # the device may have failed: earlier rows are complete
            self._sender.send_if_free()
        left_s = ends_s - time.perf_counter()
        self._row_thread.finish_pending(0.75 * left_s, hold_s=0.25 * left_s)
        self._output.write_local(max(ends_s - time.perf_counter(), 0.0))

    def info(self) -> dict[str, Any]:
        """The description of the whole run."""
        info = self._description | self.steps.facts()
        return info if self._rank.job is None else info | {"scope": self._rank.job.scope}

    def summary(self) -> dict[str, Any]:
        """The run so far as plain data."""
        steps, rows, known, hardware = self.steps, self._rows, self._flops.known, self._hardware
        recorder = self._instruments.census
        census = None if recorder is None else recorder.census
        return summary_of(
            self.info(),
            rows.totals.as_dict(steps.left_out_s()),
            own_s=steps.own_time.later_s / (steps.logged - 1) if steps.logged > 1 else None,
            costs={
                "first_step_s": steps.own_time.first_step_s or 0.0,
                "checks_s": steps.watch.models.check_s,
                "background_s": self._row_thread.own_time_s,
                "observing_s": steps.watch.plan.spent_s,
                "observed": known.number_counted,
                "observed_steps": list(known.steps),
                "profiling_s": rows.reader.profile_cost_s,
                "census_s": 0.0 if recorder is None else recorder.cost_s,
            },
            job=self._rank.figures(),
            hardware=None if hardware is None else hardware.as_dict(),
            servers=[to_builtins(server) for server in rows.servers.summary()],
            typical_step=rows.reader.typical.as_dict(),
            without_tensor=census.without_tensor() if census is not None else {},
            notes=[
                *known.notes,
                *self._no_waterfall,
                *([] if hardware is None else hardware.details.notes),
                *self._rank.notes,
            ],
            lost_steps={
                "the monitor fell behind": rows.queue.lost,
                "their metrics could not be computed": rows.failed_steps,
                "the run ended before they were processed": self._row_thread.stranded_steps,
            },
        )


def _watched_phases(clock: StepClock, between: BetweenSteps, leave: contextlib.ExitStack) -> StepPhases:
    """The phases of this thread's steps, told of what torch does until `leave` is closed."""
    phases = StepPhases(clock, between)
    between.tell(phases)
    leave.callback(between.tell, None)
    leave.callback(backward_passes.listen(phases))
    leave.callback(phase_changes.listen(phases))
    leave.callback(register_optimizer_step_pre_hook(phases.optimizer_begins).remove)
    leave.callback(phases.leave)
    return phases


def _opened_counters(
    config: MonitorConfig, device: torch.device, notice: Callable[[str], None]
) -> tuple[HardwareWatch | None, str | None]:
    """The counters of `hybrid`, if they are wanted and there are any, and why they cannot measure HFU."""
    if config.mode not in ("hybrid", AUTO) or not config.hardware_counters_enabled:
        return None, None
    try:
        counters = open_watch(device, notice)
    except Exception as error:
        return None, one_line(error)
    if not isinstance(counters, HardwareWatch):
        return None, counters
    if has_rate(spec_of(device)):
        return counters, None
    return counters, f"the FLOP per cycle of {_device_name(device)} is unknown"


def _census_step(
    config: MonitorConfig,
    folder: Path,
    device: torch.device,
    rank: ThisRank,
    hooks: ModelHooks,
    notices: Notices,
) -> CensusStep | None:
    """None on ranks other than the first, where it is switched off, and under Nsight Compute."""
    if config.census is False or not rank.is_first or COUNT_VARIABLE in os.environ:
        return None

    def modules() -> dict[int, str]:
        roots = hooks.models.roots
        return {
            id(module): name or type(root).__name__ for root in roots for name, module in root.named_modules()
        }

    is_due = config.mode == "hybrid" if config.census is None else config.census
    return CensusStep(folder, device, is_due=is_due, modules=modules, notice=notices)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
