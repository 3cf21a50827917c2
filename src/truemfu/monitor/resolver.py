"""The monitor's own thread: turns noted steps into rows once the device has passed them, in order.

    training thread ── StepNote ──► pending ──► resolver: time, FLOPs, values ──► a row ──► trackers' lanes

It wakes every few seconds and does all that has come since, so that it takes Python's lock rarely. A step
that ends a window of the hardware counters waits until they were read past it, unless somebody waits for its
row; one whose FLOPs are to be counted waits until the training thread has done that. The training thread only
appends to a queue of bounded length; if the resolver is held up, the oldest steps are dropped and counted as
lost.

The training thread holds steps of a few seconds back, to hand them over together. Where its next step does
not come in time, they are fetched from here (`send_held`), so that they are on disk ten seconds after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from ..errors import one_line
from ..hardware.tiles import Shape
from ..trackers.wake import Wake
from ..utilization import ABOVE_ONE
from .audit_step import AuditStep
from .clock import CudaClock, HostClock, duration_s, leave_captures_alone
from .counting import Counting, StepFlops, state_of
from .counts import Counts
from .datasets import dataset_metrics
from .frequency import StepsOrSeconds
from .given_flops import given_flops
from .hardware_figures import StepDetail
from .hardware_watch import Cut
from .hardware_windows import HardwareWindows
from .host_values import is_there, resolved
from .metrics import StepAmounts, StepTime, Window, performance
from .model_state import States
from .notices import Notices
from .observe import BatchNote
from .output import Output
from .ranks import RankLink
from .step_detail import StepDetails
from .step_note import StepNote, StepPlace
from .totals import Totals
from .usual_steps import Common, UsualPiece
from .watched import is_of_first_module

_MAX_PENDING = 10_000
_WAKE_EVERY_S = 3.0
_ARRIVES_S = 0.2
"""After that, what was sent from the device will be here."""
_FAILING_S = 1.0
_POLL_S = 0.005
_TAKE_DOWN_S = 0.1


class Resolver:
    """Owns the thread, and hands each finished row to the output."""

    def __init__(
        self,
        *,
        clock: HostClock | CudaClock,
        device: torch.device,
        counting: Counting,
        counts: Counts,
        ranks: RankLink,
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
        self._counting, self._counts, self._ranks = counting, counts, ranks
        self._counted_after: frozenset[int] = frozenset()
        self._output = output
        self._notices = notices
        self._details_are_due = details.is_due
        self._measured_peak_flops_per_s = measured_peak_flops_per_s
        self.hardware = hardware
        self._audit = audit
        self._details = StepDetails(counting, device, audited_tiles)
        self._pending: deque[StepNote | UsualPiece] = deque()
        self._oldest: StepNote | UsualPiece | None = None
        self._wake = Wake()
        self._stopping = False
        self.is_awaited = False
        """Whether somebody waits for rows: none of them waits for the counters."""
        self._waits_for_counts = True
        self._taken = self._done = 0
        self._failing_since_s: float | None = None
        self.window, self.totals = Window(), Totals()
        self.lost_steps = 0
        """Those that waited for too long."""
        self.failed_steps = 0
        self.own_time_s = 0.0
        self._is_log_read = False
        self.profile_cost_s = 0.0
        self._thread = threading.Thread(target=self._run, name="truemfu-resolver", daemon=True)
        self._thread.start()

    def put(self, note: StepNote | UsualPiece) -> None:
        """Hand a step over, or steps in one piece; never waits."""
        self._taken += _steps_in(note)
        self._pending.append(note)
        if self._taken - self._done - self.lost_steps > _MAX_PENDING:
            try:
                dropped = self._pending.popleft()
            except IndexError:  # the resolver took it at this very moment
                return
            self.lost_steps += _steps_in(dropped)

    def wake(self) -> None:
        """Work off now what has come, instead of in a few seconds."""
        self._wake.set()

    def finish_pending(self, timeout_s: float, meanwhile: Callable[[], object] | None = None) -> bool:
        """Wait until every step handed over so far is a row; False if that took longer than allowed.

        `meanwhile` runs the counts that rows wait for; what it takes is not part of the time allowed. Without
        it they have the estimate.
        """
        wanted = self._taken
        deadline = time.perf_counter() + timeout_s
        try:
            while self._done + self.lost_steps < wanted:
                self.is_awaited, self._waits_for_counts = True, meanwhile is not None
                self._wake.set()
                now_s = time.perf_counter()
                if now_s > deadline or not self._thread.is_alive() or self._fails_for_good(now_s):
                    return False
                if meanwhile is not None:
                    meanwhile()
                    deadline += time.perf_counter() - now_s
                time.sleep(_POLL_S)
            return True
        finally:
            self.is_awaited, self._waits_for_counts = False, True

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        ends_s = time.perf_counter() + timeout_s
        while self._thread.is_alive() and (left_s := ends_s - time.perf_counter()) > 0:
            # An impatient second Ctrl-C: ending Python now would abort the process from inside torch.
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join(left_s)
        # Joined is not gone: torch's state of the thread is taken down after that, and needs Python for it.
        time.sleep(_TAKE_DOWN_S)

    def _fails_for_good(self, now_s: float) -> bool:
        since_s = self._failing_since_s
        return since_s is not None and now_s - since_s > _FAILING_S

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._notices(f"the monitor's thread could not be prepared: {one_line(error)}")
        is_sent = False
        while not self._stopping:
            began = time.thread_time()
            try:
                self._wake.wait(_ARRIVES_S if is_sent else _WAKE_EVERY_S)
                is_sent = self._send_held()
                self._drain()
                self._failing_since_s = None
            except BaseException as error:  # the device does not answer, or a model's code wants to exit
                self._failing_since_s = self._failing_since_s or time.perf_counter()
                self._notices(f"steps cannot be worked out: {one_line(error)}")
            self.own_time_s += time.thread_time() - began

    def _prepare(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else this thread would open a context on device 0
            leave_captures_alone()

    @property
    def stranded_steps(self) -> int:
        """Steps that will not become rows any more: the thread has ended before them."""
        return 0 if self._thread.is_alive() else self._taken - self._done - self.lost_steps

    def _drain(self) -> None:
        done_before = self._done
        self._counts.keep()
        self._is_log_read = False
        with contextlib.suppress(Exception):  # a device that fails is said when a step cannot do without it
            self._clock.look()
        try:
            while (oldest := self._oldest_pending()) is not None and self._is_ready(oldest):
                self._oldest = None
                try:
                    if isinstance(oldest, UsualPiece):
                        self._put_piece(oldest)
                    else:
                        self._put_step(oldest)
                except BaseException as error:
                    self._not_logged(error, _steps_in(oldest))
                self._done += _steps_in(oldest)
        finally:
            if self._done > done_before:
                self._output.wake()

    def _oldest_pending(self) -> StepNote | UsualPiece | None:
        """What is to be worked out next."""
        if self._oldest is None:
            with contextlib.suppress(IndexError):
                self._oldest = self._pending.popleft()
        return self._oldest

    def _not_logged(self, error: BaseException, steps: int) -> None:
        self.failed_steps += steps
        self._notices(f"a step could not be worked out and is not logged: {one_line(error)}")

    def _is_ready(self, note: StepNote | UsualPiece) -> bool:
        if isinstance(note, UsualPiece):
            return note.is_ready(self._clock) and self._is_settled(
                note.common.states, note.known_batches(), measured=note.common.measured
            )
        if not self._clock.has_passed(note.span.end):
            return False
        if not self._window_is_read(note):
            return False
        numbers = (note.loss, note.grad_norm, note.learning_rate, note.epoch, note.mask_useful_tokens)
        return (
            all(map(is_there, numbers))
            and all(batch.ready() for batch in note.batches.notes)
            and all(copy.ready() for _, copy in note.datasets)
            and (
                note.given_flops is not None
                or self._is_settled(note.states, note.batches.notes, measured=note.measured)
            )
        )

    def _is_settled(self, states: States, batches: Sequence[BatchNote], *, measured: bool) -> bool:
        """Whether no count is to come that a row should wait for."""
        is_settled = self._counting.is_settled(states, batches, measured=measured)
        return is_settled or not self._waits_for_counts

    def _waited_for_a_count(self, step: int, steps: int) -> bool:
        """Whether another rank may have counted in this step, or right before it: this one waited then."""
        if self._ranks.world_size == 1:
            return False
        if not self._is_log_read:
            self._counted_after, self._is_log_read = self._ranks.counted_after(), True
        return any(step - steps <= counted <= step for counted in self._counted_after)

    def _window_is_read(self, note: StepNote) -> bool:
        """Whether the counters have told of the window that ends with this step, or need not."""
        if note.cut is None or self.hardware is None or self.hardware.is_left_out or self.is_awaited:
            return True
        try:
            return self.hardware.can_take(note.cut)
        except Exception as error:
            self._leave_windows_out(self.hardware, error)
            return True

    def _put_step(self, note: StepNote) -> None:
        batches = [] if note.batches.is_missing else note.batches.notes  # some are no measure of the step
        is_warmup = note.warmup or self._waited_for_a_count(*note.place)
        counted = self._amounts(batches, self._counted(note, batches), warmup=is_warmup)
        if note.mask_tokens is not None and counted.useful_tokens is None:
            if counted.tokens in (None, note.mask_tokens):
                mask_useful_tokens = resolved(note.mask_useful_tokens)
                counted = replace(counted, tokens=note.mask_tokens, useful_tokens=mask_useful_tokens)
            else:
                self._notices(
                    f"attention_mask is not used where it does not fit, first at step {note.place.step}: it "
                    f"has {note.mask_tokens:,} places and the step's micro-batches {counted.tokens:,} tokens",
                    about="attention_mask",
                )
        took = StepTime(note.place.steps, duration_s(note.span), *note.between)
        self._add_to_window(
            counted,
            took,
            note.cut,
            lambda: self._details.of(note.states, batches, measured=note.measured),
        )
        amounts = self._with_executed(counted, run_again=note.batches.run_again)
        if self._audit is not None and self._audit.wants(note):
            self._audit.write(self._counting, note)
        row: dict[str, Any] = {
            "global_step": note.place.step,
            "training/loss": resolved(note.loss),
            "training/lr": resolved(note.learning_rate),
            "training/epoch": resolved(note.epoch),
            "training/grad_norm": resolved(note.grad_norm),
            **performance(amounts, took),
        }
        failed, detailed = self._complete_all([row], [took], [note.span.end.host_s])
        if failed:
            return
        if note.datasets:
            names = [name for pending, _ in note.datasets for name in pending.names]
            row |= dataset_metrics(names, torch.cat([copy.get() for _, copy in note.datasets]))
        self.totals.add(amounts, [took])
        self._output.put_all([row], [took.steps], [note.skip_remote], detailed)

    def _put_piece(self, piece: UsualPiece) -> None:
        """Steps that are alike: what they worked off is told once for all with the same micro-batches."""
        columns, common = piece.columns, piece.common
        numbers, times = piece.numbers(), piece.times()
        names = ("global_step", *numbers)
        alike: dict[tuple[Any, ...], tuple[StepAmounts, StepAmounts]] = {}
        rows: list[dict[str, Any]] = []
        worked_off: list[tuple[StepAmounts, StepAmounts]] = []
        last: list[BatchNote | None] | None = None
        for told, took, notes in zip(
            zip(columns.step, *numbers.values(), strict=True), times, piece.batches, strict=True
        ):
            if notes is not last:
                last, same = notes, tuple(map(id, notes))
            waited = self._waited_for_a_count(told[0], took.steps)
            if (same, waited) not in alike:
                alike[same, waited] = self._alike(notes, common._replace(warmup=common.warmup or waited))
            amounts = alike[same, waited]
            row = dict(zip(names, told, strict=True))
            row.update(performance(amounts[1], took))
            rows.append(row)
            worked_off.append(amounts)
        if self.hardware is not None:
            for (counted, _), took in zip(worked_off, times, strict=True):
                self._add_to_window(counted, took, None, StepDetail)
        failed, detailed = self._complete_all(rows, times, piece.ends_host_s())
        done = [number for number in range(len(rows)) if number not in failed]
        self._output.put_all(
            [rows[number] for number in done],
            [times[number].steps for number in done],
            [columns.skip_remote[number] for number in done],
            detailed,
        )
        for amounts in alike.values():
            self.totals.add(amounts[1], [times[n] for n in done if worked_off[n] is amounts])

    def _alike(self, notes: list[BatchNote | None], common: Common) -> tuple[StepAmounts, StepAmounts]:
        """What steps of these micro-batches work off, as counted, and with what is known of it executed."""
        batches = [] if None in notes else [note for note in notes if note is not None]
        flops = self._flops(common.states, batches, measured=common.measured)
        counted = self._amounts(batches, flops, warmup=common.warmup)
        return counted, self._with_executed(counted, run_again=False)

    def _complete_all(
        self, rows: list[dict[str, Any]], times: list[StepTime], ends_s: Sequence[float]
    ) -> tuple[set[int], set[int]]:
        """Take the rows of the next steps in, and give them what comes of several steps.

        Which failed, by their place, and which steps have details.
        """
        failed: set[int] = set()
        detailed: set[int] = set()
        begin = 0
        for number, (row, took, end_s) in enumerate(zip(rows, times, ends_s, strict=True)):
            step = row["global_step"]
            loss = row["training/loss"]
            if loss is not None and not isfinite(loss):
                self._notices(f"the loss is {loss}, first at step {step}", about=f"loss {loss}")
            if self._details_are_due(StepPlace(step, took.steps), end_s):
                detailed.add(step)
                self.window.add_all(rows[begin : number + 1])
                begin = number + 1
                try:
                    row |= self._details_now()
                except Exception as error:
                    self._not_logged(error, 1)
                    failed.add(number)
        self.window.add_all(rows[begin:])
        if any(row.get("perf/mfu", 0.0) > 1 or row.get("perf/hfu", 0.0) > 1 for row in rows):
            self._notices(ABOVE_ONE)
        return failed, detailed

    def _details_now(self) -> dict[str, Any]:
        """What comes of several steps, after those that were taken in."""
        row: dict[str, Any] = self.window.medians()
        if self.hardware is not None and self.hardware.latest is not None:
            row |= self.hardware.latest.metrics()
        row["perf/memory_peak_bytes"] = peak_memory_bytes(self._device)
        return row

    def _amounts(self, batches: Sequence[BatchNote], flops: StepFlops | None, *, warmup: bool) -> StepAmounts:
        sized = _sized(batches)
        return StepAmounts(
            samples=_sum([b.samples() for b in sized]),
            tokens=_sum([b.template.tokens for b in sized]),
            useful_tokens=_sum([resolved(b.useful_tokens) for b in sized]),
            flops=flops,
            warmup=warmup,
            world_size=self._ranks.world_size,
            measured_peak_flops_per_s=self._measured_peak_flops_per_s,
        )

    def _with_executed(self, counted: StepAmounts, *, run_again: bool) -> StepAmounts:
        executed = self._counting.with_executed(counted.flops, run_again=run_again)
        if run_again and executed is not None and executed.hardware_flops is None:
            self._notices(
                "HFU is not known: a checkpoint around the whole model runs it again in the backward pass; "
                "hybrid measures that, and profiler where the checkpoint is not reentrant"
            )
        return counted if executed is counted.flops else replace(counted, flops=executed)

    def _add_to_window(
        self, counted: StepAmounts, took: StepTime, cut: Cut | None, detail: Callable[[], StepDetail]
    ) -> None:
        hardware = self.hardware
        if hardware is None or hardware.is_left_out:
            return
        try:
            hardware.add(counted, took, cut, detail)
        except Exception as error:
            self._leave_windows_out(hardware, error)
            return
        if hardware.tells_executed:
            self._counting.executed_ratio = hardware.executed_ratio

    @property
    def notes(self) -> list[str]:
        """What the figures rest on."""
        return [*self._counts.notes, *self._details.notes]

    def _leave_windows_out(self, hardware: HardwareWindows, error: Exception) -> None:
        hardware.leave_out()
        if hardware.tells_executed:
            self._counting.executed_ratio = None
        self._notices(f"the hardware counters are left out from now on: {one_line(error)}")

    def _counted(self, note: StepNote, batches: Sequence[BatchNote]) -> StepFlops | None:
        flops = None if note.given_flops is None else self._given(note, note.given_flops)
        if flops is None:
            flops = self._flops(note.states, batches, measured=note.measured)
        if note.profile is not None:
            self.profile_cost_s += note.profile.cost_s
            self._counting.learn_executed(note.profile, flops)
        return flops

    def _given(self, note: StepNote, flops: float) -> StepFlops | None:
        first = next(iter(note.batches.notes), None)
        try:
            return self._notices.among(
                lambda: given_flops(
                    flops,
                    state=None if first is None else state_of(note.states, first),
                    autocast=None if first is None else first.template.autocast,
                    device=self._device,
                    peak_flops_per_s=self._counting.configured_peak_flops_per_s,
                )
            )
        except Exception as error:
            self._notices(f"flops= is not used: {one_line(error)}", about="flops")
            return None

    def _flops(self, states: States, batches: Sequence[BatchNote], *, measured: bool) -> StepFlops | None:
        if not batches:
            return None
        try:
            return self._notices.among(lambda: self._counting.step(states, batches, measured=measured))
        except Exception as error:  # the rest of the row is known
            self._notices(f"the FLOPs of a step could not be worked out, so it has no MFU: {one_line(error)}")
            return None


def _steps_in(note: StepNote | UsualPiece) -> int:
    return len(note.columns.step) if isinstance(note, UsualPiece) else 1


def _sized(batches: Sequence[BatchNote]) -> Sequence[BatchNote]:
    """Those that tell the samples and tokens of a step: what was observed, else the first module's."""
    slots = [batch.template.slot for batch in batches]
    if None in slots:
        return [batch for batch in batches if batch.template.slot is None]
    known = [slot for slot in slots if slot is not None]
    return [batch for batch, slot in zip(batches, known, strict=True) if is_of_first_module(slot, known)]


def _sum(values: list[Any]) -> Any:
    """The sum of what every micro-batch has; None where one has none, or there is none."""
    return None if not values or any(v is None for v in values) else sum(values)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory in use so far: the allocator's on CUDA, the process's on a CPU; None elsewhere."""
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
