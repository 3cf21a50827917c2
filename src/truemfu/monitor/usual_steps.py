"""Steps like those before them, noted at the least cost and worked out a few seconds later, together.

Between two calls a training step has emptied the processor's caches: each function and object that is touched
then costs a microsecond or more, whatever is done with it, and a launch-bound run feels that. So while
nothing is due (no event, no check, no cut) and steps are alike, the training thread only appends:

    hook      a micro-batch of the same shapes      ─► one more of them
    log_step  its numbers as they are, tensors kept ─► one more step
    every few seconds, or when anything else comes  ─► `take`: the steps in one piece, for the resolver

What `log_step` does with a step otherwise, `UsualPiece.notes` does with all of them on the resolver's thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .clock import Mark, Span
from .compilations import graph_counters
from .counting import ModelState
from .host_values import SentNumbers, Unseen
from .observe import (
    Batch,
    BatchNote,
    UsualBatch,
    autocast_key,
    backward_number,
    functorch_level,
    is_any_autocast,
    is_like,
)
from .step_note import StepNote

_Tensor = torch.Tensor
_CLOSED_S = float("-inf")
_LARGEST_WHOLE = 2**53
"""Whole numbers below it are floats too."""


class UsualStep(NamedTuple):
    """A step as `log_step` was told of it."""

    now_s: float
    step: int
    epoch: float
    loss: Any
    loss_version: int
    grad_norm: Any
    grad_norm_version: int
    learning_rate: float
    skip_remote: bool
    micro_batches: int
    data_wait_s: float | None


Raw = tuple[Any, ...]
"""The fields of a `UsualStep`: a tuple is enough until someone looks at it."""
_MAY_BE_TENSORS = {name: UsualStep._fields.index(name) for name in ("loss", "grad_norm")}
"""Where they are; a tensor's version is in the next place."""


def unseen_numbers(steps: list[Raw]) -> dict[str, Unseen]:
    """Those numbers of some steps that are tensors, by name."""
    return {
        name: Unseen([step[place] for step in steps], [step[place + 1] for step in steps])
        for name, place in _MAY_BE_TENSORS.items()
        if type(steps[0][place]) is _Tensor
    }


class Common(NamedTuple):
    """What steps that are alike share."""

    batch: BatchNote
    state: ModelState | None
    measured: bool


class UsualSteps:
    """Lives on the training thread; closed until the monitor opens it."""

    __slots__ = (
        "_batch",
        "_compilations",
        "_counters",
        "_last_step",
        "_micro_batches",
        "_room",
        "_steps",
        "_types",
        "_until_s",
        "common",
        "is_busy",
    )

    def __init__(self) -> None:
        self._until_s = _CLOSED_S
        self._micro_batches = self._room = self._compilations = self._last_step = 0
        self._steps: list[Raw] = []
        self._batch: UsualBatch | None = None
        self._counters: Any = None
        self._types: tuple[Any, Any] = (float, float)
        self.common: Common | None = None
        self.is_busy = False
        """Set around `saw` and `took`: the handler of a signal must not take steps from under them."""

    def open(
        self,
        until_s: float,
        room: int,
        *,
        batch: UsualBatch,
        common: Common,
        last_step: int,
        types: tuple[type, type],
        compilations: int,
    ) -> None:
        """Take steps of such batches until then, so many at most; `types` of loss and gradient norm."""
        self._until_s, self._room, self._batch, self.common = until_s, room, batch, common
        self._micro_batches, self._last_step, self._types = 0, last_step, types
        self._counters, self._compilations = graph_counters(), compilations

    def stop(self) -> int:
        """Take no more: how many micro-batches the step under way has."""
        micro_batches = self._micro_batches
        self._until_s, self._micro_batches = _CLOSED_S, 0
        return micro_batches

    def take(self) -> list[Raw]:
        """The steps so far, which are then no longer here."""
        steps = self._steps
        if steps:
            self._steps = []
        return steps

    @property
    def is_open(self) -> bool:
        """Whether steps are taken."""
        return self._until_s != _CLOSED_S

    @property
    def waiting(self) -> int:
        """How many steps are here."""
        return len(self._steps)

    def saw(self, batch: Batch | None, now_s: float) -> bool:
        """Note a micro-batch; False where it is none of the usual ones, or it is time to look again."""
        if now_s >= self._until_s or batch is None:
            return False
        usual = self._batch
        if (
            usual is None
            or functorch_level() is not None
            or backward_number() != -1
            or (autocast_key() if is_any_autocast() else ()) != usual.autocast
            or not is_like(batch, usual.shapes)
        ):
            return False
        self._micro_batches += 1
        return True

    def took(
        self,
        now_s: float,
        step: Any,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        skip_remote: bool,
        data_wait_s: float | None,
    ) -> bool:
        """Take a step; False where anything about it wants a look."""
        if now_s >= self._until_s or not self._micro_batches or len(self._steps) >= self._room:
            return False
        counters = self._counters or graph_counters()  # torch may load them at any time
        stats = None if counters is None else counters.get("stats")
        if (
            (stats is not None and stats.get("unique_graphs", 0) != self._compilations)
            or type(step) is not int
            or step <= self._last_step
            or not (type(epoch) is float or (type(epoch) is int and 0 <= epoch < _LARGEST_WHOLE))
            or type(learning_rate) is not float
        ):
            return False
        loss_version = grad_norm_version = 0
        loss_type, grad_norm_type = self._types
        if type(loss) is not loss_type:
            return False
        if type(grad_norm) is not grad_norm_type and (grad_norm is not None or grad_norm_type is _Tensor):
            return False
        try:
            if loss_type is _Tensor:
                loss_version = loss._version
                loss = loss.detach()
            if grad_norm_type is _Tensor:
                grad_norm_version = grad_norm._version
                grad_norm = grad_norm.detach()
        except RuntimeError:  # an inference tensor has no version
            return False
        micro_batches = self._micro_batches
        self._micro_batches, self._last_step = 0, step
        self._steps.append(
            (
                now_s,
                step,
                epoch,
                loss,
                loss_version,
                grad_norm,
                grad_norm_version,
                learning_rate,
                skip_remote,
                micro_batches,
                data_wait_s,
            )
        )
        return True


class UsualPiece(NamedTuple):
    """Steps that were taken, with what is common to them; `sent` has those numbers that are tensors."""

    steps: list[Raw]
    last_step: int
    begin: Mark | None
    end: Mark
    common: Common
    sent: dict[str, SentNumbers | None]

    def notes(self) -> list[StepNote]:
        """The steps as any others are handed over."""
        begin, last_step = self.begin, self.last_step
        notes = []
        found = {name: [None] * len(self.steps) if s is None else s.look() for name, s in self.sent.items()}
        for place, raw in enumerate(self.steps):
            taken = UsualStep(*raw)
            end = self.end if place == len(self.steps) - 1 else Mark(taken.now_s, None)
            note = StepNote(
                step=taken.step,
                steps=taken.step - last_step,
                epoch=float(taken.epoch),
                loss=found["loss"][place] if "loss" in found else taken.loss,
                grad_norm=found["grad_norm"][place] if "grad_norm" in found else taken.grad_norm,
                learning_rate=taken.learning_rate,
                mask_tokens=None,
                mask_useful_tokens=None,
                batches=[self.common.batch] * taken.micro_batches,
                batches_missing=False,
                state=self.common.state,
                measured=self.common.measured,
                data_wait_s=taken.data_wait_s,
                warmup=False,
                profile=None,
                datasets=(),
                skip_remote=bool(taken.skip_remote),
                span=Span(begin, end, []),
                cut=None,
            )
            notes.append(note)
            begin, last_step = end, taken.step
        return notes
