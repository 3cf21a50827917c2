"""One step marked for Nsight Compute, and its count written for `truemfu audit`.

    begin_step ─► mark ─► forward, backward, optimizer ─► end_step: mark ─► hand_over(note)
                                                    resolver's thread: write ─► the file in TRUEMFU_AUDIT

Only a run under `truemfu audit` uses this, so it may do what the monitor otherwise never does: synchronise
with the device at both marks, so that exactly the step's kernels are between them.

It is the first step after warm-up with no compilation just before it. Its count need not be known yet: it is
made from the step's note at the end of this step or a later one, and `close` waits for it. If there is
nothing to mark or to count, the reason is written to the file at once, so that `truemfu audit` can stop the
training.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ...errors import one_line
from ...flops import StepWork
from ...hardware.nsight.command import COUNT_VARIABLE, ProductWork, StepCount
from ...records import write_record
from ..ranks.rank_link import RankLink
from ..training_side.batch_notes import BatchNote
from ..training_side.model_state import ModelState
from ..training_side.step_note import WARMUP_STEPS, StepNote
from .flops_of_steps import Counting, state_of

Key = TypeVar("Key")

PATIENCE_S = 120.0
"""How long the end of a run waits for the count of the marked step."""


class Marks(NamedTuple):
    """Bracket the launches to be profiled; `start` returns False if that is not possible now."""

    start: Callable[[], bool]
    stop: Callable[[], None]


class _Phase(Enum):
    WAITING, MARKING, PAUSED, ENDED, DONE = auto(), auto(), auto(), auto(), auto()


class AuditStep:
    """Marks one step on the training thread and writes its count on the resolver's; raises nothing."""

    def __init__(self, path: Path, marks: Marks, notice: Callable[[str], None]) -> None:
        self._path, self._marks, self._notice = path, marks, notice
        self._phase = _Phase.WAITING
        self._compilations: int | None = None
        self._marked: StepNote | None = None

    @classmethod
    def from_environment(
        cls,
        ranks: RankLink,
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

    def begin_step(self, logged: int, compilations: int) -> None:
        """A step begins with its first forward pass: mark it if it is the one to audit."""
        settled = compilations == self._compilations
        self._compilations = compilations
        if self._phase is _Phase.WAITING and logged >= WARMUP_STEPS and settled:
            self._mark(_Phase.WAITING)

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

    @property
    def awaits_count(self) -> bool:
        """Whether the step that has just ended is the one to be counted, by shape too."""
        return self._phase is _Phase.ENDED

    def wants(self, note: StepNote) -> bool:
        """Whether this is the step to be counted for the audit."""
        return note is self._marked and self._phase is _Phase.ENDED

    def write(self, counting: Counting, note: StepNote) -> None:
        """Count the marked step, by operator and shape too, and write that; on the resolver's thread."""
        try:
            self._put(_count(counting, note))
        except Exception as error:
            self._give_up(f"the marked step could not be counted: {one_line(error)}")

    def close(self, logged: int) -> None:
        """The run is over: without a count, write the reason."""
        if self._phase is _Phase.WAITING:
            self._give_up(
                f"the run ended after {logged} steps: a step is marked after {WARMUP_STEPS} logged steps if "
                "nothing was compiled in the one before"
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


def _count(counting: Counting, note: StepNote) -> StepCount:
    """The marked step, all its micro-batches together."""
    who: dict[str, Any] = {"process_id": os.getpid(), "step": note.position.step}
    counts = []
    counted = [batch for batch in note.batches.notes if batch.template.slot is not None]
    pairs = [(state, batch) for batch in counted if (state := state_of(note.states, batch)) is not None]
    if len(pairs) == len(counted) and not note.batches.is_missing:
        counts = [counting.batch(state, batch, measured=True) for state, batch in pairs]
    known = [count for count in counts if count is not None]
    if not counts or len(known) < len(counts):
        return StepCount(**who, reason="the marked step has no count: see the monitor's warnings")
    works = _by_shape(counting, pairs)
    return StepCount(
        **who,
        attention=counting.convention.attention,
        method=" and ".join(dict.fromkeys(count.method for count in known)),
        model_flops=sum(count.model_flops for count in known),
        hardware_flops=sum(count.hardware_flops for count in known),
        model_flops_by_operator=_added(count.by_operator for count in known),
        uncounted=_added(count.uncounted for count in known),
        products=() if works is None else _products(works),
        attention_flops=None if works is None else sum(work.attention for work in works),
        attention_blocked_flops=_blocked(works or ()),
        few_channel_flops=None if works is None else sum(work.few_channels for work in works),
        grouped_flops=None if works is None else sum(work.grouped for work in works),
        grouped_padded_flops=None if works is None else sum(work.grouped_padded for work in works),
    )


def _blocked(works: Sequence[StepWork]) -> int | None:
    """What blocked kernels execute of the attention; None if unknown for a micro-batch."""
    known = [work.attention_blocked for work in works if work.attention_blocked is not None]
    return sum(known) if works and len(known) == len(works) else None


def _by_shape(counting: Counting, batches: Sequence[tuple[ModelState, BatchNote]]) -> list[StepWork] | None:
    """Each micro-batch by shape; None if unknown: the audit then expects what was counted."""
    works = [counting.by_shape(state, note) for state, note in batches]
    known = [work for work in works if isinstance(work, StepWork)]
    return known if len(known) == len(works) else None


def _products(works: Sequence[StepWork]) -> tuple[ProductWork, ...]:
    flops = _added({shape: flops} for work in works for (_, shape), flops in work.products.items())
    return tuple(ProductWork(m=m, n=n, k=k, flops=done) for (m, n, k), done in flops.items())


def _added(parts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
