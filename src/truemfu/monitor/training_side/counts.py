"""Counts: requested on either thread, run on the training thread between two steps.

    end of a step   a batch of a new shape ──────────────► request ┐
    row side        values that no form covers ──────────► request ┤
    end of a step   requests whose values have arrived ◄───────────┘
                        └─► a form in the model's state: read from disk, received, or fitted now
    row side        the form's count; the estimate where a request was postponed or refused

Nothing trains while a count runs, so the state it sets and restores affects nothing else. It never waits: a
request whose values are still on the device is left for a later step. A count is bounded by a time limit, and
beyond the first three all counts together by a share of the run's time.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from ...convention import Convention
from ...errors import SplitOverRanks, TruemfuError, TruemfuWarning, one_line
from ...flops import (
    PER_VALUES,
    AutocastState,
    Fetched,
    FlopCount,
    FlopModel,
    OtherCountRuns,
    SignalArrived,
    Supervision,
    TimeIsUp,
    ValuesPending,
    live,
    start_host_copy,
    uncounted_notice,
)
from ..config import MonitorConfig
from ..ranks.rank_link import RankLink
from .batch_notes import BatchNote
from .kept_forms import KeptInBackground, form_key
from .model_state import ModelState
from .quiet_stdout import quiet_stdout

Notice = Callable[[str], None]

_now_s = time.perf_counter
_FREE_COUNTS = 3
"""Counts per slot that run as soon as they are requested."""
_SHARE_OF_RUN = 0.01
"""The share of the run's time that all further counts may take."""
_LONGEST_HOLD_S = 10.0
"""How long rows wait for a count that has not begun; after that they have the estimate."""
_MAX_REQUESTS = 64
_MOST_TIMES_ENDED = 2
"""After a count was interrupted by this many signals, it is finished before further ones are handled."""
_MAX_DONE_LISTED = 64
_SMALL_BUFFER_BYTES = 1 << 20
_UNKNOWN = "unknown"
"""The key under which ranks get the reason why the work of their model is unknown."""
_ENDED_BEFORE = (
    "some FLOPs are estimated: the run ended before its batches were counted (between two steps, once their "
    "values have arrived); a longer run has the exact count"
)


class Status(Enum):
    """The state of a request."""

    OPEN = auto()
    POSTPONED = auto()
    ANSWERED = auto()
    REFUSED = auto()


@dataclass(eq=False)
class Request:
    """One micro-batch to be counted in one state of the model."""

    state: ModelState
    note: BatchNote
    is_ours: bool
    """Whether this rank counts it; if not, another rank does, or that is not decided yet."""
    wants_work: bool
    """Whether the work by shape is requested too."""
    status: Status = Status.OPEN
    requested_s: float = field(default_factory=lambda: _now_s())
    fetched: Fetched = field(default_factory=lambda: Fetched(start_host_copy))
    times_ended: int = 0
    """How often a signal has interrupted its count."""

    @property
    def autocast(self) -> AutocastState:
        return self.note.template.autocast

    def is_ready(self) -> bool:
        """Whether all values known to be needed have arrived."""
        return self.note.ready() and self.note.template.ready() and self.fetched.ready()


class Done(NamedTuple):
    """One count that ran: after which step, and for how long it held up the training."""

    step: int
    seconds: float


class Counts:
    """The requests of a run, and the counts made for them.

    `ask` and `find` are for both threads, `next_due` and `run` for the training thread, the rest for the row
    side. Forms are read and fitted under `lock`, which the row side never waits for.
    """

    def __init__(
        self,
        config: MonitorConfig,
        *,
        ranks: RankLink,
        notice: Notice,
        kept: KeptInBackground | None,
    ) -> None:
        self._limit_s = config.count_time_limit_s
        self.convention = Convention(attention=config.attention)  # type: ignore[arg-type]
        self._ranks, self._notice, self._kept = ranks, notice, kept
        self.lock = threading.Lock()
        self.is_at_work = False
        self.shares_are_known = True
        """Whether no count has found work that is split over ranks in an unknown way."""
        self._requests: OrderedDict[tuple[int, int], Request] = OrderedDict()
        self._waiting: deque[Request] = deque()
        self._slots: set[int | None] = set()
        self._born_s, self._not_before_s = _now_s(), 0.0
        self.done: deque[Done] = deque(maxlen=_MAX_DONE_LISTED)
        """The latest counts."""
        self.number_done = 0
        self.spent_s = 0.0
        """The time of all counts."""
        self._further_s = self._last_s = 0.0
        self.signals: list[int] = []
        """Signals that arrived during a count; the training thread delivers them afterwards."""
        self.notes: dict[str, None] = {}
        """The assumptions of the counts, each once."""
        self.values_matter = False
        """Whether the work of a batch was found to depend on its integers, beyond its shape."""
        self._unkept: dict[str, tuple[ModelState, AutocastState]] = {}

    def ask(self, state: ModelState, note: BatchNote, *, wants_work: bool = False) -> Request:
        """Request the count of a micro-batch."""
        self._slots.add(note.template.slot)
        is_ours = self._ranks.is_first or state.forms.get(note.template.autocast) is not None
        key = _key(state, note)
        request = self._requests.setdefault(key, Request(state, note, is_ours, wants_work))
        if wants_work and not request.wants_work:
            request.wants_work, request.status = True, Status.OPEN
        if request.status is Status.OPEN and request not in self._waiting:
            if len(self._waiting) >= _MAX_REQUESTS:
                self._waiting.popleft().status = Status.REFUSED
            if _now_s() < self._not_before_s:
                request.status = Status.POSTPONED  # rows need not wait for it
            self._waiting.append(request)
        while len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)
        return request

    def find(self, state: ModelState, note: BatchNote) -> Request | None:
        """The unanswered request for this micro-batch, if there is one."""
        return self._requests.get(_key(state, note))

    def holds_rows(self, request: Request) -> bool:
        """Whether rows wait for this count."""
        if request.status is not Status.OPEN:
            return False
        return self.is_at_work or _now_s() - request.requested_s < _LONGEST_HOLD_S

    @property
    def has_waiting(self) -> bool:
        """Whether `next_due` may find a request now."""
        return bool(self._waiting) and _now_s() >= self._not_before_s

    def next_due(self) -> Request | None:
        """The next request whose values have arrived, that no form covers, and that may run now."""
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.status in (Status.ANSWERED, Status.REFUSED):
                continue
            if not (request.is_ours and request.is_ready()):
                self._waiting.append(request)
            elif request.state.forms.get(request.autocast, True) is None:  # it cannot be counted
                self.refuse(request)
            elif self._is_known(request):
                self._answer(request)
            elif self._is_within_share():
                request.status = Status.OPEN
                return request
            else:
                request.status = Status.POSTPONED
                self._waiting.append(request)
        return None

    def run(self, request: Request, step: int) -> None:
        """Count now, on this thread, between two steps; exceptions of the model do not propagate."""
        began_s, is_over = _now_s(), True
        supervision = Supervision(
            limit_s=self._limit_s,
            fetched=request.fetched,
            end_at_signals=request.times_ended < _MOST_TIMES_ENDED,
        )
        self._ranks.count_begins(step)
        try:
            with self.lock:
                self.is_at_work = True
                try:
                    with supervision, request.autocast.applied(), quiet_stdout():
                        is_over = self._count(request)
                finally:
                    self.is_at_work = False
            self._answer(request)
        except ValuesPending as pending:
            request.fetched.start(_values_on_device(request.state.model, weights=pending.is_weight))
            self._waiting.append(request)
            is_over = False
        except SignalArrived:
            request.times_ended += 1
            self._waiting.append(request)
            is_over = False
        except OtherCountRuns:
            self._waiting.append(request)
            is_over = False
        except TimeIsUp:
            self._refuse(request, self._too_long)
        except SplitOverRanks as error:
            self.shares_are_known = False
            reason = f"there is no MFU: {error}"
            request.state.estimators[request.autocast] = None  # an estimate would not know better
            self._refuse(request, reason, {_UNKNOWN: reason})
        except TruemfuWarning:  # a filter turned it into an error: `with_warnings_collected` tries again
            self._waiting.appendleft(request)
            raise
        except BaseException as error:
            if supervision.raised is not None:
                raise
            failed = f"the model cannot be counted, its FLOPs are estimated: {one_line(error)}"
            self._refuse(request, self._too_long if supervision.is_late else failed)
        finally:
            self.signals += supervision.signals
            self._took(step, _now_s() - began_s, is_over=is_over)

    def received(self, state: ModelState, autocast: AutocastState, data: dict[str, Any]) -> bool:
        """Use the form that another rank has fitted; False if it has none, or does not match this model."""
        if _UNKNOWN in data:
            self.shares_are_known = False
            state.forms[autocast] = state.estimators[autocast] = None
            self._notice(data[_UNKNOWN])
            return False
        try:
            form = FlopModel.from_export(state.model, data)
        except TruemfuError as error:
            self._notice(f"the count of another rank cannot be used: {one_line(error)}")
            return False
        state.forms[autocast] = form
        return True

    def refuse(self, request: Request) -> None:
        """Decline to count this micro-batch; its rows have the estimate."""
        request.status = Status.REFUSED

    @property
    def _too_long(self) -> str:
        return (
            f"counting takes longer than {self._limit_s:g} s, so the FLOPs are estimated: for an exact count "
            "raise monitoring.count_time_limit_s"
        )

    def end(self) -> None:
        """The run is over: add a note about counts that were never made."""
        left = [r for r in self._requests.values() if r.status in (Status.OPEN, Status.POSTPONED)]
        if not left or not self.lock.acquire(blocking=False):  # a handler may close in the middle of a count
            return
        try:
            if not all(map(self._is_counted, left)):
                self.notes[_ENDED_BEFORE] = None
        finally:
            self.lock.release()

    def keep(self) -> None:
        """On the row side: save new forms to the run's folder."""
        if self._kept is None or not self._unkept or not self.lock.acquire(blocking=False):
            return
        try:
            unkept, self._unkept = self._unkept, {}
            forms = {key: state.forms.get(autocast) for key, (state, autocast) in unkept.items()}
            exports = {
                key: form.export()
                for key, form in forms.items()
                if form is not None and not form.reads_model_values
            }
        finally:
            self.lock.release()
        for key, data in exports.items():
            self._kept.save(key, data)

    def _is_known(self, request: Request) -> bool:
        if request.wants_work and request.note.template not in request.state.works:
            return False
        with self.lock:
            return self._is_counted(request)

    def _is_counted(self, request: Request) -> bool:
        form, batch = request.state.forms.get(request.autocast), request.note.example()
        return form is not None and (batch is None or form.knows(batch))

    @property
    def _free_counts(self) -> int:
        return _FREE_COUNTS * max(1, len(self._slots))

    def _is_within_share(self) -> bool:
        """Whether another count stays within its share of the run's time; if not, sets when one will."""
        if self.number_done < self._free_counts:
            return True
        self._not_before_s = self._born_s + (self._further_s + self._last_s) / _SHARE_OF_RUN
        return _now_s() >= self._not_before_s

    def _took(self, step: int, seconds: float, *, is_over: bool) -> None:
        """Record the time of a count; one that is not over will be tried again."""
        self.spent_s += seconds
        if not is_over:
            return
        self.done.append(Done(step, seconds))
        self.number_done += 1
        self._last_s = seconds
        if self.number_done > self._free_counts:
            self._further_s += seconds

    def _count(self, request: Request) -> bool:
        """Answer a request; whether that required a count."""
        state, autocast, batch = request.state, request.autocast, request.note.example()
        if batch is None:
            return False
        form, has_counted = state.forms.get(autocast), request.wants_work
        if form is None:
            asked = rank_key(state, autocast, self.convention)
            self._ranks.ask(asked, state.structure)  # rank 0 thereby announces what it counts
            form = self._kept_form(state, autocast)
            if form is None:
                form = FlopModel.fit(state.model, batch, convention=self.convention)
                has_counted = True
            state.forms[autocast] = form
            self._ranks.publish(asked, state.structure, form.export())
        has_counted = has_counted or not form.knows(batch)
        count = form(batch)
        self._note(count, form)
        if request.wants_work:
            state.works[request.note.template] = form.step_work(batch)
        if self._kept is not None and (key := self._kept_key(state, autocast)) is not None:
            self._unkept[key] = state, autocast
        return has_counted

    def _note(self, count: FlopCount, form: FlopModel) -> None:
        self.notes.update(dict.fromkeys(count.notes))
        if form.reads_model_values:
            self.notes["the model's work depends on its buffers: FLOPs are those at the count"] = None
        if PER_VALUES in count.method:
            self.values_matter = True
            self._notice(
                "the model's work depends on the values of a batch (a mask, labels, a number): each "
                "step has the FLOPs of the first batch of its shape"
            )
        text = uncounted_notice(count)
        if text is not None:
            self._notice(text)

    def _kept_form(self, state: ModelState, autocast: AutocastState) -> FlopModel | None:
        """The form that an earlier run in this folder fitted to the same model."""
        key = self._kept_key(state, autocast)
        data = None if self._kept is None or key is None else self._kept.load(key)
        if data is None:
            return None
        try:
            return FlopModel.from_export(state.model, data)
        except TruemfuError:  # from another version after all: count again
            return None

    def _kept_key(self, state: ModelState, autocast: AutocastState) -> str | None:
        if self._kept is None or state.identity is None:
            return None
        return form_key(state.identity, autocast=str(autocast), attention=self.convention.attention)

    def _answer(self, request: Request) -> None:
        request.status = Status.ANSWERED
        self._requests.pop(_key(request.state, request.note), None)

    def _refuse(self, request: Request, reason: str, data: dict[str, Any] | None = None) -> None:
        """Give the reason, and publish to other ranks that there is no count, with this data about it."""
        self.refuse(request)
        if request.wants_work:
            request.state.works.setdefault(request.note.template, reason)
        if request.autocast not in request.state.forms:
            request.state.forms[request.autocast] = None
            key = rank_key(request.state, request.autocast, self.convention)
            self._ranks.publish(key, request.state.structure, data or {})
        self._notice(reason)


def rank_key(state: ModelState, autocast: AutocastState, convention: Convention) -> str:
    """The key under which ranks exchange a form."""
    return f"{state.number}/{autocast}/{convention.attention}"


def _key(state: ModelState, note: BatchNote) -> tuple[int, int]:
    """Batches without values of their own share the request of their shape."""
    return id(state), id(note if note.values else note.template)


def _values_on_device(model: torch.nn.Module, *, weights: bool) -> Iterable[torch.Tensor]:
    """The values that a count is likely to need next after it needed one of the model's."""
    for tensor in (*model.parameters(), *model.buffers()):
        value = live(tensor)
        is_weight = isinstance(value, torch.nn.Parameter)
        if value.is_cuda and (weights or (not is_weight and value.nbytes <= _SMALL_BUFFER_BYTES)):
            yield value
