"""Steps like those before them, noted at the least cost and worked out a few seconds later, together.

Between two calls a training step has emptied the processor's caches: each function and object that is touched
then costs a microsecond or more, whatever is done with it, and a launch-bound run feels that. So while
nothing else is due (no check, no cut) and steps are alike, the training thread only appends, and records the
step's event where the clock wants one:

    forward   a micro-batch as it came              ─► kept
    log_step  its numbers as they are, tensors kept ─► one more step; every few steps a look at what is kept
    every few seconds, or when anything else comes  ─► `take`: the steps in one piece, for the resolver

What is the same for all of them is then worked out once. A micro-batch that turns out to look otherwise is
noted as what it was, in its place, and ends this. A batch that is large or part of a graph is looked at when
it comes and not kept. Which dtype autocast has is looked at with the first step of each piece.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..torch_private.dispatch import FakeTensor
from ..torch_private.watching import (
    backward_number,
    functorch_level,
    is_any_autocast,
    tells_versions,
    version_of,
)
from .between_steps import Between, BetweenSteps, Wait, between
from .clock import CudaClock, HostClock, Mark
from .compilations import compilations, graph_counters, graphs_in
from .host_values import MAX_KEPT, SentNumbers, Unseen
from .metrics import StepTime
from .model_state import States
from .observe import (
    BatchNote,
    Look,
    UsualBatch,
    are_like,
    is_grad_enabled,
)

_Tensor = torch.Tensor
_now_s = time.perf_counter
PIECE_S = 4.0
"""For how long steps with events are kept; without, until the next event."""
SLOW_STEP_S = 1.0
"""A longer step is sent at once: the cost of that is small beside it."""
_CLOSED_S = float("-inf")
_LARGEST_WHOLE = 2**53
"""Whole numbers below it are floats too."""
_LOOK_AT = 16
"""So many micro-batches are looked at together."""
MOST_MICRO_BATCHES = 32
"""Of a step that is like the next."""
_MOST_KEPT = _LOOK_AT + MOST_MICRO_BATCHES
_SMALL_BYTES = 256 << 10
"""Of a batch that is kept for a few steps."""


_NO_WAITS: Sequence[Wait] = ()
_NO_BATCH: Any = object()
"""In the place of one that was none: the model was traced."""


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
    waits: tuple[Sequence[Wait], ...]
    """For data."""
    forwards: tuple[int, ...]
    """Without gradients, before the first micro-batch."""
    last_end_s: tuple[float | None, ...]
    """When `log_step` of the step before was over."""
    seen: tuple[int, ...]
    """Micro-batches up to then."""

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
    states: States
    measured: bool
    warmup: bool


class Taken(NamedTuple):
    """Steps that were taken."""

    columns: Columns
    common: Common
    batches: list[list[BatchNote | None]]
    """Of each step; None for one that cannot be told."""
    between: list[Between]
    compilations: int
    """So many there were at the end of these steps."""


class UsualSteps:
    """Lives on the training thread; closed until the monitor opens it.

    `note_other` notes a micro-batch that is no usual one, some steps later; None where it cannot be told.
    `look_at_next` has the next step looked at when it comes: it is called with the last one that is taken.
    """

    __slots__ = (
        "_common",
        "_compilations",
        "_compilations_at_end",
        "_counters",
        "_kept",
        "_last_step",
        "_look_at_next",
        "_looks",
        "_mark",
        "_names",
        "_note_other",
        "_others",
        "_places",
        "_seen",
        "_sifted",
        "_steps",
        "_times",
        "_types",
        "_until_s",
        "_until_step",
        "autocast",
        "between",
        "is_busy",
        "keep",
        "keeps_batches",
        "own_s",
    )

    def __init__(
        self,
        note_other: Callable[[tuple[Any, ...], dict[str, Any]], BatchNote | None],
        look_at_next: Callable[[], None],
        between: BetweenSteps,
    ) -> None:
        self.between = between
        self._note_other, self._look_at_next = note_other, look_at_next
        self._until_s = _CLOSED_S
        self._compilations = self._last_step = self._until_step = self._places = 0
        self._steps: list[tuple[Any, ...]] = []
        self._names: list[Any] = []
        self._looks: tuple[Look, ...] = ()
        self._counters: Any = None
        self._compilations_at_end: int | None = None
        """So many there were when the last step of a piece was over, where that is known."""
        self._mark: Callable[[float], Mark] | None = None
        self._types: tuple[type, ...] = ()
        self._common: Common | None = None
        self._kept: deque[tuple[float, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=_MOST_KEPT)
        """Micro-batches nobody has looked at yet, and when they came."""
        self.keep = self._kept.append
        self.keeps_batches = False
        """Whether micro-batches of training may be given to `keep` as they come."""
        self.autocast = [False]
        """Whether usual batches run under autocast."""
        self._times: list[float | None] = []
        """When those came that were looked at, where that is known."""
        self._sifted = self._seen = 0
        """Micro-batches that were looked at, and those up to the last step that was taken."""
        self._others: dict[int, BatchNote | None] = {}
        """Those that are no usual ones, by their number."""
        self.own_s = 0.0
        """What taking steps has cost."""
        self.is_busy = False
        """Set by `took` until the caller is through: a signal's handler must not take steps from under it."""

    def open(
        self,
        until_s: float,
        *,
        batch: UsualBatch,
        places: int,
        common: Common,
        last_step: int,
        until_step: int,
        types: tuple[type, ...],
        compilations: int,
        is_compiled: bool,
        mark: Callable[[float], Mark] | None,
    ) -> None:
        """Take steps of such batches until then and before `until_step`, while `log_step` gets these `types`.

        So many arguments of a batch come by place. Whether a step compiled something is known of each where
        the model `is_compiled`, else of all together. Where the device cannot do without, `mark` marks the
        end of each step.
        """
        names, self._looks = list(batch.looks), tuple(batch.looks.values())
        self._names, self._places = names[places:], places
        size = sum(look.shape.numel() * look.dtype.itemsize for look in self._looks)
        has_graph = any(look.needs_grad for look in self._looks)
        self.keeps_batches = size <= _SMALL_BYTES and not has_graph
        self.autocast[0] = bool(batch.autocast)
        self._until_s, self._common = until_s, common
        self._last_step, self._types = last_step, types
        self._until_step = min(until_step, last_step + MAX_KEPT)
        self._counters = graph_counters() if is_compiled else None
        self._compilations, self._mark = compilations, mark
        self._compilations_at_end = None
        self._sifted = self._seen = 0
        self._times, self._others = [], {}

    def stop(self) -> tuple[list[BatchNote | None], float | None]:
        """Take no more: the micro-batches of the step under way, and when the first of them came."""
        self._until_s = _CLOSED_S
        self.is_busy = True
        try:
            self._look()
        finally:
            self.is_busy = False
        under_way = self._notes(self._seen, self._sifted)
        began_s = self._times[self._seen] if under_way else None
        del self._times[self._seen :]
        for number in range(self._seen, self._sifted):
            self._others.pop(number, None)
        self._sifted = self._seen
        return under_way, began_s

    def forget(self) -> None:
        """Keep nothing of what nobody has looked at."""
        self._kept.clear()

    def take(self) -> Taken | None:
        """The steps so far, which are then no longer here; None where there are none. Only after `stop`."""
        steps = self._steps
        if not steps:
            return None
        self._steps = []
        columns, common = Columns(*zip(*steps, strict=True)), self._common
        assert common is not None
        compiled = self._compilations
        if self._counters is None:
            compiled = compilations() if self._compilations_at_end is None else self._compilations_at_end
        if compiled != self._compilations:
            common = common._replace(warmup=True)  # nobody knows which of them it was
        seen = (0, *columns.seen)
        if self._others:
            batches = [self._notes(first, last) for first, last in pairwise(seen)]
        else:
            usual = {n: self._notes(0, n) for n in {last - first for first, last in pairwise(seen)}}
            batches = [usual[last - first] for first, last in pairwise(seen)]
        return Taken(
            columns,
            common,
            batches,
            [
                between(last_end_s, self._times[first], waits, forwards)
                for first, waits, forwards, last_end_s in zip(
                    seen[:-1], columns.waits, columns.forwards, columns.last_end_s, strict=True
                )
            ],
            compiled,
        )

    @property
    def last_forward_s(self) -> float | None:
        """When the last micro-batch of the step under way came; None before its first."""
        kept = self._kept
        if self._sifted + len(kept) <= self._seen:
            return None
        return kept[-1][0] if kept else self._times[-1]

    def _notes(self, first: int, last: int) -> list[BatchNote | None]:
        assert self._common is not None or first == last
        usual = None if self._common is None else self._common.batch
        if not self._others:
            return [usual] * (last - first)
        notes = [self._others.get(number, usual) for number in range(first, last)]
        return [note for note in notes if note is not _NO_BATCH]

    @property
    def is_open(self) -> bool:
        """Whether steps are taken."""
        return self._until_s != _CLOSED_S

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to stop and nothing to take."""
        return not (self.is_open or self._steps or self._kept)

    @property
    def oldest_s(self) -> float | None:
        """When the first step ended that is here; None where there is none."""
        steps = self._steps
        if not steps:
            return None
        end: Mark | float = steps[0][0]
        return end.host_s if isinstance(end, Mark) else end

    @property
    def waiting(self) -> int:
        """How many steps are here."""
        return len(self._steps)

    def has_as_last(self, step: Any) -> bool:
        """Whether the last step here is this one."""
        return bool(self._steps) and self._steps[-1][1] is step

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take a micro-batch of training; False where it is none, or no usual one."""
        if (
            self._until_s == _CLOSED_S
            or not is_grad_enabled()
            or backward_number() != -1
            or functorch_level() is not None
            or is_any_autocast() is not self.autocast[0]
        ):
            return False
        if not self.keeps_batches:
            if not self._is_usual(args, kwargs):
                return False
            args, kwargs = (), {}
        self.keep((_now_s(), args, kwargs))
        return True

    def _is_usual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            [*kwargs] == self._names
            and len(args) == self._places
            and are_like((*args, *kwargs.values()), self._looks)
        )

    def _look(self) -> None:
        """Look at what is kept; what is no usual batch is noted for itself, and none is taken after it."""
        kept = self._kept
        if len(kept) == _MOST_KEPT:  # more may have come, nobody knows of which steps
            self._others.update(dict.fromkeys(range(self._sifted, self._seen + 1)))
            self._times += [None] * (self._seen + 1 - self._sifted)
            self._sifted = self._seen + 1
            kept.clear()
        while kept:
            came_s, args, kwargs = kept[0]
            if self.keeps_batches and not self._is_usual(args, kwargs):
                is_made_up = any(isinstance(v, FakeTensor) for v in (*args, *kwargs.values()))
                self._others[self._sifted] = _NO_BATCH if is_made_up else self._note_other(args, kwargs)
                self._until_s = _CLOSED_S
            if not kept:  # a handler of a signal has closed the monitor meanwhile
                return
            kept.popleft()
            self._times.append(came_s)
            self._sifted += 1

    def took(
        self,
        now_s: float,
        step: Any,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        skip_remote: bool,
    ) -> bool:
        """Take a step that ends now; False where anything about it wants a look.

        With the last of a piece the next is looked at: that step then ends this piece and opens another.
        """
        self.is_busy = True
        between = self.between
        kept = len(self._kept)
        seen = self._sifted + kept
        is_last = now_s >= self._until_s
        if (
            self._until_s == _CLOSED_S
            or now_s - (between.end_s or 0.0) > SLOW_STEP_S
            or type(skip_remote) is not bool
            or (type(step), type(epoch), type(loss), type(grad_norm), type(learning_rate)) != self._types
            or not self._last_step < step < self._until_step
            or seen == self._seen
            or kept == _MOST_KEPT
            or (self._counters is not None and graphs_in(self._counters) != self._compilations)
        ):
            return False
        loss_version = grad_norm_version = 0
        try:
            if type(loss) is _Tensor:
                loss_version = version_of(loss)
                loss = loss.detach()
            if type(grad_norm) is _Tensor:
                grad_norm_version = version_of(grad_norm)
                grad_norm = grad_norm.detach()
        except RuntimeError:  # an inference tensor has no version
            return False
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
                between.waits or _NO_WAITS,
                between.forwards,
                between.end_s,
                seen,
            )
        )
        self._seen, self._last_step = seen, step
        if between.waits:
            between.waits = []
        between.forwards = 0
        if kept >= _LOOK_AT:
            self._look()
        if is_last or self._until_s == _CLOSED_S:
            self._until_s = _CLOSED_S
            if self._counters is None:
                self._compilations_at_end = compilations()
            self._look_at_next()
        between.end_s = end_s = _now_s()
        self.own_s += end_s - now_s
        return True


def can_be_taken(types: tuple[type, ...], may_be_unseen: Callable[[str], bool]) -> bool:
    """Whether steps may be taken of which `log_step` gets such arguments: tensors only of some names."""
    step, epoch, loss, grad_norm, learning_rate = types
    return (
        (step, learning_rate) == (int, float)
        and epoch in (int, float)
        and (loss is float or (loss is _Tensor and tells_versions and may_be_unseen("loss")))
        and (
            grad_norm in (float, type(None))
            or (grad_norm is _Tensor and tells_versions and may_be_unseen("grad_norm"))
        )
    )


def _seconds(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


class UsualPiece:
    """Steps that were taken, with what is common to them; made on the training thread, for the resolver's.

    Those numbers that are tensors are in `sent`, on their way to the host; here they are dropped.
    """

    def __init__(
        self,
        taken: Taken,
        last_step: int,
        begin: Mark | None,
        end: Mark,
        sent: dict[str, SentNumbers | None],
    ) -> None:
        self.columns, self.common = taken.columns.without(sent), taken.common
        self.batches, self._between = taken.batches, taken.between
        self._last_step, self._begin, self._end, self._sent = last_step, begin, end, sent
        self._ends_s: Sequence[float | None] | None = None
        self._marked = 0
        self._notes = {id(note): note for notes in self.batches for note in notes if note is not None}

    def is_ready(self, clock: HostClock | CudaClock) -> bool:
        """Whether the device is past all of it, and its numbers are there."""
        if self._ends_s is None:
            self._ends_s = self._device_s(clock)
            if self._ends_s is None:
                return False
            self._end.device_s = self._ends_s[-1]
        return all(sent is None or sent.copy.ready() for sent in self._sent.values()) and all(
            note.ready() for note in self._notes.values()
        )

    def known_batches(self) -> list[BatchNote]:
        """The micro-batches of all its steps, each once."""
        return list(self._notes.values())

    def _device_s(self, clock: HostClock | CudaClock) -> Sequence[float | None] | None:
        """When the device was at the end of each step; None until it is past the last."""
        ends = self.columns.end
        if not isinstance(ends[0], Mark):
            return clock.device_s(ends)  # type: ignore[arg-type]
        while self._marked < len(ends):
            if not clock.has_passed(ends[self._marked]):  # type: ignore[arg-type]
                return None
            self._marked += 1
        return [end.device_s for end in ends]  # type: ignore[union-attr]

    def ends_host_s(self) -> list[float]:
        """When the host was at the end of each step."""
        return [end.host_s if isinstance(end, Mark) else end for end in self.columns.end]

    def numbers(self) -> dict[str, Sequence[float | None]]:
        """What `log_step` was told, by metric; what could not be sent is missing."""
        columns, sent = self.columns, self._sent
        told: dict[str, Sequence[float | None]] = {
            "training/loss": columns.loss,
            "training/lr": columns.learning_rate,
            "training/epoch": [
                float(e) if type(e) is float or abs(e) < _LARGEST_WHOLE else None for e in columns.epoch
            ],
            "training/grad_norm": columns.grad_norm,
        }
        for name, numbers in sent.items():
            told[f"training/{name}"] = numbers.values() if numbers else [None] * len(columns.step)
        return told

    def times(self) -> list[StepTime]:
        """How long each step took."""
        steps, ends_s = self.columns.step, self._ends_s
        assert ends_s is not None
        begin_s = None if self._begin is None else self._begin.device_s
        return [
            StepTime(step - last, _seconds(begin_s, end_s), *between)
            for step, last, begin_s, end_s, between in zip(
                steps,
                (self._last_step, *steps[:-1]),
                (begin_s, *ends_s[:-1]),
                ends_s,
                self._between,
                strict=True,
            )
        ]
