"""Steps like those before them, noted at the least cost and worked out a few seconds later, together.

Between two calls a training step has emptied the processor's caches: each function and object that is touched
then costs a microsecond or more, whatever is done with it, and a launch-bound run feels that. So while
nothing else is due (no check, no cut) and steps are alike, the training thread only appends, and records the
step's event where the clock wants one:

    hook      a micro-batch of the same shapes      ─► one more of them
    log_step  its numbers as they are, tensors kept ─► one more step
    every few seconds, or when anything else comes  ─► `take`: the steps in one piece, for the resolver

What is the same for all of them is then worked out once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .clock import CudaClock, HostClock, Mark, as_mark, seconds_between
from .compilations import graph_counters
from .counting import ModelState
from .host_values import MAX_KEPT, SentNumbers, Unseen
from .metrics import StepTime
from .observe import (
    BatchNote,
    Look,
    UsualBatch,
    autocast_key,
    backward_number,
    functorch_level,
    is_any_autocast,
    is_grad_enabled,
)

_Tensor = torch.Tensor
_now_s = time.perf_counter
PIECE_S = 5.0
"""For how long steps with events are kept; without, until the next event."""
_CLOSED_S = float("-inf")
_LARGEST_WHOLE = 2**53
"""Whole numbers below it are floats too."""


class Columns(NamedTuple):
    """Steps as `log_step` was told of them: of each thing those of all steps."""

    end: tuple[Mark | float, ...]
    """A moment on the host, or a mark where every step has one with an event."""
    step: tuple[int, ...]
    epoch: tuple[float, ...]
    loss: tuple[Any, ...]
    loss_version: tuple[int, ...]
    grad_norm: tuple[Any, ...]
    grad_norm_version: tuple[int, ...]
    learning_rate: tuple[float, ...]
    skip_remote: tuple[bool, ...]
    micro_batches: tuple[int, ...]
    data_wait_s: tuple[float | None, ...]

    def without(self, names: Iterable[str]) -> Columns:
        """The same without these numbers."""
        return self._replace(**dict.fromkeys(names, ()))

    def unseen(self) -> dict[str, Unseen]:
        """Those numbers that are tensors, by name."""
        found = {
            "loss": Unseen(self.loss, self.loss_version),
            "grad_norm": Unseen(self.grad_norm, self.grad_norm_version),
        }
        return {name: numbers for name, numbers in found.items() if type(numbers.tensors[0]) is _Tensor}


class Common(NamedTuple):
    """What steps that are alike share."""

    batch: BatchNote
    state: ModelState | None
    measured: bool


class UsualSteps:
    """Lives on the training thread; closed until the monitor opens it."""

    __slots__ = (
        "_autocast",
        "_compilations",
        "_counters",
        "_last_step",
        "_looks",
        "_mark",
        "_micro_batches",
        "_names",
        "_steps",
        "_types",
        "_until_s",
        "_until_step",
        "common",
        "first_s",
        "is_busy",
        "own_s",
    )

    def __init__(self) -> None:
        self._until_s = _CLOSED_S
        self._micro_batches = self._compilations = self._last_step = self._until_step = 0
        self._steps: list[tuple[Any, ...]] = []
        self._names: tuple[Any, ...] = ()
        self._autocast: tuple[Any, ...] = ()
        self._looks: tuple[Look, ...] = ()
        self._counters: Any = None
        self._mark: Callable[[float], Mark] | None = None
        self._types: tuple[Any, Any] = (float, float)
        self.common: Common | None = None
        self.first_s = self.own_s = 0.0
        """When the step under way had its first micro-batch, and what seeing micro-batches took in all."""
        self.is_busy = False
        """Set around `took`: the handler of a signal must not take steps from under it."""

    def open(
        self,
        until_s: float,
        *,
        batch: UsualBatch,
        common: Common,
        last_step: int,
        until_step: int,
        types: tuple[type, type],
        compilations: int,
        mark: Callable[[float], Mark] | None,
    ) -> None:
        """Take steps of such batches until then and before `until_step`; `types` of loss and gradient norm.

        Where the device cannot do without, `mark` marks the end of each of them.
        """
        self._names, self._looks = tuple(batch.looks), tuple(batch.looks.values())
        self._autocast = batch.autocast
        self._until_s, self.common = until_s, common
        self._micro_batches, self._last_step, self._until_step, self._types = 0, last_step, until_step, types
        self._counters, self._compilations, self._mark = graph_counters(), compilations, mark

    def stop(self) -> int:
        """Take no more: how many micro-batches the step under way has."""
        micro_batches = self._micro_batches
        self._until_s, self._micro_batches = _CLOSED_S, 0
        return micro_batches

    def take(self) -> Columns | None:
        """The steps so far, which are then no longer here; None where there are none."""
        steps = self._steps
        if not steps:
            return None
        self._steps = []
        return Columns(*zip(*steps, strict=True))

    @property
    def is_open(self) -> bool:
        """Whether steps are taken."""
        return self._until_s != _CLOSED_S

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to stop and nothing to take."""
        return not (self.is_open or self._steps or self._micro_batches)

    @property
    def waiting(self) -> int:
        """How many steps are here."""
        return len(self._steps)

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note a micro-batch of training; False where it is none of the usual ones, or needs a look."""
        began_s = _now_s()
        try:
            if (
                began_s >= self._until_s
                or not is_grad_enabled()
                or backward_number() != -1
                or functorch_level() is not None
                or (autocast_key() if is_any_autocast() else ()) != self._autocast
                or tuple(kwargs) != self._names[len(args) :]
            ):
                return False
            for tensor, (shape, dtype, needs_grad) in zip(
                (*args, *kwargs.values()), self._looks, strict=True
            ):
                if type(tensor) is not _Tensor or tensor.shape != shape or tensor.dtype is not dtype:
                    return False
                if needs_grad is not None and tensor.requires_grad is not needs_grad:
                    return False
        except Exception:  # a nested tensor has no shape; whatever it is, a closer look follows
            return False
        if not self._micro_batches:
            self.first_s = began_s
        self._micro_batches += 1
        self.own_s += _now_s() - began_s
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
        last_end_s: float | None,
    ) -> bool:
        """Take a step; False where anything about it wants a look.

        It waited for data as long as it is told, else from the last end until its first micro-batch.
        """
        if now_s >= self._until_s or not self._micro_batches or len(self._steps) >= MAX_KEPT:
            return False
        counters = self._counters or graph_counters()  # torch may load them at any time
        stats = None if counters is None else counters.get("stats")
        if (
            (stats is not None and stats.get("unique_graphs", 0) != self._compilations)
            or type(step) is not int
            or not self._last_step < step < self._until_step
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
        if data_wait_s is None and last_end_s is not None:
            data_wait_s = self.first_s - last_end_s
        self._steps.append(
            (
                now_s if self._mark is None else self._mark(now_s),
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


class UsualPiece:
    """Steps that were taken, with what is common to them; made on the training thread, for the resolver's.

    Those numbers that are tensors are in `sent`, on their way to the host; here they are dropped.
    """

    def __init__(
        self,
        columns: Columns,
        last_step: int,
        begin: Mark | None,
        end: Mark,
        common: Common,
        sent: dict[str, SentNumbers | None],
    ) -> None:
        self.columns, self.common = columns, common
        self._last_step, self._begin, self._end, self._sent = last_step, begin, end, sent
        self._ends: list[Mark] = []
        self._marked = 0

    def is_ready(self, clock: HostClock | CudaClock) -> bool:
        """Whether the device is past all of it, and its numbers are there."""
        if not self._ends:
            self._ends = [*[as_mark(end) for end in self.columns.end[:-1]], self._end]
        while self._marked < len(self._ends):
            if not clock.has_passed(self._ends[self._marked]):
                return False
            self._marked += 1
        return all(sent is None or sent.copy.ready() for sent in self._sent.values())

    def numbers(self) -> dict[str, Sequence[float | None]]:
        """What `log_step` was told, by metric; what could not be sent is missing."""
        columns, sent = self.columns, self._sent
        told: dict[str, Sequence[float | None]] = {
            "training/loss": columns.loss,
            "training/lr": columns.learning_rate,
            "training/epoch": [float(epoch) for epoch in columns.epoch],
            "training/grad_norm": columns.grad_norm,
        }
        for name, numbers in sent.items():
            told[f"training/{name}"] = numbers.values() if numbers else [None] * len(columns.step)
        return told

    def times(self) -> list[StepTime]:
        """How long each step took."""
        steps, waits_s = self.columns.step, self.columns.data_wait_s
        lasts, begins = (self._last_step, *steps[:-1]), (self._begin, *self._ends[:-1])
        return [
            StepTime(step - last, None if begin is None else seconds_between(begin, end), wait_s)
            for step, last, begin, end, wait_s in zip(steps, lasts, begins, self._ends, waits_s, strict=True)
        ]
