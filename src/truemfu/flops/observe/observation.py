"""What was seen of one training step, and its FLOPs once the values they depend on have arrived."""

from __future__ import annotations

from collections.abc import Sequence

from ..count.data_flow import APART
from ..count.step_work import StepWork, work_of
from ..flop_count import FlopCount
from .observed_tally import UNSEEN, Documents, ObservedTally

OBSERVED = "count of observed steps"


class Observation:
    """One observed step.

    `problem` is the reason why its FLOPs are unknown, or None; `unseen_forward` whether its backward pass
    went through nodes whose forward pass was not seen.
    """

    def __init__(self, tally: ObservedTally, first_batch_at: int | None) -> None:
        self._tally, self._first_batch_at = tally, first_batch_at
        self.operators = tally.operators

    @property
    def unseen_forward(self) -> bool:
        return self.problem == UNSEEN

    @property
    def problem(self) -> str | None:
        return self._tally.problem

    def ready(self) -> bool:
        """Whether the device values that formulas need have arrived on the host; never waits."""
        return self._tally.copies.ready()

    def count(self, documents: Sequence[Documents | None] = ()) -> FlopCount:
        """FLOPs of the step, without those of `without_gradients`; on any thread, once it is ready.

        `documents` are those of each micro-batch that began, where its rows are packed.
        """
        self._tally.resolve(documents)
        return self._tally.result(method=OBSERVED)

    def without_gradients(self) -> int:
        """FLOPs of work that trains nothing: a reference model, an evaluation, the optimizer."""
        self._tally.resolve()
        return sum(entry.executed for entry in self._tally.entries if entry.phase == APART)

    @property
    def before_first_batch(self) -> int:
        """Model FLOPs seen before the first micro-batch began; 0 if none began."""
        self._tally.resolve()
        first = self._first_batch_at or 0
        entries = self._tally.entries[:first]
        entries += [entry for run in self._tally.runs if run.position < first for entry in run.entries]
        return sum(entry.needed for entry in entries if entry.phase in ("forward", "backward"))

    def work(self) -> StepWork:
        """What the step executed, by shape, without the work of `without_gradients`."""
        self._tally.resolve()
        return work_of(self._tally)
