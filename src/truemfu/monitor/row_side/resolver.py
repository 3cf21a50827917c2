"""The monitor's thread: turns noted steps into rows in order, once the device has passed them.

    training thread ── StepNote ──► pending ──► resolver: time, FLOPs, values ──► a row ──► trackers' lanes

It wakes every few seconds and processes all new steps, so that it rarely takes the GIL. A step that ends a
window of the hardware counters waits until they were read past it, unless `finish_pending` waits for its row;
a step of an unknown kind waits a few seconds for one like it to be observed. The training thread only
appends to a bounded queue; if the resolver falls behind, the oldest steps are dropped and counted as lost.

In a job of several ranks each resolver also reports what its rank did (`reporter`), and rank 0 holds a row
back until all ranks have reported its step (`held_rows.py`).

The training thread sends the device values of a few seconds together. If its next step does not come in time,
they are sent from here (`send_held`), so that their steps are on disk within ten seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import isfinite
from typing import Any, NamedTuple

import torch

from ...errors import one_line
from ...hardware.tiles import Shape
from ...trackers.wake import Wake
from ...utilization import ABOVE_ONE
from ..hybrid.hardware_figures import StepDetail
from ..hybrid.hardware_windows import HardwareWindows
from ..metrics import NOTHING, StepAmounts, StepTime, Window, performance
from ..notices import Notices
from ..ranks.amounts import Exact
from ..ranks.job_sums import JobStep
from ..ranks.this_rank import ThisRank
from ..step_flops.plan import ObservationPlan
from ..step_flops.source import ESTIMATE, FlopsSource, StepFlops, UnknownFlops
from ..totals import Totals
from ..training_side.batch_notes import BatchNote
from ..training_side.clock import CudaClock, HostClock, allow_queries_during_capture
from ..training_side.datasets import dataset_metrics
from ..training_side.hardware_watch import Cut
from ..training_side.host_values import is_there, resolved
from ..training_side.step_note import StepNote, StepPosition
from ..training_side.watched import is_of_first_module
from . import held_rows
from .audit_step import AuditStep
from .frequency import StepsOrSeconds
from .output import Output
from .step_detail import StepDetails
from .step_times import StepTimes

_MAX_PENDING = 10_000
_WAKE_EVERY_S = 3.0
_SHORTEST_PAUSE_S = 0.1
_MOST_TOGETHER = 32
"""The most rows handed to the output at once."""
_ARRIVES_S = 0.2
"""Values sent from the device have arrived after this time."""
_FAILING_S = 1.0
_POLL_S = 0.005
_TAKE_DOWN_S = 0.1


class _Step(NamedTuple):
    """A processed step, without what depends on other ranks."""

    position: StepPosition
    end_s: float
    training: dict[str, Any]
    """What the caller logged."""
    datasets: dict[str, Any]
    amounts: StepAmounts
    took: StepTime
    skip_remote: bool


class _Row(NamedTuple):
    """A finished row."""

    metrics: dict[str, Any]
    amounts: StepAmounts
    took: StepTime
    skip_remote: bool
    is_detailed: bool


class Resolver:
    """Owns the thread, and hands each finished row to the output."""

    def __init__(
        self,
        *,
        clock: HostClock | CudaClock,
        device: torch.device,
        flops: FlopsSource,
        plan: ObservationPlan,
        ranks: ThisRank,
        output: Output,
        notices: Notices,
        details: StepsOrSeconds,
        measured_peak_flops_per_s: float | None,
        audited_tiles: Mapping[Shape, float],
        hardware: HardwareWindows | None,
        audit: AuditStep | None,
        send_held: Callable[[], bool],
    ) -> None:
        self._send_held = send_held
        self._clock, self._device = clock, device
        self._times = StepTimes()
        self._flops, self._plan, self._ranks = flops, plan, ranks
        self._unlearned: deque[StepNote] = deque(maxlen=_MAX_PENDING)
        """Observed steps whose counts are not known yet; rows before them may wait for these."""
        self._output = output
        self._notices = notices
        self._details_are_due = details.is_due
        self._measured_peak_flops_per_s = measured_peak_flops_per_s
        self.hardware = hardware
        self._audit = audit
        self._details = StepDetails(flops, device, audited_tiles)
        self._pending: deque[StepNote] = deque()
        self._oldest: StepNote | None = None
        self._wake = Wake()
        self._stopping = False
        self.is_awaited = False
        """Whether `finish_pending` is waiting: rows then wait neither for counters nor for observations."""
        self._taken = self._processed = self._done = 0
        self._failing_since_s: float | None = None
        self.window, self.totals = Window(), Totals()
        self._last_amounts = self._last_executed = self._last_in_job = NOTHING
        self._reporter, self._job = ranks.reporter, ranks.job
        self._last_sums: tuple[JobStep, dict[str, Exact], JobStep] | None = None
        self._held: held_rows.HeldRows[_Step] | None = None
        if ranks.job is not None:
            self._held = held_rows.HeldRows(ranks, ranks.job, notices)
        self.lost_steps = 0
        """Dropped because the queue was full."""
        self.failed_steps = 0
        self.own_time_s = 0.0
        self.profile_cost_s = 0.0
        self._thread = threading.Thread(target=self._run, name="truemfu-resolver", daemon=True)
        self._thread.start()

    def put(self, note: StepNote) -> None:
        """Enqueue a step; never waits."""
        self._taken += 1
        if note.extras.observed is not None:
            self._unlearned.append(note)
        self._pending.append(note)
        if self._taken - self._done - self.lost_steps > _MAX_PENDING:
            try:
                self._pending.popleft()
            except IndexError:  # the resolver took it at this very moment
                return
            self.lost_steps += 1

    def wake(self) -> None:
        """Process new steps now instead of in a few seconds."""
        self._wake.set()

    def finish_pending(self, timeout_s: float, *, hold_s: float | None = None) -> bool:
        """Wait until every step so far is a row; False if that takes longer than `timeout_s`.

        Rows wait for other ranks for `hold_s`, and then go without the figures of the job. Without `hold_s`
        other ranks have a second; rows may follow later.
        """
        if self._held is not None:
            self._held.release_in(hold_s)
        wanted = self._taken
        deadline = time.perf_counter() + timeout_s
        processed_s: float | None = None
        try:
            while self._done + self.lost_steps < wanted:
                self.is_awaited = True
                self._wake.set()
                now_s = time.perf_counter()
                if now_s > deadline or not self._thread.is_alive() or self._fails_for_good(now_s):
                    return False
                if processed_s is None and self._processed + self.lost_steps >= wanted:
                    processed_s = now_s
                if hold_s is None and processed_s is not None and now_s > processed_s + held_rows.SAVE_HOLD_S:
                    return True
                time.sleep(_POLL_S)
            return True
        finally:
            self.is_awaited = False

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        ends_s = time.perf_counter() + timeout_s
        while self._thread.is_alive() and (left_s := ends_s - time.perf_counter()) > 0:
            # A second Ctrl-C: ending Python now would abort the process from inside torch.
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join(left_s)
        # After the join torch still destroys its thread state, which needs the interpreter.
        time.sleep(_TAKE_DOWN_S)

    def _fails_for_good(self, now_s: float) -> bool:
        since_s = self._failing_since_s
        return since_s is not None and now_s - since_s > _FAILING_S

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._notices(f"the monitor's thread could not be set up: {one_line(error)}")
        is_sent = False
        while not self._stopping:
            began = time.thread_time()
            try:
                self._wake.wait(_ARRIVES_S if is_sent else self._pause_s)
                is_sent = self._send_held()
                self._drain()
                self._failing_since_s = None
            except BaseException as error:  # the device fails, or the model's code raises SystemExit
                self._failing_since_s = self._failing_since_s or time.perf_counter()
                self._notices(f"steps cannot be processed: {one_line(error)}")
            self.own_time_s += time.thread_time() - began

    def _prepare(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else this thread would open a context on device 0
            allow_queries_during_capture()

    @property
    def stranded_steps(self) -> int:
        """Steps that will never become rows, since the thread has ended."""
        return 0 if self._thread.is_alive() else self._taken - self._done - self.lost_steps

    @property
    def _pause_s(self) -> float:
        if self._reporter is None:
            return _WAKE_EVERY_S
        return min(_WAKE_EVERY_S, max(_SHORTEST_PAUSE_S, self._reporter.due_in_s))

    def _drain(self) -> None:
        with contextlib.suppress(Exception):  # a failing device causes a warning once a step needs it
            self._clock.poll()
        self._learn()
        while self._process_ready() == _MOST_TOGETHER:
            pass
        if self._reporter is not None:
            self._reporter.tick(now=self.is_awaited)

    def _learn(self) -> None:
        """Take the counts of observed steps in their order, as soon as their values have arrived."""
        while self._unlearned:
            note = self._unlearned[0]
            assert note.extras.observed is not None
            if not note.extras.observed.observation.ready() or not _have_arrived(note):
                return
            self._unlearned.popleft()
            self._flops.learn(note)

    def _process_ready(self) -> int:
        """Process the oldest ready steps, up to `_MOST_TOGETHER`; returns how many."""
        steps: list[_Step] = []
        taken = 0
        try:
            while (
                taken < _MOST_TOGETHER
                and (oldest := self._oldest_pending()) is not None
                and self._is_ready(oldest)
            ):
                self._oldest = None
                taken += 1
                try:
                    steps.append(self._step(oldest))
                except BaseException as error:
                    self._not_logged(error)
        finally:
            if taken or self._held:
                self._processed += taken
                self._put([row for step in self._released(steps) if (row := self._row_of(step)) is not None])
                self._done = self._processed - (0 if self._held is None else len(self._held))
                self._output.wake()
        return taken

    def _released(self, steps: Sequence[_Step]) -> Sequence[_Step]:
        """The steps whose rows are due: the new ones, or on rank 0 of a job those all ranks have reported."""
        if self._reporter is None:
            return steps
        for step in steps:
            took = step.took
            key = self._reporter.add(
                *step.position,
                took.elapsed_s,
                took.data_wait_s,
                paused_s=sum(took.left_out_s.values()),
                is_warmup=step.amounts.warmup,
                amounts=step.amounts.shares,
            )
            if self._held is not None:
                self._held.put(step, key)
        if self._held is None:
            return steps
        if self.is_awaited and self._held:
            self._ranks.store.read_soon()
        return [
            step._replace(amounts=self._in_job(step.amounts, others))
            for step, others in self._held.release(is_awaited=self.is_awaited)
        ]

    def _row_of(self, step: _Step) -> _Row | None:
        """The row of a released step; None, with a warning, if it cannot be computed."""
        try:
            return self._row(step)
        except BaseException as error:
            self._not_logged(error)
            return None

    def _in_job(self, amounts: StepAmounts, others: JobStep | None) -> StepAmounts:
        """The amounts with the sums over all ranks; the last step's object if it is the same."""
        job = None
        if others is not None:
            last, shares = self._last_sums, amounts.shares
            if last is None or last[0] is not others or last[1] is not shares:
                sums = {name: total + shares[name] for name, total in others.sums.items() if name in shares}
                self._last_sums = last = others, shares, JobStep(sums)
            job = last[2]
        found = replace(amounts, job=job)
        if found != self._last_in_job:
            self._last_in_job = found
        return self._last_in_job

    def _put(self, rows: Sequence[_Row]) -> None:
        """Hand rows to the output, and add them to the totals: those with the same amounts together."""
        queued = self._output.rows_queued
        try:
            self._output.put_all(
                [row.metrics for row in rows],
                [row.took.steps for row in rows],
                [row.skip_remote for row in rows],
                {row.metrics["global_step"] for row in rows if row.is_detailed},
            )
            for _, alike in groupby(rows, key=lambda row: id(row.amounts)):
                same = list(alike)
                self.totals.add(same[0].amounts, [row.took for row in same])
        except BaseException as error:
            if self._output.rows_queued > queued:
                self._notices(f"rows could not be written at once: {one_line(error)}")
            else:
                self._not_logged(error, len(rows))

    def _oldest_pending(self) -> StepNote | None:
        """The next step to process."""
        if self._oldest is None:
            with contextlib.suppress(IndexError):
                self._oldest = self._pending.popleft()
        return self._oldest

    def _not_logged(self, error: BaseException, steps: int = 1) -> None:
        self.failed_steps += steps
        self._notices(f"a step could not be processed and is not logged: {one_line(error)}")

    def _is_ready(self, note: StepNote) -> bool:
        if not self._clock.has_passed(note.span.end):
            return False
        if not self._window_is_read(note):
            return False
        if note in self._unlearned:
            self._learn()
        numbers = (note.loss, note.grad_norm, note.learning_rate, note.epoch, note.extras.mask_useful_tokens)
        return (
            all(map(is_there, numbers))
            and _have_arrived(note)
            and (not self._unlearned or self._unlearned[0] is not note)
            and all(copy.ready() for _, copy in note.extras.datasets)
            and (self.is_awaited or self._flops.is_settled(note))
        )

    def _window_is_read(self, note: StepNote) -> bool:
        """Whether the counters were read past the window that ends with this step, or need not be."""
        if note.extras.cut is None or self.hardware is None or self.hardware.is_left_out or self.is_awaited:
            return True
        try:
            return self.hardware.can_take(note.extras.cut)
        except Exception as error:
            self._leave_windows_out(self.hardware, error)
            return True

    def _step(self, note: StepNote) -> _Step:
        """A step with all that this rank knows of it; called in the order of steps."""
        position, batches = note.position, note.batches
        notes = [] if batches.missing else batches.notes  # some alone do not represent the step
        counted = self._amounts(note, notes, self._counted(note))
        mask_tokens = note.extras.mask_tokens
        if mask_tokens is not None and counted.useful_tokens is None:
            if counted.tokens in (None, mask_tokens):
                mask_useful_tokens = resolved(note.extras.mask_useful_tokens)
                counted = replace(counted, tokens=mask_tokens, useful_tokens=mask_useful_tokens)
            else:
                self._notices(
                    f"attention_mask is not used where it does not fit, first at step {position.step}: it "
                    f"has {mask_tokens:,} positions and the step's micro-batches {counted.tokens:,} tokens",
                    about="attention_mask",
                )
        took = self._times.of(position.steps, note.span, note.gap)
        if self.hardware is not None:
            if self._times.gap_is_excluded:
                self.hardware.interrupted()
            detail = partial(self._details.of, note)
            self._add_to_window(self.hardware, counted, took, note.extras.cut, detail)
        amounts = self._with_executed(counted)
        if self._audit is not None and self._audit.wants(note):
            self._audit.write(self._flops, note)
        if took.elapsed_s is not None:
            step_s = took.elapsed_s / position.steps
            if note.extras.observed is not None:
                extra_s = max(0.0, step_s - self._plan.plain_step_s)
                self._plan.observed(note.number, extra_s, note.span.end.host_s)
            elif not note.warmup:
                self._plan.shifted(step_s)
        datasets: dict[str, Any] = {}
        if note.extras.datasets:
            names = [name for pending, _ in note.extras.datasets for name in pending.names]
            datasets = dataset_metrics(names, torch.cat([copy.get() for _, copy in note.extras.datasets]))
        training = {
            "global_step": position.step,
            "training/loss": resolved(note.loss),
            "training/lr": resolved(note.learning_rate),
            "training/epoch": resolved(note.epoch),
            "training/grad_norm": resolved(note.grad_norm),
        }
        return _Step(position, note.span.end.host_s, training, datasets, amounts, took, note.skip_remote)

    def _row(self, step: _Step) -> _Row:
        """The row of a step; called in the order of steps."""
        metrics: dict[str, Any] = {**step.training, **performance(step.amounts, step.took)}
        self._check(metrics)
        is_detailed = self._details_are_due(step.position, step.end_s)
        self.window.add_all([metrics])
        if is_detailed:
            metrics |= self._details_now()
        metrics |= step.datasets
        return _Row(metrics, step.amounts, step.took, step.skip_remote, is_detailed)

    def _check(self, metrics: Mapping[str, Any]) -> None:
        loss = metrics["training/loss"]
        if loss is not None and not isfinite(loss):
            step = metrics["global_step"]
            self._notices(f"the loss is {loss}, first at step {step}", about=f"loss {loss}")
        if metrics.get("perf/mfu", 0.0) > 1 or metrics.get("perf/hfu", 0.0) > 1:
            self._notices(ABOVE_ONE)

    def _details_now(self) -> dict[str, Any]:
        """Metrics over several steps, up to this one."""
        row: dict[str, Any] = self.window.medians()
        if self.hardware is not None and self.hardware.latest is not None:
            row |= self.hardware.latest.metrics()
        row["perf/memory_peak_bytes"] = peak_memory_bytes(self._device)
        return row if self._job is None else row | self._job.metrics()

    def _amounts(
        self, note: StepNote, batches: Sequence[BatchNote], flops: StepFlops | UnknownFlops
    ) -> StepAmounts:
        """The amounts of a step; the last step's object if they are equal."""
        sized, role = _sized(batches), self._ranks.role
        if isinstance(flops, StepFlops) and flops.method != ESTIMATE:  # they are this rank's own
            role = replace(role, flops_shared_by=1)
        amounts = StepAmounts(
            samples=_sum([b.samples() for b in sized]),
            tokens=_sum([b.template.tokens for b in sized]),
            useful_tokens=_sum([resolved(b.useful_tokens) for b in sized]),
            flops=flops if isinstance(flops, StepFlops) else None,
            unknown=flops if isinstance(flops, UnknownFlops) else None,
            warmup=note.warmup,
            observed=note.extras.observed is not None,
            role=role,
            in_job=self._job is not None,
            measured_peak_flops_per_s=self._measured_peak_flops_per_s,
        )
        if amounts != self._last_amounts:
            self._last_amounts = amounts
        return self._last_amounts

    def _with_executed(self, counted: StepAmounts) -> StepAmounts:
        executed = None if counted.flops is None else self._flops.with_executed(counted.flops)
        if executed is counted.flops:
            return counted
        amounts = replace(counted, flops=executed)
        if amounts != self._last_executed:
            self._last_executed = amounts
        return self._last_executed

    def _add_to_window(
        self,
        hardware: HardwareWindows,
        counted: StepAmounts,
        took: StepTime,
        cut: Cut | None,
        detail: Callable[[], StepDetail],
    ) -> None:
        if hardware.is_left_out:
            return
        try:
            hardware.add(counted, took, cut, detail)
        except Exception as error:
            self._leave_windows_out(hardware, error)
            return
        if hardware.measures_executed:
            self._flops.executed_ratio = hardware.executed_ratio

    @property
    def notes(self) -> list[str]:
        """The assumptions behind the figures."""
        return [*self._flops.known.notes, *self._details.notes]

    def _leave_windows_out(self, hardware: HardwareWindows, error: Exception) -> None:
        hardware.leave_out()
        if hardware.measures_executed:
            self._flops.executed_ratio = None
        self._notices(f"the hardware counters are ignored from now on: {one_line(error)}")

    def _counted(self, note: StepNote) -> StepFlops | UnknownFlops:
        try:
            flops = self._notices.with_warnings_collected(lambda: self._flops.of(note))
        except Exception as error:  # the rest of the row is known
            flops = UnknownFlops(reason=f"its FLOPs could not be computed: {one_line(error)}", estimate=None)
        if note.extras.profile is not None:
            self.profile_cost_s += note.extras.profile.cost_s
            self._flops.learn_executed(note.extras.profile, flops)
        return flops


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
