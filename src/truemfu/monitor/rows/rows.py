"""Steps become rows, in order, once the device has passed them.

    StepNote ──► StepReader: time, FLOPs, values ──► Step ──► held_rows, in a job ──► a row ──► Output

A step that ends a window of the hardware counters waits until they were read past it, unless a caller waits
for its row; a step of an unknown kind waits a few seconds for one like it to be observed. In a job of several
ranks each step is reported, and rank 0 holds its row back until all ranks have done so (`held_rows.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf, isfinite
from typing import Any, NamedTuple

import torch

from ...errors import one_line
from ...utilization import ABOVE_ONE
from ..generation_servers import GenerationServers
from ..hybrid.audit_step import AuditStep
from ..hybrid.hardware_windows import HardwareWindows
from ..metrics import LastAmounts, StepAmounts, StepTime, Window, performance
from ..notices import Notices
from ..ranks.amounts import Amounts
from ..ranks.this_rank import ThisRank
from ..step_flops.plan import ObservationPlan
from ..step_flops.source import ESTIMATE, FlopsSource, StepFlops, UnknownFlops
from ..step_note import StepNote, StepPosition
from ..timing.clock import CudaClock, HostClock
from ..timing.step_times import StepTiming
from ..totals import StepTotals
from ..values.datasets import dataset_metrics
from ..values.host_values import is_there, resolved
from ..watching.batch_notes import BatchNote
from ..watching.compilations import compilations
from ..watching.watched import is_of_first_module
from .frequency import StepsOrSeconds
from .held_rows import HeldRows
from .output import Output
from .step_queue import StepQueue
from .typical_steps import TypicalSteps

_MOST_TOGETHER = 8
"""The most rows handed to the output at once."""
_LET_OTHERS_RUN_S = 5e-5
"""Between them. Else the training thread waits for the GIL at each operation of torch, which releases it, for
Python's switch interval of 5 ms."""
_MOST_UNLEARNED = 10_000
_SHORTEST_PAUSE_S = 0.1
"""Between two reports of a rank."""


class Step(NamedTuple):
    """A step that was read: all that this rank knows of it."""

    position: StepPosition
    end_s: float
    training: dict[str, Any]
    """What the caller logged."""
    datasets: dict[str, Any]
    amounts: StepAmounts
    took: StepTime
    skip_remote: bool


class StepReader:
    """Reads steps in their order: time, FLOPs and the values that were on the device."""

    def __init__(
        self,
        *,
        clock: HostClock | CudaClock,
        flops: FlopsSource,
        plan: ObservationPlan,
        rank: ThisRank,
        hardware: HardwareWindows | None,
        audit: AuditStep | None,
        measured_peak_flops_per_s: float | None,
        has_phases: bool,
        notices: Notices,
    ) -> None:
        self._clock, self._flops, self._plan, self._rank = clock, flops, plan, rank
        self._hardware, self._audit, self._notices = hardware, audit, notices
        self._measured_peak_flops_per_s = measured_peak_flops_per_s
        self._times = StepTiming(has_phases=has_phases)
        self._unlearned: deque[StepNote] = deque(maxlen=_MOST_UNLEARNED)
        """Observed steps whose counts are not known yet; rows before them may wait for these."""
        self._last_counted, self._last_executed = LastAmounts(), LastAmounts()
        self.profile_cost_s = 0.0
        self.typical = TypicalSteps()

    def put(self, note: StepNote) -> None:
        """On the training thread: a step was logged."""
        if note.extras.observed is not None:
            self._unlearned.append(note)

    def learn(self) -> None:
        """Take the counts of observed steps in their order, as soon as their values have arrived."""
        with contextlib.suppress(Exception):  # a failing device causes a warning once a step needs it
            self._clock.poll()
        while self._unlearned:
            note = self._unlearned[0]
            assert note.extras.observed is not None
            if not note.extras.observed.observation.ready() or not _have_arrived(note):
                return
            self._unlearned.popleft()
            self._flops.learn(note)

    def is_ready(self, note: StepNote, *, is_awaited: bool) -> bool:
        """Whether a step can be read without waiting; one that `is_awaited` waits for no better figures."""
        if not self._clock.has_passed(note.span.end):
            return False
        if not is_awaited and self._hardware is not None and not self._hardware.can_take(note.extras.cut):
            return False
        if note in self._unlearned:
            self.learn()
        numbers = (note.loss, note.grad_norm, note.learning_rate, note.epoch, note.extras.mask_useful_tokens)
        return (
            all(map(is_there, numbers))
            and _have_arrived(note)
            and (not self._unlearned or self._unlearned[0] is not note)
            and all(copy.ready() for _, copy in note.extras.datasets)
            and (is_awaited or self._flops.is_settled(note))
        )

    def read(self, note: StepNote) -> Step:
        """The next step, which is ready."""
        position = note.position
        counted = self._with_mask(note, self._counted(note))
        took = self._times.of(position.steps, note.span, note.gap, has_compiled_code=bool(compilations()))
        if self._times.last is not None:
            self.typical.add(note, took, self._times.last)
        if self._hardware is not None:
            if self._times.gap_is_excluded:
                self._hardware.interrupted()
            self._hardware.add(note, counted, took)
            if self._hardware.measures_executed:
                self._flops.executed_ratio = self._hardware.executed_ratio
        if self._audit is not None and self._audit.wants(note):
            self._audit.write(self._flops, note)
        self._note_time(note, took)
        datasets: dict[str, Any] = {}
        if note.extras.datasets:
            names = [name for pending, _ in note.extras.datasets for name in pending.names]
            datasets = dataset_metrics(names, torch.cat([copy.get() for _, copy in note.extras.datasets]))
        datasets |= note.extras.metrics
        datasets |= self._flops.generation(note)
        training = {
            "global_step": position.step,
            "training/loss": resolved(note.loss),
            "training/lr": resolved(note.learning_rate),
            "training/epoch": resolved(note.epoch),
            "training/grad_norm": resolved(note.grad_norm),
        }
        amounts = self._with_executed(counted)
        return Step(
            position, note.span.end.host_s, training, datasets, amounts, took, note.extras.skip_remote
        )

    def _counted(self, note: StepNote) -> StepAmounts:
        """The amounts of a step as counted; the last step's object if they are equal."""
        flops, role = self._flops_of(note), self._rank.role
        if isinstance(flops, StepFlops) and flops.method != ESTIMATE:  # they are this rank's own
            role = replace(role, flops_shared_by=1)
        # Some of its batches alone do not represent the step.
        sized = _sized([] if note.batches.missing else note.batches.notes)
        return self._last_counted.same_as(
            StepAmounts(
                samples=_sum([b.samples() for b in sized]),
                tokens=_sum([b.template.tokens for b in sized]),
                useful_tokens=_sum([resolved(b.useful_tokens) for b in sized]),
                flops=flops if isinstance(flops, StepFlops) else None,
                unknown=flops if isinstance(flops, UnknownFlops) else None,
                apart=self._flops.without_gradients(note),
                warmup=note.warmup,
                observed=note.extras.observed is not None,
                role=role,
                in_job=self._rank.job is not None,
                measured_peak_flops_per_s=self._measured_peak_flops_per_s,
            )
        )

    def _flops_of(self, note: StepNote) -> StepFlops | UnknownFlops:
        try:
            flops = self._notices.with_warnings_collected(lambda: self._flops.of(note))
        except Exception as error:  # the rest of the row is known
            flops = UnknownFlops(
                reason=f"the step's FLOPs could not be computed: {one_line(error)}", estimate=None
            )
        if note.extras.profile is not None:
            self.profile_cost_s += note.extras.profile.cost_s
            self._flops.learn_executed(note.extras.profile, flops)
        return flops

    def _with_mask(self, note: StepNote, counted: StepAmounts) -> StepAmounts:
        """With the tokens of the mask that `log_step` got, where the batches tell of none."""
        mask_tokens = note.extras.mask_tokens
        if mask_tokens is None or counted.useful_tokens is not None:
            return counted
        if counted.tokens in (None, mask_tokens):
            useful_tokens = resolved(note.extras.mask_useful_tokens)
            return replace(counted, tokens=mask_tokens, useful_tokens=useful_tokens)
        self._notices(
            f"attention_mask is not used where it does not fit, first at step {note.step}: it "
            f"has {mask_tokens:,} positions and the step's micro-batches {counted.tokens:,} tokens",
            about="attention_mask",
        )
        return counted

    def _with_executed(self, counted: StepAmounts) -> StepAmounts:
        executed = None if counted.flops is None else self._flops.with_executed(counted.flops)
        if executed is counted.flops:
            return counted
        return self._last_executed.same_as(replace(counted, flops=executed))

    def _note_time(self, note: StepNote, took: StepTime) -> None:
        """The plan of observations gets the time of a plain step, or what an observed one took more."""
        if took.elapsed_s is None:
            return
        step_s = took.elapsed_s / took.steps
        if note.extras.observed is not None:
            extra_s = max(0.0, step_s - self._plan.pace.step_s)
            self._plan.observed(note.number, extra_s, note.span.end.host_s)
        elif not note.warmup:
            self._plan.shifted(step_s)


class Rows:
    """Makes rows of steps and hands them to the output; lives on the row thread."""

    def __init__(
        self,
        reader: StepReader,
        output: Output,
        *,
        rank: ThisRank,
        hardware: HardwareWindows | None,
        servers: GenerationServers,
        device: torch.device,
        details: StepsOrSeconds,
        notices: Notices,
    ) -> None:
        self.queue = StepQueue()
        self.reader, self._output, self._rank, self._hardware = reader, output, rank, hardware
        self._device, self._details, self._notices = device, details, notices
        self.servers = servers
        self._held: HeldRows[Step] | None = None
        if rank.job is not None:
            self._held = HeldRows(rank, rank.job, notices)
        self._last_in_job = LastAmounts()
        self._window, self.totals = Window(), StepTotals()
        self.failed_steps = 0

    def put(self, note: StepNote) -> None:
        """On the training thread: a step was logged; never waits."""
        self.reader.put(note)
        self.queue.put(note)

    @property
    def due_in_s(self) -> float:
        """Seconds until there is something to do even without a new step."""
        reporter = self._rank.reporter
        return inf if reporter is None else max(_SHORTEST_PAUSE_S, reporter.due_in_s)

    def release_in(self, seconds: float | None) -> None:
        """Wait so long for what other ranks report of the steps so far."""
        if self._held is not None:
            self._held.release_in(seconds)

    def process(self, *, is_awaited: bool) -> None:
        """Make rows of all steps that are ready."""
        self.reader.learn()
        while self._process_some(is_awaited=is_awaited) == _MOST_TOGETHER:
            time.sleep(_LET_OTHERS_RUN_S)
        if self._rank.reporter is not None:
            self._rank.reporter.tick(now=is_awaited)

    def _process_some(self, *, is_awaited: bool) -> int:
        """Process the oldest ready steps, up to `_MOST_TOGETHER`; returns how many."""
        steps: list[Step] = []
        taken = 0
        try:
            while (
                taken < _MOST_TOGETHER
                and (oldest := self.queue.oldest()) is not None
                and self.reader.is_ready(oldest, is_awaited=is_awaited)
            ):
                self.queue.take()
                taken += 1
                try:
                    steps.append(self.reader.read(oldest))
                except BaseException as error:
                    self._not_logged(error)
        finally:
            if taken or self._held:
                released = self._released(steps, is_awaited=is_awaited)
                self._write([row for step in released if (row := self._row_of(step)) is not None])
                self.queue.note_rows(taken, held=0 if self._held is None else len(self._held))
                self._output.wake()
        return taken

    def _released(self, steps: Sequence[Step], *, is_awaited: bool) -> Sequence[Step]:
        """The steps whose rows are due: the new ones, or on rank 0 of a job those all ranks have reported."""
        reporter, held = self._rank.reporter, self._held
        if reporter is None:
            return steps
        for step in steps:
            key = reporter.add(
                *step.position,
                step.took.elapsed_s,
                step.took.data_wait_s,
                paused_s=sum(step.took.left_out_s.values()),
                is_warmup=step.amounts.warmup,
                amounts=step.amounts.shares,
            )
            if held is not None:
                held.put(step, key)
        if held is None:
            return steps
        if is_awaited and held:
            self._rank.store.read_soon()
        return [self._in_job(step, others) for step, others in held.release(is_awaited=is_awaited)]

    def _in_job(self, step: Step, others: Amounts | None) -> Step:
        """The step with the sums over all ranks; its amounts are the last step's object if they are equal."""
        job, shares = None, step.amounts.shares
        if others is not None:
            job = {name: total + shares[name] for name, total in others.items() if name in shares}
        return step._replace(amounts=self._last_in_job.same_as(replace(step.amounts, job=job)))

    def _row_of(self, step: Step) -> tuple[Step, dict[str, Any], bool] | None:
        """The row of a released step, and whether it is a detailed one; None, with a warning, if it fails."""
        try:
            metrics: dict[str, Any] = {**step.training, **performance(step.amounts, step.took)}
            self._check(metrics)
            is_detailed = self._details.is_due(step.position, step.end_s)
            self._window.add_all([metrics])
            if is_detailed:
                metrics |= self._details_now()
            return step, metrics | step.datasets, is_detailed
        except BaseException as error:
            self._not_logged(error)
            return None

    def _check(self, metrics: Mapping[str, Any]) -> None:
        loss = metrics["training/loss"]
        if loss is not None and not isfinite(loss):
            step = metrics["global_step"]
            self._notices(f"the loss is {loss}, first at step {step}", about=f"loss {loss}")
        if metrics.get("perf/mfu", 0.0) > 1 or metrics.get("perf/hfu", 0.0) > 1:
            self._notices(ABOVE_ONE)

    def _details_now(self) -> dict[str, Any]:
        """Metrics over several steps, up to this one."""
        row: dict[str, Any] = self._window.medians()
        if self._hardware is not None and self._hardware.latest is not None:
            row |= self._hardware.latest.metrics()
        row |= self.servers.metrics()
        row["perf/memory_peak_bytes"] = peak_memory_bytes(self._device)
        return row if self._rank.job is None else row | self._rank.job.metrics()

    def _write(self, rows: Sequence[tuple[Step, dict[str, Any], bool]]) -> None:
        """Hand rows to the output, and add them to the totals: those with the same amounts together."""
        queued = self._output.rows_queued
        try:
            self._output.put_all(
                [metrics for _, metrics, _ in rows],
                [step.took.steps for step, _, _ in rows],
                [step.skip_remote for step, _, _ in rows],
                {metrics["global_step"] for _, metrics, is_detailed in rows if is_detailed},
            )
            for _, alike in groupby([step for step, _, _ in rows], key=lambda step: id(step.amounts)):
                same = list(alike)
                self.totals.add(same[0].amounts, [step.took for step in same])
        except BaseException as error:
            if self._output.rows_queued > queued:
                self._notices(f"rows could not be written at once: {one_line(error)}")
            else:
                self._not_logged(error, len(rows))

    def _not_logged(self, error: BaseException, steps: int = 1) -> None:
        self.failed_steps += steps
        self._notices(f"a step could not be processed and is not logged: {one_line(error)}")


def _have_arrived(note: StepNote) -> bool:
    """Whether the values of its batches can be read without waiting."""
    return all(batch.ready() for batch in note.batches.notes)


def _sized(batches: Sequence[BatchNote]) -> Sequence[BatchNote]:
    """The batches that give a step's samples and tokens: the observed ones, else the first module's."""
    slots = [batch.template.slot for batch in batches]
    if None in slots:
        return [batch for batch in batches if batch.template.slot is None]
    known = [slot for slot in slots if slot is not None]
    return [batch for batch, slot in zip(batches, known, strict=True) if is_of_first_module(slot, known)]


def _sum(values: list[Any]) -> Any:
    """The sum over all micro-batches; None if one is unknown, or there are none."""
    return None if not values or any(v is None for v in values) else sum(values)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The peak memory so far: the allocator's on CUDA, the process's on a CPU; None elsewhere."""
    if device.type == "cuda":
        stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["peak"])
    if device.type != "cpu":
        return None
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
