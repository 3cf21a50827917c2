"""One step marked for Nsight Compute, and its count written for `truemfu audit`.

    begin_step ─► mark ─► forward, backward, optimizer ─► end_step: mark ─► hand_over(note)
                                                    row thread: write ─► the file in TRUEMFU_AUDIT

Only a run under `truemfu audit` uses this, so it may do what the monitor otherwise never does: synchronise
with the device at both marks, so that exactly the step's kernels are between them.

It is the first step after warm-up with no compilation just before it, and it is observed, so that its count
is of the very kernels between the marks. If there is nothing to mark or to count, the reason is written to
the file at once, so that `truemfu audit` can stop the training.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import one_line
from ...flops import StepWork
from ...hardware.nsight.command import COUNT_VARIABLE, ProductWork, StepCount
from ...records import write_record
from ..ranks.this_rank import ThisRank
from ..step_flops.known import Unknown
from ..step_flops.source import FlopsSource
from ..step_note import WARMUP_STEPS, StepNote

PATIENCE_S = 120.0
"""How long the end of a run waits for the count of the marked step."""


class Marks(NamedTuple):
    """Bracket the launches to be profiled; `start` returns False if that is not possible now."""

    start: Callable[[], bool]
    stop: Callable[[], None]


class _Phase(Enum):
    WAITING, MARKING, PAUSED, ENDED, DONE = auto(), auto(), auto(), auto(), auto()


class AuditStep:
    """Marks one step on the training thread and writes its count on the row thread; raises nothing."""

    def __init__(self, path: Path, marks: Marks, notice: Callable[[str], None]) -> None:
        self._path, self._marks, self._notice = path, marks, notice
        self._phase = _Phase.WAITING
        self._compilations: int | None = None
        self._marked: StepNote | None = None

    @classmethod
    def from_environment(
        cls,
        ranks: ThisRank,
        device: torch.device,
        notice: Callable[[str], None],
        *,
        marks: Marks | None = None,
    ) -> AuditStep | None:
        """Set only in the first rank of an audited run; if it cannot be audited, the file has the reason."""
        given = os.environ.get(COUNT_VARIABLE)
        if not given or not ranks.is_first or Path(given).exists():
            return None
        audit = cls(Path(given), marks or cuda_marks(device), notice)
        if ranks.world_size > 1:
            audit._give_up(
                f"a job of {ranks.world_size} processes cannot be audited: Nsight Compute runs each kernel "
                "several times, and a collective would wait for ranks that ran it once; audit one process"
            )
        elif marks is None and device.type != "cuda":
            audit._give_up(f"the model is on {device.type}: Nsight Compute only profiles CUDA kernels")
        return audit if audit._phase is _Phase.WAITING else None

    @property
    def patience_s(self) -> float:
        """How much longer than usual the end of a run should wait for the last steps."""
        return PATIENCE_S if self._phase is _Phase.ENDED else 0.0

    def begin_step(self, logged: int, compilations: int) -> bool:
        """A step begins with its first forward pass: mark it if it is the one to audit; whether it is."""
        settled = compilations == self._compilations
        self._compilations = compilations
        if self._phase is _Phase.WAITING and logged >= WARMUP_STEPS and settled:
            self._mark(_Phase.WAITING)
        return self._phase is _Phase.MARKING

    def pause(self) -> None:
        """Exclude what runs now from the step."""
        if self._phase is _Phase.MARKING:
            self._unmark(_Phase.PAUSED)

    def resume(self) -> None:
        """Continue the step."""
        if self._phase is _Phase.PAUSED:
            self._mark(_Phase.PAUSED)

    def end_step(self) -> None:
        """The step ends, before the monitor launches anything for it."""
        if self._phase in (_Phase.MARKING, _Phase.PAUSED):
            self._unmark(_Phase.ENDED)

    def hand_over(self, note: StepNote) -> None:
        """The note of the step that has just ended."""
        if self._phase is _Phase.ENDED and self._marked is None:
            self._marked = note

    def wants(self, note: StepNote) -> bool:
        """Whether this is the step to be counted for the audit."""
        return note is self._marked and self._phase is _Phase.ENDED

    def write(self, flops: FlopsSource, note: StepNote) -> None:
        """Count the marked step, by operator and shape too, and write that; on the row thread."""
        try:
            self._put(_count(flops, note))
        except Exception as error:
            self._give_up(f"the marked step could not be counted: {one_line(error)}")

    def close(self, logged: int) -> None:
        """The run is over: without a count, write the reason."""
        if self._phase is _Phase.WAITING:
            self._give_up(
                f"the run ended after {logged} steps: a step is marked after {WARMUP_STEPS} logged steps if "
                "nothing was compiled in the step before"
            )
        elif self._phase in (_Phase.MARKING, _Phase.PAUSED):
            self._unmark(_Phase.ENDED)
            self._give_up("the run ended within the marked step")
        elif self._phase is _Phase.ENDED:
            self._give_up("the run ended before the marked step was counted")

    def _mark(self, otherwise: _Phase) -> None:
        try:
            self._phase = _Phase.MARKING if self._marks.start() else otherwise
        except Exception as error:
            self._give_up(f"a step could not be marked: {one_line(error)}")

    def _unmark(self, next_phase: _Phase) -> None:
        was_marking, self._phase = self._phase is _Phase.MARKING, next_phase
        try:
            if was_marking:
                self._marks.stop()
        except Exception as error:
            self._give_up(f"the marked step could not be ended: {one_line(error)}")

    def _give_up(self, reason: str) -> None:
        self._notice(f"nothing to audit: {reason}")
        self._put(StepCount(process_id=os.getpid(), reason=reason))

    def _put(self, count: StepCount) -> None:
        self._phase, self._marked = _Phase.DONE, None
        try:
            write_record(self._path, count)
        except OSError as error:
            self._notice(f"the count for the audit cannot be written: {error}")


def cuda_marks(device: torch.device) -> Marks:
    """cudaProfilerStart and cudaProfilerStop, each after a synchronisation."""

    def start() -> bool:
        if (
            torch.cuda.is_current_stream_capturing()
        ):  # a synchronisation would break the capture; mark another step
            return False
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()
        return True

    def stop() -> None:
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()

    return Marks(start, stop)


def _count(flops: FlopsSource, note: StepNote) -> StepCount:
    """The marked step."""
    who: dict[str, Any] = {"process_id": os.getpid(), "step": note.position.step}
    count = flops.count(note)
    if isinstance(count, Unknown):
        return StepCount(**who, reason=f"the marked step has no count: {count.reason}")
    work = flops.known.work(note)
    return StepCount(
        **who,
        attention=count.convention.attention,
        method=count.method,
        model_flops=count.model_flops,
        hardware_flops=count.hardware_flops,
        model_flops_by_operator=dict(count.by_operator),
        uncounted=dict(count.uncounted),
        products=() if work is None else _products(work),
        attention_flops=None if work is None else work.attention,
        attention_blocked_flops=None if work is None else work.attention_blocked,
        few_channel_flops=None if work is None else work.few_channels,
        grouped_flops=None if work is None else work.grouped,
        grouped_padded_flops=None if work is None else work.grouped_padded,
    )


def _products(work: StepWork) -> tuple[ProductWork, ...]:
    flops: Counter[tuple[int, int, int]] = Counter()
    for (_, shape), done in work.products.items():
        flops[shape] += done
    return tuple(ProductWork(m=m, n=n, k=k, flops=done) for (m, n, k), done in flops.items())
